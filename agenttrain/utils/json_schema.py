"""JSON schemas as tools give them, in standard keywords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def schema_types(schema: Mapping[str, Any]) -> list[str]:
    """Return the types that a schema names; none if it names none."""
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def without_nullable(schema: Any) -> Any:
    """Replace transformers' ``nullable: true`` in a schema by standard keywords.

    Example: ``{"type": "integer", "nullable": True}`` -> ``{"type": ["integer", "null"]}``
    """
    if isinstance(schema, list):
        return [without_nullable(item) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    plain = {
        key: value if key in ("enum", "const", "default", "examples") else without_nullable(value)
        for key, value in schema.items()
        # A property may also be called `nullable`; only the keyword's value is a boolean.
        if not (key == "nullable" and isinstance(value, bool))
    }
    if schema.get("nullable") is not True:
        return plain
    if "type" in plain:
        types = schema_types(plain)
        plain["type"] = types if "null" in types else [*types, "null"]
    if "enum" in plain and None not in plain["enum"]:
        plain["enum"] = [*plain["enum"], None]
    if "anyOf" in plain:
        plain["anyOf"] = [*plain["anyOf"], {"type": "null"}]
    return plain
