"""Structured arguments: the schema that the model sees, and the instance that the function gets.

They are dataclasses, pydantic models, TypedDicts, named tuples and enums, also in lists, mappings
and unions::

    @dataclass
    class Line:
        sku: str
        count: int = 1

    def order(lines: list[Line]) -> str: ...

    the model sees   {"type": "array", "items": {"type": "object", "properties": {"sku": {"type":
                     "string"}, "count": {"type": "integer", "default": 1}}, "required": ["sku"],
                     "additionalProperties": false}}
    it sends         [{"sku": "a7"}]
    the tool gets    [Line(sku="a7", count=1)]
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from agenttrain.tools.arguments import InvalidArguments, make_validator
from agenttrain.types import AgenttrainError
from agenttrain.utils.json_schema import without_nullable

Build = Callable[[Any, str], Any]
"""Makes an instance of a JSON value that fits the schema. The second argument is the value's place
(`lines[0].count`), for the message of InvalidArguments."""
TYPES: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    dict: {"type": "object"},
    list: {"type": "array"},
    tuple: {"type": "array"},
    Any: {},
    object: {},
}
SEQUENCES: dict[Any, Callable[[list[Any]], Any]] = {
    **{list: list, collections.abc.Sequence: list, collections.abc.Iterable: list},
    **{tuple: tuple, set: set, frozenset: frozenset},
}
MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
DESCRIBED = re.compile(r"^ +(\w+) *(?:\([^)]*\))?: *(\S.*)$", re.MULTILINE)
"""A line ``    name (type): Its meaning.`` in a docstring's Attributes or Args."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """A type's schema, which the model sees, and the function that makes its instances."""

    schema: dict[str, Any]
    build: Build


def is_structured(hint: Any) -> bool:
    """Return True if values of this annotation are not plain JSON, so that instances are built."""
    return _is_class(hint) or any(is_structured(part) for part in get_args(hint))


def describe_type(hint: Any, *, within: tuple[Any, ...] = ()) -> Structure:
    """Describe an annotation. Raises ValueError for a type that cannot be written as JSON."""
    if hint in within:
        raise ValueError(f"{hint.__name__} contains itself, so its schema would have no end")
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        inner = describe_type(parts[0], within=within)
        words = [part for part in parts[1:] if isinstance(part, str)]
        description = {"description": words[0]} if words else {}
        return dataclasses.replace(inner, schema={**inner.schema, **description})
    if hasattr(hint, "__pydantic_validator__"):
        from pydantic import TypeAdapter

        adapter = TypeAdapter(hint)  # a model or dataclass of pydantic, with its own validation
        schema = adapter.json_schema()
        plain = _inline_references(schema, schema.get("$defs", {}), ())
        return Structure(schema=plain, build=_constructor_call(adapter.validate_python))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        members = [member.value for member in hint]
        return Structure(schema=_enum(members, hint.__name__), build=_constructor_call(hint))
    if _is_class(hint):
        return _object(hint, (*within, hint))
    if origin is Literal:
        return Structure(schema=_enum(list(parts), str(hint)), build=_unchanged)
    if origin in (Union, types.UnionType):
        return _union(parts, within)
    if (kind := origin or hint) in SEQUENCES and parts:
        return _sequence(kind, parts, within)
    if kind in MAPPINGS and parts:
        if parts[0] is not str:
            raise ValueError(f"a mapping from {parts[0]!r}: the keys of JSON are strings; use str")
        values = describe_type(parts[1], within=within)

        def build(value: Any, where: str) -> Any:
            return {key: values.build(part, f"{where}.{key}") for key, part in value.items()}

        mapping = {"type": "object", "additionalProperties": values.schema}
        return Structure(schema=mapping, build=build)
    if hint not in TYPES:
        raise ValueError(f"{hint!r} has no JSON; use one of str, int, float, bool, list, dict")
    return Structure(schema=dict(TYPES[hint]), build=_unchanged)


def build_instances(builders: Mapping[str, Build], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace arguments by instances. Raises InvalidArguments with the message of their class."""
    return {
        name: builders[name](value, name) if name in builders else value
        for name, value in arguments.items()
    }


def _is_class(hint: Any) -> bool:
    if not isinstance(hint, type) or get_origin(hint) is not None:
        return typing.is_typeddict(hint)
    return (
        dataclasses.is_dataclass(hint)
        or typing.is_typeddict(hint)
        or hasattr(hint, "__pydantic_validator__")
        or issubclass(hint, enum.Enum)
        or (issubclass(hint, tuple) and hasattr(hint, "_fields"))
    )


def _unchanged(value: Any, where: str) -> Any:
    return value


def _constructor_call(make: Callable[..., Any]) -> Build:
    """Return a builder that calls `make`; an error of it becomes a message for the model."""

    def build(value: Any, where: str) -> Any:
        try:
            return make(value)
        except AgenttrainError:  # ToolUnavailable and the like have their usual meaning
            raise
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "pydantic_core":
                problem = f"{where}: {str(error) or type(error).__name__}"
                raise InvalidArguments(problem) from error
            problems = []
            for one in error.errors()[:3]:  # type: ignore[attr-defined]
                steps = (f"[{s}]" if isinstance(s, int) else f".{s}" for s in one["loc"])
                problems.append(f"{where}{''.join(steps)}: {one['msg']}")
            raise InvalidArguments("; ".join(problems)) from error

    return build


