"""Copy a call's arguments, coerce them to their JSON schema, check them, and describe mistakes.

`coerce` corrects values that a model wrote almost right, without losing information. A string that
is the JSON text of a value of the schema's type becomes that value. A number or a boolean becomes
its JSON text if the schema asks for a string, and 3.0 becomes 3 if it asks for an integer::

    {"type": "integer"}   "3" -> 3      3.0 -> 3     "007", "3.5", True: as they are
    {"type": "boolean"}   "true", "True" -> True     1, "yes": as they are
    {"type": "string"}    3 -> "3"                   None, [1]: as they are
    {"type": "array"}     "[1, 2]" -> [1, 2]

Other values that do not fit stay as they are, and validation reports them. A value that fits is
never changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from agenttrain.utils.json_schema import SchemaResolver, schema_types, without_nullable
from agenttrain.utils.json_validator import make_validator, remembered_checks, schema_problem
from agenttrain.utils.names import did_you_mean

Schema = Mapping[str, Any]
MAX_PROBLEMS = 3
"""Mistakes that one message lists."""
MAX_QUOTE = 60
"""Characters of a wrong value that a message quotes."""
_TYPE_KEYWORDS = {"type", "title", "description", "default", "examples"}
"""Keywords of a schema that checks only a type."""
_OBJECT_KEYWORDS = {*_TYPE_KEYWORDS, "properties", "required"}


class InvalidArguments(ValueError):
    """The arguments do not fit the schema; the model reads the message."""


class ArgumentSchema:
    """The parameters of one tool; reads the arguments of its calls."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Raises ValueError if `parameters` is not a JSON schema, and names what it cannot read."""
        try:
            schema = without_nullable(parameters)
            problem = schema_problem(schema)
        except RecursionError:
            problem = "it is nested too deeply"
        if problem:
            raise ValueError(f"not a JSON schema: {problem}")
        self._resolver = SchemaResolver(schema)
        """Follows the schema's references, for coercion."""
        self._validator = make_validator(schema)
        """Checks every rule of the schema."""
        self._expanded = self._resolver.expand(schema)
        """The schema with the `$ref` and `allOf` at its top merged, which may hold `required`."""
        self.names = self._resolver.property_names(schema)
        """Names of the arguments that the schema describes, also in options such as `anyOf`."""
        self.required: list[str] = list(self._expanded.get("required", []))
        """Arguments of every call; the validator checks those that an option requires."""
        self._has_types_only = _has_types_only(schema)
        """True if nothing but types is to check, which takes no validator."""

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deep copy of the arguments, coerced to the schema.

        Raises InvalidArguments that names unknown, missing and wrong arguments: ``unknown argument
        'qurey' (did you mean 'query'?); missing argument 'query'``.
        """
        try:
            with remembered_checks():  # else a schema that contains itself takes exponential time
                coerced = _Coercion(self._resolver, self._validator).convert(
                    dict(arguments), self._resolver.root
                )
                # Coercion does not copy nested values that no schema describes.
                values = _deep_copy(coerced)
                problems = self._problems(values)
        except (RecursionError, ValueError):  # Python converts no integer of over 4300 digits
            problems = ["nested too deeply, or a number of too many digits"]
        if problems:
            raise InvalidArguments("; ".join(problems[:MAX_PROBLEMS]))
        return values

    def _problems(self, arguments: Mapping[str, Any]) -> list[str]:
        """Return the unknown and missing arguments; if there are none, those with wrong values."""
        schema = self._expanded
        absent = [name for name in self.names if name not in arguments]
        problems: list[str] = []
        # Stricter than JSON schema: unknown names are allowed only if the schema says so.
        allows_unknown = (
            "properties" not in schema
            or schema.get("additionalProperties")
            or schema.get("patternProperties")
        )
        if not allows_unknown:
            problems += [
                f"unknown argument {_quote(name)}{did_you_mean(name, absent)}"
                for name in arguments
                if name not in self.names
            ]
        problems += [
            f"missing argument {_quote(name)}" for name in self.required if name not in arguments
        ]
        if problems:
            return problems
        # A short cut: the validator below checks types too, but takes longer.
        if self._has_types_only and self._types_fit(arguments):
            return []
        errors = sorted(self._validator.iter_errors(arguments), key=lambda error: error.json_path)
        for error in errors:
            # "$.a[0]" of the value with the error; "$" for the arguments as a whole.
            path = error.json_path.removeprefix("$.") if error.absolute_path else "arguments"
            rule: Any = error.validator_value
            if error.validator == "type":
                expected = rule if isinstance(rule, str) else " or ".join(rule)
                problems.append(f"{path} must be {expected}, not {_quote(error.instance)}")
            elif error.validator == "enum":
                options = _short(", ".join(_quote(option) for option in rule), 5 * MAX_QUOTE)
                problems.append(f"{path} must be one of {options}, not {_quote(error.instance)}")
            else:
                problems.append(f"{path}: {_short(error.message, 3 * MAX_QUOTE)}")
        return problems

    def _types_fit(self, arguments: Mapping[str, Any]) -> bool:
        """Return True if each argument has one of the types of its property."""
        properties = self._expanded.get("properties", {})
        for name, value in arguments.items():
            types = schema_types(properties.get(name, {}))
            if types and not any(_is_type(value, expected) for expected in types):
                return False
        return True


def _has_types_only(schema: Schema) -> bool:
    """Return True for an object whose properties have types and no other rules."""
    properties = schema.get("properties", {}).values()
    return (
        _OBJECT_KEYWORDS.issuperset(schema)
        and schema.get("type", "object") == "object"
        and all(
            isinstance(part, Mapping) and _TYPE_KEYWORDS.issuperset(part) for part in properties
        )
    )


def _deep_copy(value: Any) -> Any:
    """Copy a JSON value deeply."""
    if isinstance(value, dict):
        return {key: _deep_copy(item) for key, item in value.items()}
    return [_deep_copy(item) for item in value] if isinstance(value, list) else value


def _quote(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _short(text, MAX_QUOTE)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


NOTHING = object()
"""Stands for "no value", because None is the value of JSON's null."""
PYTHON_BOOLEANS = {"True": "true", "False": "false"}


