"""The JSON types of a tool's parameters, for formats that write arguments as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from agenttrain.chat.parsers.patterns import Pattern
from agenttrain.utils.json_schema import SchemaResolver, without_nullable


class _MatchingTypes(dict[str, list[str]]):
    """Types of parameters that `properties` does not list, computed for each name asked for."""

    def __init__(
        self, by_pattern: Sequence[tuple[Pattern, list[str]]], additional: list[str] | None
    ) -> None:
        """Types of `patternProperties`, and of `additionalProperties`, None without a schema."""
        super().__init__()
        self._by_pattern, self._additional = by_pattern, additional

    def __missing__(self, name: str) -> list[str]:
        for pattern, types in self._by_pattern:
            if pattern.search(name) is not None:
                return types
        if self._additional is None:
            raise KeyError(name)
        return self._additional


class ParameterTypes(Mapping[str, list[str]]):
    """Parameter name -> JSON types that its schema allows, references and unions included.

    The schema is read when a call needs it: most formats write JSON, which has types.
    """

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        self._parameters = parameters

    @cached_property
    def _types(self) -> dict[str, list[str]]:
        resolver = SchemaResolver(without_nullable(self._parameters))
        properties = resolver.expand(resolver.root).get("properties") or {}
        return {name: resolver.types(schema) for name, schema in properties.items()}

    def __getitem__(self, name: str) -> list[str]:
        return self._types[name] if name in self._types else self._matching[name]

    def __contains__(self, name: object) -> bool:
        return name in self._types

    @cached_property
    def _matching(self) -> _MatchingTypes:
        """Types of names that no property has: of `patternProperties`, then of all others."""
        resolver = SchemaResolver(without_nullable(self._parameters))
        root = resolver.expand(resolver.root)
        by_pattern = []
        for source, schema in (root.get("patternProperties") or {}).items():
            with suppress(ValueError):  # an expression of another language
                by_pattern.append((Pattern(source, "patternProperties"), resolver.types(schema)))
        extra = root.get("additionalProperties")
        return _MatchingTypes(
            by_pattern, resolver.types(extra) if isinstance(extra, Mapping) else None
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)
