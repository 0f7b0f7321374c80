"""The JSON types of a tool's parameters, for formats that write arguments as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any

from agenttrain.chat.parsers.patterns import Pattern
from agenttrain.utils.json_schema import SchemaResolver, without_nullable


class ParameterTypes(Mapping[str, list[str]]):
    """Parameter name -> JSON types that its schema allows, references and unions included.

    Example, for ``{"properties": {"x": {"type": "integer"}}, "additionalProperties": {"type":
    "string"}}``: ``types["x"]`` is ``["integer"]``, and ``types[name]`` of any other is
    ``["string"]``.

    Only names in `properties` are iterated and are `in` the mapping. The readers of calls ask with
    `in` whether a text in a call is the name of a parameter; with `additionalProperties` every text
    would be. A look-up asks for the types of a parameter that was written, so that it also finds
    those of `patternProperties` and `additionalProperties`.

    The schema is read at the first use: a call in JSON, whose values have types, rarely needs it.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters

    @cached_property
    def _types(self) -> dict[str, list[str]]:
        """Types of the names in `properties`."""
        resolver = SchemaResolver(without_nullable(self._parameters))
        properties = resolver.expand(resolver.root).get("properties") or {}
        return {name: resolver.types(schema) for name, schema in properties.items()}

    def __getitem__(self, name: str) -> list[str]:
        """Return the JSON types of a parameter. Raises KeyError for one without a schema."""
        if name in self._types:
            return self._types[name]
        by_pattern, additional = self._unlisted_types
        for pattern, types in by_pattern:
            if pattern.search(name) is not None:
                return types
        if additional is None:  # the schema does not describe other parameters
            raise KeyError(name)
        return additional

    def __contains__(self, name: object) -> bool:
        return name in self._types

    @cached_property
    def _unlisted_types(self) -> tuple[list[tuple[Pattern, list[str]]], list[str] | None]:
        """Types of `patternProperties`, and of `additionalProperties` (None without a schema)."""
        resolver = SchemaResolver(without_nullable(self._parameters))
        root = resolver.expand(resolver.root)
        by_pattern = []
        for source, schema in (root.get("patternProperties") or {}).items():
            # JSON schema has JavaScript's regular expressions. Those that `regex` cannot compile
            # are left out.
            with suppress(ValueError):
                by_pattern.append((Pattern(source, "patternProperties"), resolver.types(schema)))
        additional_schema = root.get("additionalProperties")
        if not isinstance(additional_schema, Mapping):  # true, false or absent
            return by_pattern, None
        return by_pattern, resolver.types(additional_schema)

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)
