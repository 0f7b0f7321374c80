"""The column `tools` of a row: the tools that its model has.

A list of names of the run's and its environment's tools, and of tools of the row's own::

    ["sql", {"name": "lookup_city", "description": "Find a city.", "executor": "lookup",
             "parameters": {"type": "object", "properties": {"name": {"type": "string"}},
                            "required": ["name"]}}]

The model sees ``lookup_city(name)``; the run's tool `lookup` is called. CSV and parquet have one
type per column, so there the list, or a tool's parameters, may be JSON text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeGuard

from agenttrain.config.suggest import did_you_mean
from agenttrain.types import RowTool

KEYS = ("name", "description", "parameters", "executor")


def read_tools(value: Any, index: int) -> tuple[str | RowTool, ...] | None:
    """Return the tools of a row; None for a row that does not list any.

    Raises ValueError naming the row and what is wrong.
    """
    if value is None:
        return None
    where = f"data row {index}: tools"
    listed = _json(value, where)
    if not isinstance(listed, list | tuple):
        raise ValueError(f"{where}={value!r:.200}: give a list of names, or of tools of its own")
    return tuple(item if isinstance(item, str) else _own_tool(item, where) for item in listed)


def _own_tool(item: Any, where: str) -> RowTool:
    keys = f"{', '.join(KEYS[:-1])} and {KEYS[-1]}"
    if not isinstance(item, Mapping):
        raise ValueError(f"{where}: {item!r:.200} is neither a name nor a tool with {keys}")
    for key in item:
        if key not in KEYS:
            raise ValueError(f"{where}: {key!r} is no key of a tool{did_you_mean(key, KEYS)}")
    name, description, executor = (item.get(key) for key in ("name", "description", "executor"))
    parameters = _json(item.get("parameters"), where)
    if not (_is_text(name) and _is_text(description) and _is_text(executor)) or not isinstance(
        parameters, Mapping
    ):
        raise ValueError(f"{where}: {item!r:.200} needs {keys}; `parameters` is a JSON schema")
    return RowTool(
        name=name, description=description, executor=executor, parameters=dict(parameters)
    )


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value)


def _json(value: Any, where: str) -> Any:
    """Parse a value that may be JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{where}: {value!r:.200} is not JSON: {error}") from error