def coerce(value: Any, schema: Any) -> Any:
    """Convert a value to the form that fits a schema, if that loses nothing; copy containers.

    Example: ``coerce({"a": "3"}, {"type": "object", "properties": {"a": {"type": "integer"}}})``
    gives ``{"a": 3}``.
    """
    return _Coercion(SchemaResolver(schema), make_validator(schema)).convert(value, schema)


@dataclass(frozen=True, slots=True)
class _Coercion:
    """Converts the values of one call by parts of a schema."""

    resolver: SchemaResolver
    validator: Any
    """Checks a value against any part of the schema: `_fits`."""
    results: dict[tuple[int, int], tuple[Any, Any, Any]] = field(default_factory=dict)
    """Cache: (id of a value, id of a part with `$ref`) -> (value, part, result). It keeps value and
    part alive, so that their ids stay theirs. Without it, a schema that contains itself takes
    exponential time."""

    def convert(self, value: Any, part: Any) -> Any:
        """Coerce a value to a part of the schema."""
        if not isinstance(part, Mapping):
            return value
        # A schema contains itself only through a `$ref`. Only there can the same value meet the
        # same part again and again, so only there is the result remembered.
        if "$ref" not in part:
            return self._convert(value, self.resolver.expand(part))
        key = id(value), id(part)
        if key not in self.results:
            result = self._convert(value, self.resolver.expand(part))
            # `value` and `part` are stored only to keep them alive: no other object gets their ids.
            self.results[key] = value, part, result
        _, _, result = self.results[key]
        return result

    def _convert(self, value: Any, schema: Mapping[str, Any]) -> Any:
        """Coerce a value to a schema without `$ref`: its unions, types, enum, items, properties."""
        for key in ("anyOf", "oneOf"):
            value = self._convert_union(value, schema.get(key, ()))
        if types := schema_types(schema):
            value = _coerce_type(value, types)
        if "enum" in schema:
            value = _coerce_enum(value, schema["enum"])
        if isinstance(value, list):
            # `prefixItems` has a schema for each of the first items, `items` one for all others.
            prefix, items = schema.get("prefixItems", []), schema.get("items")
            parts = [*prefix[: len(value)], *[items] * (len(value) - len(prefix))]
            return [self.convert(item, part) for item, part in zip(value, parts, strict=True)]
        if isinstance(value, dict):
            properties = schema.get("properties", {})
            additional = schema.get("additionalProperties")
            return {
                key: self.convert(item, properties.get(key, additional))
                for key, item in value.items()
            }
        return value

    def _convert_union(self, value: Any, options: Sequence[Any]) -> Any:
        """Coerce a value to the first option that it fits, or else fits once it is coerced."""
        for option in options:
            if self._fits(value, option):
                return self.convert(value, option)
        for option in options:
            coerced = self.convert(value, option)
            if self._fits(coerced, option):
                return coerced
        return value

    def _fits(self, value: Any, part: Any) -> bool:
        """Return True if `part`, a schema of the tool's schema, accepts the value."""
        fits: bool = self.validator.evolve(schema=part).is_valid(value)
        return fits


def _coerce_type(value: Any, types: Sequence[str]) -> Any:
    """Return a value in one of these JSON types, if that loses nothing; else as it is.

    Examples: "3" -> 3 for integer, 3 -> "3" for string, "[1]" -> [1] for array.
    """
    for name in types:
        if _is_type(value, name):  # 3.0 is an "integer"
            return int(value) if name == "integer" else value
    parsed: Any = NOTHING
    if isinstance(value, str):  # it may be the JSON text of a value that fits
        text = value.strip()
        with suppress(ValueError, RecursionError):
            parsed = json.loads(PYTHON_BOOLEANS.get(text, text))
        if isinstance(parsed, float) and not math.isfinite(parsed):  # "NaN", "1e999"
            parsed = NOTHING
    for name in types:
        if name == "string":  # 3 -> "3"
            json_text = _json_text(value)
            if json_text is not NOTHING:
                return json_text
        elif _is_type(parsed, name):  # "3" -> 3
            return int(parsed) if name == "integer" else parsed
    return value


def _is_type(value: Any, name: str) -> bool:
    """Return True if a value has the JSON type of this name; 3.0 is an integer."""
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        is_integer = isinstance(value, int) or value.is_integer()
        return name == "number" or (name == "integer" and is_integer)
    return {"string": str, "array": list, "object": dict}.get(name) is type(value)


def _json_text(value: Any) -> Any:
    """Return the JSON text of a number or boolean, else NOTHING."""
    if not isinstance(value, int | float):  # a boolean is an int
        return NOTHING
    if isinstance(value, float) and not math.isfinite(value):
        return NOTHING
    try:
        return json.dumps(value)
    except ValueError:  # an integer of more than 4300 digits
        return NOTHING


def _coerce_enum(value: Any, members: Sequence[Any]) -> Any:
    """Return the value if it is a member, else a member of the same text: "1" -> 1, 1 -> "1"."""
    for member in members:
        # In Python True == 1, in JSON not.
        if value == member and isinstance(value, bool) == isinstance(member, bool):
            return value
    for member in members:
        if isinstance(member, str) and _json_text(value) == member:
            return member
        if isinstance(value, str) and member is not None and _json_text(member) == value.strip():
            return member
    return value
