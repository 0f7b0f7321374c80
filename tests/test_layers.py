"""A module imports from its own folder and from lower layers: never sideways, never up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "agenttrain"
LAYERS = (
    ("types",),
    ("utils",),
    ("config",),
    ("algorithms", "chat", "tools", "data", "engines", "tracking"),
    ("rewards", "environments"),
    ("rollout", "training", "agents", "serving"),
    ("health", "settings"),
    ("evaluation",),
    ("trainer",),
    ("runs",),
    ("launch",),
    ("commands",),
    ("cli",),
)
"""Folders and files of agenttrain/, lowest first; those of one line do not know each other.

`config` is every `<capability>/config.py`: settings know nouns, utils and each other.
"""
HEAVY = {"torch", "transformers", "accelerate", "datasets"}
HEAVY |= {"trackio", "wandb", "tensorboard", "mlflow"}
"""What a configuration error must not wait for."""

RANK = {unit: rank for rank, units in enumerate(LAYERS) for unit in units}
MODULES = {
    ".".join(("agenttrain", *file.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): file
    for file in sorted(PACKAGE.rglob("*.py"))
}


def imports(source: str) -> Iterator[str]:
    """Every module that a source names in an import, in functions and TYPE_CHECKING blocks too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # `from agenttrain.rollout import collect` names a module, `… import run` a function.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else str(node.module) for name in names)


def folder(module: str) -> str | None:
    """`agenttrain.chat.chat` -> `chat`; None for the package itself and others' modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "agenttrain" and len(parts) > 1 else None


def unit(module: str) -> str | None:
    """The module's line in LAYERS: its folder, or `config`."""
    return "config" if module.count(".") > 1 and module.endswith(".config") else folder(module)


def breaks(importer: str, source: str) -> list[str]:
    """Modules of this package that `importer` may not know."""
    layer = unit(importer)
    assert layer is not None

    def allowed(module: str) -> bool:
        other = unit(module)
        if other is None or (layer == "config" == other):
            return True
        if layer != "config" and folder(module) == folder(importer):
            return True
        return RANK[other] < RANK[layer]

    return sorted({module for module in imports(source) if not allowed(module)})


def test_every_folder_has_a_layer() -> None:
    units = {unit(module) for module in MODULES} - {None, "conf"}
    assert units <= set(RANK), "a new folder or file: give it a place in LAYERS"


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module)])
def test_imports_point_down(module: str) -> None:
    assert breaks(module, MODULES[module].read_text()) == []


def test_the_check_finds_sideways_upward_and_hidden_imports() -> None:
    tool = "agenttrain.tools.toolbox"
    assert breaks("agenttrain.chat.x", f"from {tool} import Toolbox") == [tool]
    settings = "agenttrain.settings.run_config"
    assert breaks("agenttrain.types", f"import {settings}") == [settings]
    loop = "agenttrain.rollout.loop"
    assert breaks("agenttrain.engines.x", f"def f():\n  import {loop}") == [loop]
    assert breaks("agenttrain.tools.config", f"from {tool} import Toolbox") == [tool]
    assert breaks("agenttrain.chat.x", "from agenttrain.types import Task\nimport torch") == []
    assert breaks("agenttrain.chat.x", "from agenttrain.tools.config import ToolLimits") == []


def test_no_module_imports_itself_through_others() -> None:
    graph = {
        module: {name for name in imports(file.read_text()) if name in MODULES} - {module}
        for module, file in MODULES.items()
    }
    while leaves := [module for module, known in graph.items() if not known]:
        for leaf in leaves:
            del graph[leaf]
        for known in graph.values():
            known.difference_update(leaves)
    assert graph == {}, f"a cycle is among {sorted(graph)}"


@pytest.mark.parametrize(
    "module",
    [module for module in MODULES if unit(module) in ("types", "utils", "config", "cli")],
)
def test_settings_and_command_line_import_nothing_heavy(module: str) -> None:
    assert {name.split(".")[0] for name in imports(MODULES[module].read_text())} & HEAVY == set()
