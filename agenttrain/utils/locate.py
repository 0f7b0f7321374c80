"""`_target_`: a dotted path in a YAML -> the Python object that it names, and its parameters."""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any

from agenttrain.utils.moved import RENAMED
from agenttrain.utils.names import did_you_mean

INSTALLED = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)
"""Folders of code that is not the user's."""
PROGRAM = "__main__"
"""Python's name of the program or notebook that runs, which no other process can import."""


def parameter_names(target: Any) -> tuple[str, ...] | None:
    """Return the names of the arguments that `target` takes; None: any name, or unknown.

    Example: ``def find(query, *, limit=3)`` -> ``("query", "limit")``. For a class these are its
    constructor's.
    """
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # compiled code may have no signature
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return tuple(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY))


def call_parameters(target: Any) -> int | None:
    """Return how many parameters a function has, or the `__call__` of a class, without `self`.

    With 0 it cannot be called with the rollout, say. None: unknown, because the class defines no
    `__call__` itself or the signature cannot be read.
    """
    is_class = inspect.isclass(target)
    called = vars(target).get("__call__") if is_class else target
    if called is None:
        return None
    try:
        count = len(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # compiled code may have no signature
        return None
    return count - 1 if is_class else count  # without `self`


@dataclass(slots=True, kw_only=True)
class Located:
    """The object that a section names with `_target_`, and the section's other settings."""

    target: Any
    bound: dict[str, Any]
    """The other settings of the section."""
    where: str
    """The setting, for error messages: ``tools.lookup._target_='my_pkg.lookup'``."""


def locate_section(section: object, *, key: str) -> Located:
    """Return the object that the section at `key` names with `_target_`, and its other settings.

    Raises ValueError with key, value and remedy, as `locate` does.
    """
    if not isinstance(section, Mapping) or "_target_" not in section:
        kind, _, name = key.partition(".")
        raise ValueError(
            f"{key}={section!r}: there is no _target_; add one, e.g. "
            f"{key}._target_=my_pkg.{kind}.{name}"
        )
    return Located(
        target=locate(section["_target_"], key=f"{key}._target_"),
        bound={str(name): value for name, value in section.items() if name != "_target_"},
        where=f"{key}._target_={section['_target_']!r}",
    )


def class_method(cls: type, name: str) -> Callable[..., Any] | None:
    """Return the class method of that name, bound to the class; None if there is none."""
    is_class_method = isinstance(inspect.getattr_static(cls, name, None), classmethod)
    return getattr(cls, name) if is_class_method else None


def about_argument(error: ValueError, key: str, bound: Mapping[str, Any]) -> str:
    """Return the text of a target's error, with the full key of an argument that it begins with.

    Example: ``split='tets': must be one of train, test`` -> ``data.test.split='tets': must be …``.
    """
    begins_with_argument = any(str(error).partition(mark)[0] in bound for mark in "=:")
    return f"{key}.{error}" if begins_with_argument else f"{key}: {error}"


def error_with_line(error: BaseException) -> str:
    """Return the error's type, its text, and the line of the user's code that it passed last.

    Example: ``TypeError: 'int' object is not callable (/home/me/my_tools.py:12)``.
    """
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    # A SyntaxError names the line itself.
    return text if isinstance(error, SyntaxError) else text + user_line(error)


def user_line(error: BaseException) -> str:
    """Return " (file:line)" of the innermost frame outside this package and all installed ones."""
    lines = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(("<", *INSTALLED))
    ]
    return lines[-1] if lines else ""


def locate(path: object, *, key: str) -> Any:
    """Import the object at `path`, which stands at `key` of the configuration.

    Example: ``locate("my_pkg.tools.lookup", key="tools.lookup._target_")``.

    Raises ValueError with key, value and remedy when a module or a name in it does not exist, and
    for an error inside an imported module, which is its cause.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{key}={path}: expected a dotted path such as my_pkg.my_module.my_name")
    if path in RENAMED:
        raise ValueError(f"{key}={path}: is {RENAMED[path]} now")
    parts = path.split(".")
    # The longest part of the path that is a module; the others are attributes.
    for module_depth in range(len(parts), 0, -1):
        name = ".".join(parts[:module_depth])
        try:
            value: Any = import_module(name)
            break
        except ModuleNotFoundError as error:
            # For "my_pkg.tools", my_pkg or my_pkg.tools is missing: try a shorter name. Another
            # missing module is one that the user's module imports, which is an error in it.
            is_on_path = error.name is not None and f"{name}.".startswith(f"{error.name}.")
            if not is_on_path:
                raise ValueError(
                    f"{key}={path}: importing it failed: {error}{user_line(error)}"
                ) from error
        except (Exception, SystemExit) as error:  # a script may end with sys.exit(main())
            raise ValueError(
                f"{key}={path}: importing it failed: {error_with_line(error)}"
            ) from error
    else:
        if len(parts) == 1:
            raise ValueError(
                f"{key}={path}: names no module; give module.function, e.g. my_module.{path}"
            )
        raise ValueError(
            f"{key}={path}: there is no module {parts[0]!r}; install the package, or put its "
            "folder on PYTHONPATH"
        )
    for position in range(module_depth, len(parts)):
        if not hasattr(value, parts[position]):
            where = ".".join(parts[:position])
            hint = did_you_mean(parts[position], (n for n in dir(value) if not n.startswith("_")))
            # "__main__.Reward", in the settings of a run that a notebook or script started. Here
            # `__main__` is another program, which has no Reward.
            if where == PROGRAM:
                hint = (
                    "; it was defined in a notebook or program of its own: go on there, with "
                    "agenttrain.train(resume=…), or move it into a module"
                )
            raise ValueError(f"{key}={path}: {where} has no {parts[position]!r}{hint}")
        value = getattr(value, parts[position])
    if isinstance(value, ModuleType):
        raise ValueError(f"{key}={path}: names a module; add the function or class in it")
    return value
