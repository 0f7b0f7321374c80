"""`_target_`: a dotted path in a YAML -> the Python object that it names, or its source.

`look_up` reads the source without an import, because finding a typo must not import torch. It gives
the benefit of the doubt to what cannot be known this way (compiled modules, names made at run
time); `locate` imports it later.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agenttrain.utils.moved import MOVED
from agenttrain.utils.names import did_you_mean

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Kind(StrEnum):
    """Kind of a name, by its source file."""

    function = "function"
    whole_class = "whole_class"
    """A class whose own source has all of its methods."""
    part_class = "part_class"
    """A class with bases or decorators, which may add to its methods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Facts about the object behind a dotted path."""

    problem: str | None = None
    """Mistake in the path; None: none that we can see."""
    parameters: tuple[str, ...] | None = None
    """Names that it can be given; None: unknown, or any."""
    kind: Kind | None = None
    """None: unknown."""
    methods: tuple[str, ...] = ()
    """Methods in a class's own source, `__call__` and the like included."""
    takes_nothing: bool = False
    """A call of it takes no argument, or, of a class, a call of its instances."""


def look_up(path: object) -> Target:
    """Look up ``my_pkg.my_module.my_name`` in the source files."""
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        return Target(problem="expected a dotted path such as my_pkg.my_module.my_name")
    if path in MOVED:
        return Target(problem=f"is {MOVED[path]} now")
    parts = path.split(".")
    spec, used = _longest_module(parts)
    if spec is None:
        return Target(
            problem=f"there is no module {parts[0]!r}; install the package, or put its folder on "
            "PYTHONPATH"
        )
    if used == len(parts):
        return Target(problem="names a module; add the function or class in it")
    if spec.origin is None or not spec.origin.endswith(".py"):
        return Target()
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError):
        return Target()
    return _in_module(tree, parts[:used], parts[used:])


def _longest_module(parts: Sequence[str]) -> tuple[ModuleSpec | None, int]:
    """Return the innermost module of the path and how many parts name it.

    importlib.util.find_spec imports the parents of a dotted name; PathFinder does not.
    """
    try:
        spec = find_spec(parts[0])
    except ValueError:  # a module without a spec, such as __main__
        return None, 0
    for used in range(1, len(parts)):
        locations = None if spec is None else spec.submodule_search_locations
        inner = PathFinder.find_spec(parts[used], list(locations)) if locations else None
        if inner is None:
            return spec, used
        spec = inner
    return spec, len(parts)


def _in_module(tree: ast.Module, module: Sequence[str], names: Sequence[str]) -> Target:
    definitions = dict(_definitions(tree.body))
    if "*" in definitions or "__getattr__" in definitions:
        return Target()
    if names[0] not in definitions:
        hint = did_you_mean(names[0], (name for name in definitions if not name.startswith("_")))
        return Target(problem=f"{'.'.join(module)} has no {names[0]!r}{hint}")
    node = definitions[names[0]]
    if len(names) > 1 or node is None:
        return Target()
    if not isinstance(node, ast.ClassDef):
        kind = None if node.decorator_list else Kind.function
        nothing = _takes_nothing(node, 0)
        return Target(parameters=_parameters(node), kind=kind, takes_nothing=nothing)
    called = next((n for name, n in _definitions(node.body) if name == "__call__"), None)
    return Target(
        parameters=_parameters(node),
        kind=Kind.part_class if node.bases or node.decorator_list else Kind.whole_class,
        methods=tuple(
            name
            for name, inner in _definitions(node.body)
            if not isinstance(inner, ast.ClassDef) and inner is not None
        ),
        takes_nothing=_takes_nothing(called, 1),
    )


def _takes_nothing(node: Definition | None, skip: int) -> bool:
    """Return whether a plain function has no parameter after the first `skip`."""
    if node is None or isinstance(node, ast.ClassDef) or node.decorator_list:
        return False
    arguments = node.args
    several = arguments.vararg or arguments.kwarg or arguments.kwonlyargs
    return not several and len([*arguments.posonlyargs, *arguments.args]) <= skip


