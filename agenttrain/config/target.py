"""`_target_`: a dotted path in a YAML -> the Python object that it names."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from agenttrain.config.suggest import did_you_mean


def locate(path: object, *, key: str) -> Any:
    """The object at `path`, e.g. ``locate("my_pkg.tools.lookup", key="tools.lookup._target_")``.

    Raises ValueError with key, value and remedy when a module or a name in it does not exist. An
    error inside an imported module is chained to it.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise ValueError(f"{key}={path!r}: expected a dotted path such as my_pkg.my_module.my_name")
    parts = path.split(".")
    found, used = _import_longest(parts, key=key)
    for position in range(used, len(parts)):
        if not hasattr(found, parts[position]):
            where = ".".join(parts[:position])
            hint = did_you_mean(parts[position], (n for n in dir(found) if not n.startswith("_")))
            raise ValueError(f"{key}={path!r}: {where} has no {parts[position]!r}{hint}")
        found = getattr(found, parts[position])
    return found


def _import_longest(parts: list[str], *, key: str) -> tuple[Any, int]:
    """The innermost module of the path, and how many of its parts name it."""
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
