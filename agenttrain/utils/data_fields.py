"""Declarations of settings that are data, which the run folder of a stranger may set freely.

`settings/untrusted.py` reads them: every value whose field declares nothing counts as code, a
command or an address, and needs the user's trust. A field is declared by its annotation:

    k: Data[int] = 3
    id: Annotated[str, DataWhere(names_no_module)]

Nothing but the standard library is imported, because sandboxes run under a Python without more.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataWhere:
    """Marks the values of a field that are data: those for which `accepts` returns True."""

    accepts: Callable[[Any], bool]


DATA = DataWhere(lambda value: True)
Data = Annotated[T, DATA]
"""A field that is data whatever its value: it is never imported, started, reached or written to."""


def is_data(hint: Any, value: Any) -> bool:
    """Return True if a field annotated with `hint` declares this value as data.

    Data is set without the user's trust; any other value may name code, a command or an address.
    Examples: True for ``Data[str]`` and "a", False for ``str`` and "a", and False for
    ``Annotated[str, DataWhere(names_no_module)]`` and "my_module:MyEnv-v0".
    """
    if hint is type(None):  # in ``Data[int] | None``, where the other part decides
        return True
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        # Nested annotations are flattened: the last mark is the outermost, and may restrict those
        # inside of it. Without a mark, the annotated type decides: list[Data[int]], say.
        marks = [part for part in parts if isinstance(part, DataWhere)]
        return marks[-1].accepts(value) if marks else is_data(parts[0], value)
    if origin in (Union, types.UnionType, list, tuple):
        return all(is_data(part, value) for part in parts if part is not Ellipsis)
    return False


def names_no_module(value: Any) -> bool:
    """Return False for Gymnasium's ``my_module:MyEnv-v0``, which imports the module."""
    return ":" not in str(value)