def _definitions(body: Sequence[ast.stmt]) -> Iterator[tuple[str, Definition | None]]:
    """Yield names that a module's statements bind; those of `if` and `try` blocks too."""
    for node in body:
        if isinstance(node, Definition):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.split(".")[0], None) for alias in node.names)
        else:
            assigned = [getattr(node, "target", None)]
            for target in node.targets if isinstance(node, ast.Assign) else assigned:
                names = [] if target is None else ast.walk(target)
                yield from ((name.id, None) for name in names if isinstance(name, ast.Name))
            for block in ("body", "orelse", "handlers", "finalbody"):
                for inner in getattr(node, block, ()):
                    nested = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _definitions(nested)


def _parameters(node: Definition) -> tuple[str, ...] | None:
    """Return names that may be passed by keyword; None: any, or not to be seen here."""
    if isinstance(node, ast.ClassDef):
        init = next((n for name, n in _definitions(node.body) if name == "__init__"), None)
        plain = not (node.decorator_list or node.bases or node.keywords)
        if plain and all(name != "__init__" for name, _ in _definitions(node.body)):
            return ()
        if node.decorator_list or not isinstance(init, ast.FunctionDef):
            return None
        node, skip = init, 1
    else:
        skip = 0
    if node.decorator_list or node.args.kwarg is not None:
        return None
    positional = [*node.args.posonlyargs, *node.args.args][skip:]
    return tuple(argument.arg for argument in [*positional, *node.args.kwonlyargs])


@dataclass(slots=True, kw_only=True)
class Located:
    """Object that a section with a `_target_` names."""

    found: Any
    bound: dict[str, Any]
    """The other settings of the section."""
    where: str
    """The setting, as error messages name it: ``tools.lookup._target_='my_pkg.lookup'``."""


def locate_section(section: object, *, key: str) -> Located:
    """Locate the object that the section at `key` names with `_target_`, and what stands beside it.

    Raises ValueError with key, value and remedy, as `locate` does.
    """
    if not isinstance(section, Mapping) or "_target_" not in section:
        kind, _, name = key.partition(".")
        raise ValueError(
            f"{key}={section!r}: there is no _target_; add one, e.g. "
            f"{key}._target_=my_pkg.{kind}.{name}"
        )
    return Located(
        found=locate(section["_target_"], key=f"{key}._target_"),
        bound={str(name): value for name, value in section.items() if name != "_target_"},
        where=f"{key}._target_={section['_target_']!r}",
    )


def about_argument(error: ValueError, key: str, bound: Mapping[str, Any]) -> str:
    """Return the text of a target's own error, with the key of the argument that it begins with.

    Example: ``split='tets': must be one of train, test`` -> ``data.test.split='tets': must be …``.
    """
    named = str(error).partition("=")[0] in bound
    return f"{key}.{error}" if named else f"{key}: {error}"


def locate(path: object, *, key: str) -> Any:
    """Import the object at `path`, which stands at `key` of the configuration.

    Example: ``locate("my_pkg.tools.lookup", key="tools.lookup._target_")``.

    Raises ValueError with key, value and remedy when a module or a name in it does not exist. An
    error inside an imported module is chained to it.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{key}={path!r}: expected a dotted path such as my_pkg.my_module.my_name")
    parts = path.split(".")
    value, used = _import_longest(parts, key=key)
    for position in range(used, len(parts)):
        if not hasattr(value, parts[position]):
            where = ".".join(parts[:position])
            hint = did_you_mean(parts[position], (n for n in dir(value) if not n.startswith("_")))
            raise ValueError(f"{key}={path!r}: {where} has no {parts[position]!r}{hint}")
        value = getattr(value, parts[position])
    return value


def _import_longest(parts: list[str], *, key: str) -> tuple[Any, int]:
    """Import the innermost module of the path; return it and how many parts name it."""
    path = ".".join(parts)
    for used in range(len(parts), 0, -1):
        name = ".".join(parts[:used])
        try:
            return import_module(name), used
        except ModuleNotFoundError as error:
            # Another missing module is what the user's own module imports: not for us to skip.
            if error.name is None or not (name + ".").startswith(error.name + "."):
                raise ValueError(f"{key}={path!r}: importing it failed: {error}") from error
        except Exception as error:
            raise ValueError(
                f"{key}={path!r}: importing it failed: {type(error).__name__}: {error}"
            ) from error
    raise ValueError(
        f"{key}={path!r}: there is no module {parts[0]!r}; install the package, or put its folder "
        "on PYTHONPATH"
    )
