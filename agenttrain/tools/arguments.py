"""A call's arguments: copied, coerced, checked against the tool's schema, faults put in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import SchemaError

from agenttrain.config.suggest import did_you_mean
from agenttrain.tools.coerce import coerce, fits, plain_schema, typed_only, validator_of

MAX_PROBLEMS = 3
"""Faults named to the model at once."""
MAX_QUOTE = 60
"""Characters of a wrong value quoted to the model."""


class InvalidArguments(ValueError):
    """The arguments do not fit; the message is for the model."""


class ArgumentSchema:
    """The parameters of one tool, ready to read calls."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Raises ValueError when `parameters` is not a JSON schema."""
        self._schema = plain_schema(parameters)
        self._validator = validator_of(self._schema)
        try:
            self._validator.check_schema(self._schema)
        except SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.json_path}: {error.message}") from error
        self._typed_only = typed_only(self._schema)

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a deep copy of the arguments, coerced to the schema.

        Raises InvalidArguments, naming unknown, missing and wrong ones, e.g. ``unknown argument
        'qurey' (did you mean 'query'?); missing argument 'query'``.
        """
        try:
            # Copied after the coercion, which passes on nested values that no schema describes.
            values = _copied(coerce(dict(arguments), self._schema))
            problems = self._problems(values)
        except (RecursionError, ValueError):
            problems = ["nested too deeply, or a number of too many digits"]
        if problems:
            raise InvalidArguments("; ".join(problems[:MAX_PROBLEMS]))
        return values

    def _problems(self, arguments: Mapping[str, Any]) -> list[str]:
        """Name unknown and missing arguments; if there are none, those with wrong values."""
        schema = self._schema
        known = list(schema.get("properties", {}))
        absent = [name for name in known if name not in arguments]
        problems: list[str] = []
        # A schema takes other names only where it says so: left open, `properties` are all.
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
        if problems or (self._typed_only and fits(arguments, schema)):
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


def _copied(value: Any) -> Any:
    """Copy a JSON value deeply."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _quote(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _short(text, MAX_QUOTE)


def _short(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
