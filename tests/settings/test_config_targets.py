"""`_target_` is looked up in source files; nothing is imported on the way."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agenttrain.utils.locate import Kind, Target, look_up


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `lookup_pkg` that would fail if it were imported."""
    folder = tmp_path / "lookup_pkg"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def write(package: Path, source: str) -> None:
    (package / "mod.py").write_text(source)


def test_a_function_and_its_parameters(package: Path) -> None:
    write(package, "import torch_of_the_user\ndef find(a, /, b, *, c=1): ...\n")
    found = look_up("lookup_pkg.mod.find")
    assert found == Target(parameters=("a", "b", "c"), kind=Kind.function)
    assert "lookup_pkg" not in sys.modules


def test_a_class_takes_what_its_init_takes(package: Path) -> None:
    write(package, "class Find:\n    def __init__(self, table, *, limit=3): ...\n")
    assert look_up("lookup_pkg.mod.Find").parameters == ("table", "limit")


@pytest.mark.parametrize(
    "source",
    [
        "def find(**anything): ...",
        "@decorated\ndef find(a): ...",
        "class find(Base): ...",
        "@dataclass\nclass find:\n    a: int",
        "from elsewhere import find",
        "find = partial(other, 1)",
        "if condition:\n    def find(**k): ...",
        "try:\n    from fast import find\nexcept ImportError:\n    find = None",
        "from elsewhere import *",
        "def __getattr__(name): ...",
        "this is no Python",
    ],
)
def test_what_cannot_be_known_is_not_refused(package: Path, source: str) -> None:
    write(package, source)
    found = look_up("lookup_pkg.mod.find")
    assert (found.problem, found.parameters) == (None, None)


@pytest.mark.parametrize(
    ("head", "kind"),
    [
        ("class Find:", Kind.whole_class),
        ("class Find(Base):", Kind.part_class),
        ("@dataclass\nclass Find:", Kind.part_class),
    ],
)
def test_the_methods_of_a_class(package: Path, head: str, kind: Kind) -> None:
    write(package, f"{head}\n    size: int = 1\n    def a(self): ...\n    async def b(self): ...\n")
    found = look_up("lookup_pkg.mod.Find")
    assert (found.kind, found.methods) == (kind, ("a", "b"))


def test_what_a_decorator_makes_of_a_function_is_not_known(package: Path) -> None:
    write(package, "@decorated\ndef find(a): ...\n")
    assert look_up("lookup_pkg.mod.find").kind is None


def test_a_name_that_is_not_there(package: Path) -> None:
    write(package, "def find(): ...\nlookup_table: dict = {}\n")
    problem = look_up("lookup_pkg.mod.fnid").problem
    assert problem == "lookup_pkg.mod has no 'fnid' (did you mean 'find'?)"


def test_a_module_that_is_not_there(package: Path) -> None:
    assert "there is no module 'no_such_pkg'" in str(look_up("no_such_pkg.mod.find").problem)
    # The package is there, the module in it is not: it is looked for as a name of the package.
    assert look_up("lookup_pkg.nod.find").problem == "lookup_pkg has no 'nod'"


def test_a_module_is_no_target(package: Path) -> None:
    write(package, "def find(): ...\n")
    assert "names a module" in str(look_up("lookup_pkg.mod").problem)


@pytest.mark.parametrize("path", [None, 7, "", "a..b", "a b.c", "../a.py"])
def test_what_is_no_dotted_path(path: object) -> None:
    assert "expected a dotted path" in str(look_up(path).problem)


def test_built_in_and_compiled_modules_are_trusted() -> None:
    assert look_up("math.hypot") == Target()
    assert look_up("sys.exit") == Target()
