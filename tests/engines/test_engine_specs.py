"""Every bundled engine is one folder: its name is written nowhere else in the package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import agenttrain
from agenttrain.engines.config import DEFAULT_ENGINE, EngineSettings
from agenttrain.engines.registry import names_with, specs

PACKAGE = Path(agenttrain.__file__).parent
ALLOWED = {
    ("engines/config.py", "transformers"): "the default engine",
    ("settings/messages.py", "vllm"): "answers to TRL's `use_vllm` and verl's `rollout.name`",
    ("settings/messages.py", "transformers"): "the same",
    ("tracking/run_folder.py", "transformers"): "the package, whose version is recorded",
    ("commands/templates.py", "transformers"): "the package, whose version is recorded",
    ("commands/doctor.py", "transformers"): "the package, which is examined",
    ("commands/verbs.py", "vllm"): "the help of serve, whose engines it names",
    ("engines/vllm_server/spec.py", "vllm"): "the package, and the engine to take instead",
    ("engines/vllm_server/server_process.py", "vllm"): "has the arguments of engine=vllm",
    ("engines/vllm_server/server_memory.py", "vllm"): "takes the memory of engine=vllm",
    **{
        (file, "vllm_server"): "servers of roles (judge, user, teacher), which have one kind"
        for file in (
            *("commands/plan/other_gpus.py", "runs/roles.py", "runs/setup.py", "runs/teacher.py"),
            *("settings/machine.py", "settings/role_checks.py", "settings/run_config.py"),
        )
    },
    ("commands/export.py", "transformers"): "the format of an export",
    ("commands/verbs.py", "transformers"): "a format of an export",
    ("commands/model_card.py", "transformers"): "the library that loads an export",
}


def written(source: str, name: str) -> Iterator[str]:
    """Imports, attributes and texts of a module that name an engine; docstrings may."""
    tree = ast.parse(source)
    docstrings = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if f"agenttrain.engines.{name}." in f"{node.module}.":
                yield node.module
        elif isinstance(node, ast.Attribute) and node.attr == name:
            yield f".{name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            named = rf"engine(=|\.name=|\.){name}\b"
            if id(node) not in docstrings and (text == name or re.search(named, text)):
                yield text


def test_no_module_outside_an_engines_folder_names_it() -> None:
    outside = []
    for file in sorted(PACKAGE.rglob("*.py")):
        place = file.relative_to(PACKAGE).as_posix()
        source = file.read_text()
        for name in specs():
            elsewhere = not place.startswith(f"engines/{name}/") and (place, name) not in ALLOWED
            if elsewhere and name in source:
                outside += [f"{place}: {text}" for text in written(source, name)]
    assert outside == []


def test_the_check_finds_comparisons_imports_and_messages() -> None:
    assert list(written('if engine.name == "vllm": pass', "vllm")) == ["vllm"]
    assert list(written("size = config.engine.vllm.size", "vllm")) == [".vllm"]
    module = "agenttrain.engines.vllm.engine"
    assert list(written(f"def f():\n    from {module} import VllmEngine", "vllm")) == [module]
    assert list(written('raise ValueError("set engine=vllm")', "vllm")) == ["set engine=vllm"]
    assert list(written('def f():\n    """As vllm does, engine=vllm."""', "vllm")) == []


def test_the_bundled_engines() -> None:
    assert list(specs()) == ["transformers", "vllm", "vllm_server"]
    assert DEFAULT_ENGINE in specs()
    assert names_with(grammars=True) == "engine=vllm|vllm_server"
    assert names_with(own_weights=True) == "engine=vllm|vllm_server"
    assert names_with(fleet=True) == "engine=vllm_server"
    assert names_with(deterministic=True) == "engine=transformers"


@pytest.mark.parametrize("name", specs())
def test_settings_have_the_folders_name_and_a_default_for_each_key(name: str) -> None:
    settings = specs()[name].settings()
    assert settings.name == name
    assert isinstance(settings, EngineSettings)
    assert {f.name for f in fields(EngineSettings)} <= {f.name for f in fields(settings)}
