"""Values that fit a JSON schema: for a command to copy, and for a stub that calls tools."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, floor
from typing import Any

from agenttrain.utils.json_schema import COMBINED, SchemaResolver

MAX_DEPTH = 6
"""Nesting of schemas from which on the smallest value is taken."""


def arguments_for(
    tool: Mapping[str, Any], words: Sequence[str], rng: random.Random | None
) -> dict[str, Any]:
    """Return arguments that fit a tool's parameters, made by `example`; none if it has none."""
    schema = {"type": "object", **(tool.get("parameters") or {})}
    arguments: dict[str, Any] = example(schema, words, rng)
    return arguments


def example(
    schema: Any,
    words: Sequence[str],
    rng: random.Random | None,
    resolver: SchemaResolver | None = None,
    depth: int = 0,
) -> Any:
    """Return a value that fits a JSON schema; texts are of `words`.

    Without `rng` it takes the first of several options, the lower bound of a number, and no
    optional properties. Patterns and formats of texts are not followed.

    A call for a part of a schema has the `resolver` of the whole, which finds its references, and
    in `depth` the number of schemas around the part: from MAX_DEPTH on the value is the smallest,
    so that a schema that contains itself ends.

    Example: ``{"type": "object", "properties": {"n": {"type": "integer", "minimum": 3}},
    "required": ["n"]}`` -> ``{"n": 3}``, and with `rng` perhaps ``{"n": 7}``.
    """
    resolver = SchemaResolver(schema) if resolver is None else resolver
    inner = partial(example, words=words, rng=rng, resolver=resolver, depth=depth + 1)
    is_deep = depth >= MAX_DEPTH

    def pick(choices: Sequence[Any]) -> Any:
        return choices[0] if rng is None else rng.choice(choices)

    schema = resolver.expand(schema)
    if options := resolver.options(schema):
        not_null = [part for part in options if resolver.types(part) != ["null"]]
        candidates = not_null or options
        if is_deep:
            # End the nesting: an option that refers to no other schema ($ref, allOf), else null.
            flat = [part for part in not_null if not set(COMBINED) & set(part)]
            null = [part for part in options if part not in not_null]
            candidates = flat or null or candidates
        return inner(pick(candidates))
    for keyword in ("enum", "examples"):
        if schema.get(keyword):
            return pick(schema[keyword])
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((name for name in kind if name != "null"), "null")
    match kind:
        case "object":
            properties = schema.get("properties", {})
            required = schema.get("required", ())
            return {
                name: inner(part)
                for name, part in properties.items()
                if name in required or (rng and not is_deep and rng.random() < 0.5)
            }
        case "array":
            min_items, items = schema.get("minItems", 0), schema.get("items", {})
            if rng is None:  # one item if it may be, all alike if there have to be several
                length = 0 if is_deep else min(schema.get("maxItems", 1), 1)
                return [inner(items)] * max(min_items, length)
            max_items = min_items
            if not is_deep:
                max_items = min(schema.get("maxItems", min_items + 2), min_items + 2)
            return [inner(items) for _ in range(rng.randint(min_items, max_items))]
        case "integer" | "number":
            low, high = _choose_bounds(schema, kind)
            if rng is None:
                return ceil(low) if kind == "integer" else low
            if kind == "integer":
                return rng.randint(ceil(low), max(floor(high), ceil(low)))
            return rng.uniform(low, max(high, low))
        case "boolean":
            return rng is None or rng.random() < 0.5
        case "null":
            return None
        case _:
            text = pick(words)
            while len(text) < schema.get("minLength", 0):
                text += f" {pick(words)}"
            return text[: schema.get("maxLength", len(text))]


def _choose_bounds(schema: Mapping[str, Any], kind: str) -> tuple[float, float]:
    """Return the bounds of an example of a schema of the `kind` integer or number.

    Without a lower bound it is 1, or the upper bound if that is lower. Without an upper bound it is
    the lower one plus 20, so that examples are small numbers.

    Examples: ``{"minimum": 3}`` -> (3, 23), ``{"maximum": 0.5}`` -> (0, 0.5) and for a number
    ``{"exclusiveMinimum": 0, "exclusiveMaximum": 1}`` -> (0.25, 0.75).
    """
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    # Distance from exclusive bounds. Between two of a number 1 may be too much: a quarter of the
    # range leaves the half in its middle.
    step = 1.0
    if kind == "number" and above is not None and below is not None:
        step = (below - above) / 4
    high = schema.get("maximum")
    if high is None and below is not None:
        high = below - step
    low = schema.get("minimum")
    if low is None and above is not None:
        low = above + step
    if low is None:  # `floor`, so that it is a whole number for integers too
        low = 1 if high is None else min(1, floor(high))
    return low, low + 20 if high is None else high
