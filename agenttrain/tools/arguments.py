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
from typing import Any

from jsonschema import Draft202012Validator, SchemaError
from referencing import Registry

from agenttrain.utils.json_schema import schema_types, without_nullable
from agenttrain.utils.names import did_you_mean

Schema = Mapping[str, Any]
MAX_PROBLEMS = 3
"""Mistakes that one message lists."""
MAX_QUOTE = 60
"""Characters of a wrong value that a message quotes."""
_SAYS_TYPE = {"type", "title", "description", "default", "examples"}
"""Keywords of a schema that checks nothing but a type."""
_SAYS_OBJECT = {*_SAYS_TYPE, "properties", "required"}


class InvalidArguments(ValueError):
    """The arguments do not fit the schema; the model reads the message."""


class ArgumentSchema:
    """The parameters of one tool; reads the arguments of its calls."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Raises ValueError if `parameters` is not a JSON schema."""
        self._schema = without_nullable(parameters)
        self._validator = make_validator(self._schema)
        try:
            self._validator.check_schema(self._schema)
        except SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.json_path}: {error.message}") from error
        # Calls that fit such a schema (an object of properties with types) need no validator.
        properties = self._schema.get("properties", {}).values()
        self._checks_types_only = (
            _SAYS_OBJECT.issuperset(self._schema)
            and self._schema.get("type", "object") == "object"
            and all(isinstance(one, Mapping) and _SAYS_TYPE.issuperset(one) for one in properties)
        )

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deep copy of the arguments, coerced to the schema.

        Raises InvalidArguments that names unknown, missing and wrong arguments: ``unknown argument
        'qurey' (did you mean 'query'?); missing argument 'query'``.
        """
        try:
            # Coercion does not copy nested values that no schema describes.
            values = _deep_copy(coerce(dict(arguments), self._schema))
            problems = self._problems(values)
        except (RecursionError, ValueError):
            problems = ["nested too deeply, or a number of too many digits"]
        if problems:
            raise InvalidArguments("; ".join(problems[:MAX_PROBLEMS]))
        return values

    def _problems(self, arguments: Mapping[str, Any]) -> list[str]:
        """List unknown and missing arguments; if there are none, arguments with wrong values."""
        schema = self._schema
        known = list(schema.get("properties", {}))
        absent = [name for name in known if name not in arguments]
        problems: list[str] = []
        # Stricter than JSON schema: unknown names are allowed only if the schema says so.
        if not (
            "properties" not in schema
            or schema.get("additionalProperties")
            or schema.get("patternProperties")
        ):
            problems += [
                f"unknown argument {_quote(name)}{did_you_mean(name, absent)}"
                for name in arguments
                if name not in known
            ]
        problems += [
            f"missing argument {_quote(name)}"
            for name in schema.get("required", [])
            if name not in arguments
        ]
        types = (
            (v, schema_types(schema.get("properties", {}).get(n, {}))) for n, v in arguments.items()
        )
        if problems or (
            self._checks_types_only
            and all(not wanted or any(_is_type(v, t) for t in wanted) for v, wanted in types)
        ):
            return problems
        errors = sorted(self._validator.iter_errors(arguments), key=lambda error: error.json_path)
        for error in errors:
            path = error.json_path.removeprefix("$.") if error.absolute_path else "arguments"
            rule: Any = error.validator_value
            if error.validator == "type":
                wanted = rule if isinstance(rule, str) else " or ".join(rule)
                problems.append(f"{path} must be {wanted}, not {_quote(error.instance)}")
            elif error.validator == "enum":
                options = _short(", ".join(_quote(option) for option in rule), 5 * MAX_QUOTE)
                problems.append(f"{path} must be one of {options}, not {_quote(error.instance)}")
            else:
                problems.append(f"{path}: {_short(error.message, 3 * MAX_QUOTE)}")
        return problems


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
PYTHON_BOOLEANS = {"True": "true", "False": "false"}


def make_validator(schema: Schema) -> Draft202012Validator:
    """Make a validator that never fetches the target of a `$ref` from the network."""
    return Draft202012Validator(schema, registry=Registry())


def coerce(value: Any, schema: Any) -> Any:
    """Convert a value to the form that fits a schema, if that loses nothing; copy containers.

    Example: ``coerce({"a": "3"}, {"type": "object", "properties": {"a": {"type": "integer"}}})``
    gives ``{"a": 3}``.
    """
    if not isinstance(schema, Mapping):
        return value
    for key in ("anyOf", "oneOf"):
        # The first option that accepts the value as it is, else the first that accepts it coerced.
        for option in schema.get(key, []):
            if make_validator(option).is_valid(value):
                value = coerce(value, option)
                break
        else:
            for option in schema.get(key, []):
                candidate = coerce(value, option)
                if make_validator(option).is_valid(candidate):
                    value = candidate
                    break
    if types := schema_types(schema):
        value = _coerce_type(value, types)
    if "enum" in schema:
        value = _coerce_enum(value, schema["enum"])
    if isinstance(value, list):
        first, others = schema.get("prefixItems", []), schema.get("items")
        return [
            coerce(item, first[i] if i < len(first) else others) for i, item in enumerate(value)
        ]
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        return {key: coerce(item, properties.get(key, others)) for key, item in value.items()}
    return value


def _coerce_type(value: Any, types: Sequence[str]) -> Any:
    for name in types:
        if _is_type(value, name):
            return int(value) if name == "integer" else value
    parsed: Any = NOTHING
    if isinstance(value, str):  # it may be the JSON text of a value that fits
        text = value.strip()
        with suppress(ValueError, RecursionError):
            parsed = json.loads(PYTHON_BOOLEANS.get(text, text))
        if isinstance(parsed, float) and not math.isfinite(parsed):
            parsed = NOTHING
    for name in types:
        if name == "string":
            text = _json_text(value)
            if text is not NOTHING:
                return text
        elif _is_type(parsed, name):
            return int(parsed) if name == "integer" else parsed
    return value


def _is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool) or value is None:
        return name == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        is_integer = isinstance(value, int) or value.is_integer()
        return name == "number" or (name == "integer" and is_integer)
    return {"string": str, "array": list, "object": dict}.get(name) is type(value)


def _json_text(value: Any) -> Any:
    """Return the JSON text of a number or boolean, else NOTHING."""
    if not isinstance(value, int | float) or (
        isinstance(value, float) and not math.isfinite(value)
    ):
        return NOTHING
    try:
        return json.dumps(value)
    except ValueError:  # an integer of more than 4300 digits
        return NOTHING


def _coerce_enum(value: Any, members: Sequence[Any]) -> Any:
    """Return the value if it is a member, else a member of the same text: "1" -> 1, 1 -> "1"."""
    for member in members:
        if value == member and isinstance(value, bool) == isinstance(member, bool):  # True == 1
            return value
    for member in members:
        if isinstance(member, str) and _json_text(value) == member:
            return member
        if isinstance(value, str) and member is not None and _json_text(member) == value.strip():
            return member
    return value
