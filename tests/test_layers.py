"""A module imports from its own folder and from lower layers: never sideways, never up."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "agenttrain"
LAYERS = (
    ("types",),
    ("utils",),
    ("config",),
    ("runtimes",),
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


SOURCES = {module: file.read_text() for module, file in MODULES.items()}


@cache
def imports(source: str) -> tuple[str, ...]:
    """Every module that a source names in an import, in functions and TYPE_CHECKING blocks too."""
    names = list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            assert node.module is not None
            # `from agenttrain.rollout import collect` names a module, `… import run` a function.
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in MODULES else node.module for name in full]
    return tuple(names)


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


def test_imports_point_down() -> None:
    problems = {module: breaks(module, SOURCES[module]) for module in MODULES if unit(module)}
    assert {module: names for module, names in problems.items() if names} == {}


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
        module: {name for name in imports(source) if name in MODULES} - {module}
        for module, source in SOURCES.items()
    }
    while leaves := [module for module, known in graph.items() if not known]:
        for leaf in leaves:
            del graph[leaf]
        for known in graph.values():
            known.difference_update(leaves)
    assert graph == {}, f"a cycle is among {sorted(graph)}"


def test_settings_and_command_line_import_nothing_heavy() -> None:
    light = [m for m in MODULES if unit(m) in ("types", "utils", "config", "cli")]
    heavy = {m: {name.split(".")[0] for name in imports(SOURCES[m])} & HEAVY for m in light}
    assert {module: names for module, names in heavy.items() if names} == {}


def test_every_test_file_can_be_run_alone() -> None:
    """Pytest finds the test files of a folder only once it has collected one of that folder."""
    files = {file.stem: file for file in Path(__file__).parent.rglob("test_*.py")}
    foreign = [
        (file.name, module)
        for file in files.values()
        for module in imports(file.read_text())
        if module in files and files[module].parent != file.parent
    ]
    assert foreign == []
