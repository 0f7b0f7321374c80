"""`_target_`: the object that a dotted path names, and what it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from agenttrain.utils.locate import call_parameters, locate, parameter_names

NUMBERS = count()


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that writes the module `mod` of a new package, whose name it returns."""
    name = f"lookup_{next(NUMBERS)}"

    def written(source: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
        (tmp_path / name / "mod.py").write_text(source)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    return written


FALLBACK = """
try:
    from no_such_fast import find
except ImportError:
    def find(a): ...
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def find(a, /, b, *, c=1): ...", ("b", "c")),
        ("class find:\n    def __init__(self, table, *, limit=3): ...", ("table", "limit")),
        ("class find: ...", ()),
        ("from dataclasses import dataclass\n@dataclass\nclass find:\n    a: int", ("a",)),
        ("class Base:\n    def __init__(self, size): ...\nclass find(Base): ...", ("size",)),
        ("def find(**anything): ...", None),
        (FALLBACK, ("a",)),
    ],
)
def test_the_names_that_a_target_takes(
    write: Callable[[str], str], source: str, expected: tuple[str, ...] | None
) -> None:
    target = locate(f"{write(source)}.mod.find", key="tools.find._target_")
    assert parameter_names(target) == expected


def test_compiled_code_without_a_signature_may_take_anything() -> None:
    assert parameter_names(locate("builtins.min", key="tools.min._target_")) is None


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def find(): ...", 0),
        ("def find(*args): ...", 1),
        ("class find:\n    def __call__(self): ...", 0),
        ("class find:\n    def __call__(self, rollout): ...", 1),
        ("class find: ...", None),
    ],
)
def test_the_parameters_of_a_call(
    write: Callable[[str], str], source: str, expected: int | None
) -> None:
    target = locate(f"{write(source)}.mod.find", key="reward.find._target_")
    assert call_parameters(target) == expected


@pytest.mark.parametrize(
    ("source", "path", "problem"),
    [
        ("def find(): ...", "mod.fnid", "mod has no 'fnid' (did you mean 'find'?)"),
        ("", "nod.find", "has no 'nod'"),
        ("", "mod", "names a module; add the function or class in it"),
        ("1 / 0", "mod.find", "importing it failed: ZeroDivisionError: division by zero"),
        ("import no_such_pkg", "mod.find", "importing it failed: No module named 'no_such_pkg'"),
        ("this is no Python", "mod.find", "importing it failed: SyntaxError: invalid syntax"),
        ("\nimport sys\nsys.exit(3)", "mod.find", "importing it failed: SystemExit: 3 (own.py:3)"),
        ("\nimport json\njson.loads('')", "mod.find", "line 1 column 1 (char 0) (own.py:3)"),
        ("def f():\n    1 / 0\nf()", "mod.find", "division by zero (own.py:2)"),
        ("\nimport no_such_pkg", "mod.find", "No module named 'no_such_pkg' (own.py:2)"),
    ],
)
def test_a_path_that_names_nothing(
    write: Callable[[str], str], source: str, path: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=r"^tools\.find\._target_=lookup_") as caught:
        locate(f"{write(source)}.{path}", key="tools.find._target_")
    assert problem in re.sub(r"\(/.*/mod\.py:", "(own.py:", str(caught.value))


def test_a_name_without_its_module() -> None:
    with pytest.raises(ValueError, match=r"give module\.function, e\.g\. my_module\.softclip"):
        locate("softclip", key="algorithm.objective._target_")


def test_a_package_that_is_not_installed() -> None:
    with pytest.raises(ValueError, match="there is no module 'no_such_pkg'; install the package"):
        locate("no_such_pkg.mod.find", key="tools.find._target_")


@pytest.mark.parametrize("path", [None, 7, "", "a..b", "a b.c", "../a.py"])
def test_what_is_no_dotted_path(path: object) -> None:
    with pytest.raises(ValueError, match="expected a dotted path"):
        locate(path, key="tools.find._target_")
