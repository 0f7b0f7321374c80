"""A module imports from its own folder and from lower layers: never sideways, never up."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "agenttrain"
LAYERS = (
    ("types", "threads", "output"),
    ("signals",),
    ("config",),
    ("chat", "tools", "environments", "data", "rewards", "engine", "tracking", "algorithms"),
    ("rollout", "training", "sweep", "slurm"),
    ("evaluate", "crash", "guards", "plan", "stall"),
    ("watchdog",),
    ("trainer",),
    ("runs",),
    ("recorded", "show_data", "show_tools"),
    ("replay", "replay_crash", "rescore"),
    ("cli_check", "cli_recorded", "cli_sweep"),
    ("processes", "submit"),
    ("cli",),
)
"""Folders and files of agenttrain/, lowest first; those of one line do not know each other."""
HEAVY = {"torch", "transformers", "accelerate", "datasets", "trackio"}
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


def unit(module: str) -> str | None:
    """`agenttrain.chat.template` -> `chat`; None for the package itself and others' modules."""
    parts = module.split(".")
    return parts[1] if parts[0] == "agenttrain" and len(parts) > 1 else None


def breaks(importer: str, source: str) -> list[str]:
    """Units that `importer` may not know."""
    mine = unit(importer)
    assert mine is not None
    known = {unit(name) for name in imports(source)} - {None, mine}
    allowed = {other for other in RANK if RANK[other] < RANK[mine]}
    return sorted(other for other in known if other not in allowed)


def test_every_folder_has_a_layer() -> None:
    units = {unit(module) for module in MODULES} - {None, "conf"}
    assert units <= set(RANK), "a new folder or file: give it a place in LAYERS"


@pytest.mark.parametrize("module", [module for module in MODULES if unit(module)])
def test_imports_point_down(module: str) -> None:
    assert breaks(module, MODULES[module].read_text()) == []


def test_the_check_finds_sideways_upward_and_hidden_imports() -> None:
    assert breaks("agenttrain.chat.x", "from agenttrain.tools.toolbox import Toolbox") == ["tools"]
    assert breaks("agenttrain.types", "import agenttrain.config.schema") == ["config"]
    assert breaks("agenttrain.engine.x", "def f():\n  import agenttrain.rollout.loop") == [
        "rollout"
    ]
    assert breaks("agenttrain.chat.x", "from agenttrain.types import Task\nimport torch") == []


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
    "module", [module for module in MODULES if unit(module) in ("types", "config", "cli")]
)
def test_settings_and_command_line_import_nothing_heavy(module: str) -> None:
    assert {name.split(".")[0] for name in imports(MODULES[module].read_text())} & HEAVY == set()
