"""The JSON types of a tool's parameters, for formats that write arguments as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from agenttrain.utils.json_schema import SchemaResolver, without_nullable


class ParameterTypes(Mapping[str, list[str]]):
    """Parameter name -> JSON types that its schema allows, references and unions included.

    The schema is read when a call asks for it: most formats write JSON, which has types.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters

    @cached_property
    def _types(self) -> dict[str, list[str]]:
        resolver = SchemaResolver(without_nullable(self._parameters))
        properties = resolver.expand(resolver.root).get("properties") or {}
        return {name: resolver.types(schema) for name, schema in properties.items()}

    def __getitem__(self, name: str) -> list[str]:
        return self._types[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)