def _enum(values: list[Any], name: str) -> dict[str, Any]:
    if any(type(value) not in (str, int, float, bool, type(None)) for value in values):
        raise ValueError(f"{name}: its values {values} are not all plain JSON")
    kinds = list(dict.fromkeys(TYPES[type(value)]["type"] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _object(cls: Any, within: tuple[Any, ...]) -> Structure:
    """Describe a dataclass, a named tuple or a TypedDict."""
    hints = get_type_hints(cls, include_extras=True)
    defaults: dict[str, Any] = {}
    words: dict[str, str] = {}
    make: Callable[..., Any] = cls
    if dataclasses.is_dataclass(cls):
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        names = list(fields)
        missing = dataclasses.MISSING
        optional = {
            name
            for name, field in fields.items()
            if field.default is not missing or field.default_factory is not missing
        }
        defaults = {n: f.default for n, f in fields.items()}
        words = {
            n: f.metadata["description"] for n, f in fields.items() if "description" in f.metadata
        }
    elif typing.is_typeddict(cls):
        names, make = list(hints), dict
        # With postponed annotations __required_keys__ ignores Required and NotRequired.
        marks = {typing.Required: False, typing.NotRequired: True}
        optional = {
            n for n, h in hints.items() if marks.get(get_origin(h), n in cls.__optional_keys__)
        }
    else:
        names, defaults = list(cls._fields), dict(cls._field_defaults)
        optional = set(defaults)
    words = {**dict(DESCRIBED.findall(inspect.getdoc(cls) or "")), **words}
    inner: dict[str, Structure] = {}
    for name in names:
        try:
            inner[name] = describe_type(hints[name], within=within)
        except ValueError as error:
            raise ValueError(f"{cls.__name__}.{name}: {error}") from error
    properties = {
        name: {
            **structure.schema,
            **({"description": words[name]} if name in words else {}),
            **({"default": defaults[name]} if type(defaults.get(name)) in _SCALARS else {}),
        }
        for name, structure in inner.items()
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": [name for name in names if name not in optional],
        "additionalProperties": False,
    }

    def build(value: Any, where: str) -> Any:
        parts = {name: inner[name].build(part, f"{where}.{name}") for name, part in value.items()}
        return _constructor_call(lambda keywords: make(**keywords))(parts, where)

    return Structure(schema=schema, build=build)


_SCALARS = (str, int, float, bool)


def _union(options: tuple[Any, ...], within: tuple[Any, ...]) -> Structure:
    structures = [describe_type(one, within=within) for one in options if one is not type(None)]
    schema: dict[str, Any] = {"anyOf": [one.schema for one in structures]}
    if len(structures) == 1:
        schema = dict(structures[0].schema)
    if type(None) in options:
        schema["nullable"] = True  # transformers' keyword
    validators = [make_validator(without_nullable(one.schema)) for one in structures]

    def build(value: Any, where: str) -> Any:
        if value is None and type(None) in options:
            return None
        fitting = [s for s, v in zip(structures, validators, strict=True) if v.is_valid(value)]
        problems = []
        for structure in fitting:
            try:
                return structure.build(value, where)
            except InvalidArguments as error:
                problems.append(str(error))
        raise InvalidArguments("; or ".join(problems) or f"{where}: fits no type of {options}")

    return Structure(schema=schema, build=build)


def _sequence(kind: Any, parts: tuple[Any, ...], within: tuple[Any, ...]) -> Structure:
    make = SEQUENCES[kind]
    if kind is tuple and (len(parts) != 2 or parts[1] is not Ellipsis):
        items = [describe_type(part, within=within) for part in parts]
        size = len(items)
        prefix = [item.schema for item in items]
        schema = {"type": "array", "prefixItems": prefix, "minItems": size, "maxItems": size}
    else:
        items = [describe_type(parts[0], within=within)]
        schema = {"type": "array", "items": items[0].schema}
        if make in (set, frozenset):
            schema["uniqueItems"] = True

    def build(value: Any, where: str) -> Any:
        each = [
            items[min(place, len(items) - 1)].build(part, f"{where}[{place}]")
            for place, part in enumerate(value)
        ]
        return _constructor_call(make)(each, where)

    return Structure(schema=schema, build=build)


def _inline_references(schema: Any, definitions: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """Return the schema without references and without the titles that pydantic adds."""
    if isinstance(schema, list):
        return [_inline_references(item, definitions, within) for item in schema]
    if not isinstance(schema, dict):
        return schema
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if name in within:
        raise ValueError(f"{name} contains itself, so its schema would have no end")
    if name:
        siblings = {key: value for key, value in schema.items() if key != "$ref"}
        return {**_inline_references(definitions[name], definitions, (*within, name)), **siblings}
    plain = {}
    for key, value in schema.items():
        if key in ("$defs", "title", "discriminator"):
            continue
        if key == "properties":  # one may be called `title`
            plain[key] = {n: _inline_references(s, definitions, within) for n, s in value.items()}
        elif key in ("enum", "const", "default", "examples"):
            plain[key] = value
        else:
            plain[key] = _inline_references(value, definitions, within)
    return plain
