"""`import agenttrain`: the public names, and that they cost nothing until one is asked for."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import agenttrain

SOURCE = Path(agenttrain.__file__)

LOADED_BY_IMPORT = """
import sys
before = set(sys.modules)
import agenttrain
names = {name.split(".")[0] for name in set(sys.modules) - before}
import json
print(json.dumps(sorted(names - {"agenttrain"} - sys.stdlib_module_names)))
"""


def test_the_import_loads_the_standard_library_alone() -> None:
    output = subprocess.run(
        [sys.executable, "-c", LOADED_BY_IMPORT], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(output) == []


def test_nouns_and_tool_errors_need_no_torch() -> None:
    code = "import sys; from agenttrain import Task, ToolFailure; print('torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert output == "False\n"


def test_type_checkers_see_the_names_that_the_interpreter_sees() -> None:
    typed = {
        alias.asname: statement.module
        for block in ast.parse(SOURCE.read_text()).body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
    assert typed == agenttrain._MODULES


@pytest.mark.parametrize("name", agenttrain.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(agenttrain, name) is vars(sys.modules[agenttrain._MODULES[name]])[name]
    assert name in dir(agenttrain)


def test_another_name_is_refused() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Tsak'"):
        _ = agenttrain.Tsak
