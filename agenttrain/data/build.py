"""The `data:` section of a configuration -> rows."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from agenttrain.config.target import about_argument, locate_section
from agenttrain.data.source import GeneratedRows, Rows


def build_rows(section: Mapping[str, Any], key: str) -> Rows:
    """Build the rows that `section` (at `key`, e.g. "data.train") declares.

    `_target_` names a function of `index`, or a class whose instances have rows by number; its
    other arguments stand beside it. Example: ``{"_target_": "agenttrain.data.shop.row",
    "split": "test", "seed": 0}``. Raises ValueError with key, value and remedy; a ValueError of the
    target's own that begins ``split=…`` is told as one of ``data.train.split``.
    """
    located = locate_section(section, key=key)
    target, bound, where = located.found, located.bound, located.where
    try:
        if inspect.isfunction(target) and "index" in inspect.signature(target).parameters:
            inspect.signature(target).bind(index=0, **bound)
            return GeneratedRows(target, **bound)
        inspect.signature(target).bind(**bound)
        rows = target(**bound)
    except TypeError as error:
        raise ValueError(f"{where} with {bound}: {error}") from error
    except ValueError as error:
        raise ValueError(about_argument(error, key, bound)) from error
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ValueError(f"{where}: gives a {type(rows).__name__}, which has no rows by number")
    if len(rows) == 0:
        raise ValueError(f"{where}: has no rows")
    return rows
