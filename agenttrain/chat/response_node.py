"""One node of a `response_schema`: how its text is taken apart, and what type comes of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jmespath

from agenttrain.chat.response_content import CONTENT, ContentError
from agenttrain.chat.response_json import excerpt, kind
from agenttrain.chat.response_regex import Pattern

_PARSERS = {
    "json": {},
    "gemma4-tool-call": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
}
_TYPES = ("object", "array", "string", "integer", "number", "boolean", "any", None)
_SCALARS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
NOTHING = object()


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node, compiled."""

    type: str | None = None
    const: Any = NOTHING
    default: Any = NOTHING
    substitutions: tuple[tuple[Pattern, str], ...] = ()
    regex: Pattern | None = None
    iterator: Pattern | None = None
    key_value: Pattern | None = None
    parser: str | None = None
    allow_non_json: bool = False
    transform: Callable[[Any], Any] | None = None
    properties: Mapping[str, Node] = field(default_factory=dict)
    additional: Node | None = None
    """None: keys that are not among the properties are left out."""
    items: Node | None = None
    prefix_items: tuple[Node, ...] = ()
    required: tuple[str, ...] = ()
    json_args: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ours for `x-parser: json`."""

    def sources(self) -> Iterator[str]:
        """All regular expressions of this node and those below it."""
        patterns = [p for p, _ in self.substitutions]
        for pattern in (*patterns, self.regex, self.iterator, self.key_value):
            if pattern is not None:
                yield pattern.source
        below = [*self.properties.values(), self.additional, self.items, *self.prefix_items]
        for node in below:
            if node is not None:
                yield from node.sources()

    def split(self, text: str) -> dict[str, Any] | None:
        """Property -> the text it is to read; None where the root's expression does not match."""
        try:
            inner = self.inner(text)
        except ContentError:
            return None
        if isinstance(inner, str):
            return dict.fromkeys(self.properties, inner)
        return inner

    def inner(self, value: Any) -> Any:
        """The value after substitutions and ``x-regex``; None where that does not match."""
        if self.substitutions or self.regex is not None:
            if not isinstance(value, str):
                raise ContentError(f"expected text, found {kind(value)}")
            for pattern, replacement in self.substitutions:
                value = pattern.substitute(replacement, value)
        if self.regex is None:
            return value
        match = self.regex.match(value)
        return None if match is None else groups(match)

    def value(self, value: Any, *, raw: bool = False) -> Any:
        """Read a value as the node says. Raises ContentError.

        `raw`: text that is only perhaps JSON stays text.
        """
        if self.const is not NOTHING:
            return self.const
        if value is None:
            return None
        value = self.inner(value)
        if value is None:
            return None
        return self.parsed(value, raw=raw)

    def parsed(self, value: Any, *, raw: bool = False) -> Any:
        """Read a value that is already the match of ``x-regex``. Raises ContentError."""
        pattern = self.iterator or self.key_value
        if pattern is not None:
            if not isinstance(value, str):
                raise ContentError(f"expected text, found {kind(value)}")
            matches = [groups(match) for match in pattern.matches(value)]
            if self.iterator is not None:
                value = matches or None
            else:
                pairs: dict[str, Any] = {}
                for pair in matches:
                    if pair["key"] in pairs:
                        raise ContentError(f"the parameter {excerpt(pair['key'])} is given twice")
                    pairs[pair["key"]] = pair.get("value", "")
                value = pairs or None
        if self.parser is not None and value is not None and not (raw and self.allow_non_json):
            if not isinstance(value, str):
                raise ContentError(f"expected JSON text, found {kind(value)}")
            args = {**_PARSERS[self.parser], "allow_non_json": self.allow_non_json}
            value = CONTENT["json"](value, {**args, **self.json_args})
        if self.transform is not None:
            try:
                value = self.transform(value)
            except (jmespath.exceptions.JMESPathError, RecursionError, TypeError) as error:
                raise ContentError(f"the call does not fit the schema: {error}") from error
        if value is None:
            return None
        if self.type == "object":
            return self._object(value, raw=raw)
        if self.type == "array":
            return self._array(value, raw=raw)
        return _scalar(self.type, value)

    def _object(self, value: Any, *, raw: bool) -> dict[str, Any]:
        if isinstance(value, str):
            value = dict.fromkeys(self.properties, value)
        elif not isinstance(value, dict):
            raise ContentError(f"expected a JSON object, found {kind(value)}")
        fields: dict[str, Any] = {}
        for key, node in self.properties.items():
            read = node.value(value.get(key), raw=raw)
            if read is None and node.default is not NOTHING:
                read = node.default
            if read is not None:
                fields[key] = read
        if self.additional is not None:
            extra = {k: v for k, v in value.items() if k not in self.properties}
            fields |= {k: self.additional.value(v, raw=raw) for k, v in extra.items()}
        missing = [key for key in self.required if key not in fields]
        if missing:
            raise ContentError(f"the call has no {', '.join(missing)}")
        return fields

    def _array(self, value: Any, *, raw: bool) -> list[Any]:
        if not isinstance(value, list):
            value = [value] if len(self.prefix_items) == 1 else value
        if not isinstance(value, list):
            raise ContentError(f"expected a JSON array, found {kind(value)}")
        if self.items is not None:
            return [self.items.value(item, raw=raw) for item in value]
        if len(value) != len(self.prefix_items):
            raise ContentError(f"expected {len(self.prefix_items)} items, found {len(value)}")
        return [n.value(v, raw=raw) for n, v in zip(self.prefix_items, value, strict=True)]


def groups(match: Any) -> Any:
    """Return the named groups of a match, its only group, or all of it."""
    if match.re.groupindex:
        return {key: text for key, text in match.groupdict().items() if text is not None}
    return match.group(1) if match.re.groups else match.group()


def _scalar(name: str | None, value: Any) -> Any:
    if name is None or name == "any":
        return value
    if isinstance(value, _SCALARS[name]) and (name == "boolean") == isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            if name == "boolean" and value.lower() in ("true", "1", "false", "0"):
                return value.lower() in ("true", "1")
            if name in ("integer", "number"):
                return int(value) if name == "integer" else float(value)
        except ValueError:
            pass
    raise ContentError(f"expected {name}, found {excerpt(json.dumps(value, default=str))}")


def node_of(
    schema: Any, scope: str = "response_schema", json_args: Mapping[str, Any] | None = None
) -> Node:
    """Compile a node and those below it, all with these `json_args`.

    Raises ValueError with the key that is wrong.
    """
    if schema is True or schema is None:
        return Node()
    if not isinstance(schema, Mapping):
        raise ValueError(f"{scope}: must be a mapping, not {schema!r}")
    if schema.get("type") not in _TYPES:
        raise ValueError(f"{scope}.type: {schema['type']!r} is not one of {_TYPES[:-1]}")
    if (parser := schema.get("x-parser")) not in (None, *_PARSERS):
        raise ValueError(f"{scope}.x-parser: {parser!r} is not one of {', '.join(_PARSERS)}")

    def given(key: str, kind: type, word: str) -> Any:
        value = schema.get(key)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{scope}.{key}: must be {word}, not {value!r}")
        return value

    def pattern(key: str) -> Pattern | None:
        return Pattern(schema[key], f"{scope}.{key}") if key in schema else None

    below = partial(node_of, json_args=json_args)
    args = given("x-parser-args", Mapping, "a mapping") or {}
    properties = given("properties", Mapping, "a mapping") or {}
    additional = schema.get("additionalProperties", {})
    substitutions = []
    for pair in given("x-regex-substitutions", list, "a list") or ():
        key = f"{scope}.x-regex-substitutions"
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{key}: {pair!r} is no pair of [pattern, replacement]")
        substitutions.append((Pattern(pair[0], key), str(pair[1])))
    regex, iterator = pattern("x-regex"), pattern("x-regex-iterator")
    key_value = pattern("x-regex-key-value")
    if key_value is not None and not {"key", "value"} <= set(key_value.names):
        raise ValueError(f"{scope}.x-regex-key-value: needs (?P<key>…) and (?P<value>…)")
    return Node(
        type=schema.get("type"),
        const=schema.get("const", NOTHING),
        default=schema.get("default", NOTHING),
        substitutions=tuple(substitutions),
        regex=regex,
        iterator=iterator,
        key_value=key_value,
        parser=parser,
        allow_non_json=bool(args.get("allow_non_json")),
        transform=_transform(args.get("transform"), scope),
        properties={str(key): below(value, f"{scope}.{key}") for key, value in properties.items()},
        additional=None if additional is False else below(additional or None, scope),
        items=below(schema["items"], f"{scope}.items") if "items" in schema else None,
        prefix_items=tuple(
            below(value, f"{scope}.prefixItems")
            for value in given("prefixItems", list, "a list") or ()
        ),
        required=tuple(given("required", list, "a list") or ()),
        json_args=json_args or {},
    )


def _transform(expression: Any, scope: str) -> Callable[[Any], Any] | None:
    if expression is None:
        return None
    if not isinstance(expression, str):
        raise ValueError(f"{scope}.x-parser-args.transform: must be a text, not {expression!r}")
    try:
        return jmespath.compile(expression).search
    except jmespath.exceptions.JMESPathError as error:
        raise ValueError(f"{scope}.x-parser-args.transform: {error}") from error
