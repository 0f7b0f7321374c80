"""Validators of JSON schemas that fetch nothing, and match patterns in linear time.

Values are written by models, and Python's `re` can take hours for a few letters. Patterns are
matched by the regular expressions of pydantic's core, which know no look-around and no
back-references; `schema_problem` names a pattern that they refuse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker, SchemaError, ValidationError
from jsonschema.validators import extend, validator_for
from pydantic_core import SchemaError as PatternError
from pydantic_core import SchemaValidator, core_schema
from referencing import Registry

from agenttrain.utils.json_schema import Schema, SchemaResolver, map_subschemas

NO_FORMATS = FormatChecker(formats=())
"""Leaves patterns to `schema_problem`: Python's `re` does not know all that JSON schemas allow."""
_CHECKED: ContextVar[dict[tuple[int, int], tuple[Any, Any, bool]] | None]
_CHECKED = ContextVar("_CHECKED", default=None)
"""(id of a value, id of a schema with `$ref`) -> (value, schema, whether the value is valid). Both
objects are kept alive here, so that no other object gets their ids."""
_TOKEN = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
"""Of a pattern outside of a set: an escape, the beginning of a set or a character. A ``]`` right at
the beginning, ``[]`` or ``[^]``, is a member of the set and not its end."""
_TOKEN_IN_SET = re.compile(r"\\.|.", re.DOTALL)
"""Of a pattern in a set: an escape or a character."""


def schema_problem(schema: Any) -> str | None:
    """Return why a value is no JSON schema, or one that cannot be checked here, or None."""
    kind: Any = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema, format_checker=NO_FORMATS)
    except SchemaError as error:
        return f"{error.json_path}: {error.message}"
    resolver = SchemaResolver(schema)
    return resolver.problem() or _pattern_problem(list(resolver.schemas()))


def make_validator(schema: Any) -> Any:
    """Make a validator of a schema in which `schema_problem` finds nothing."""
    kind = validator_for(schema, default=Draft202012Validator)
    return _linear_validators(kind)(_without_draft(schema), registry=Registry())


def _without_draft(schema: Any) -> Any:
    """Leave out `$schema`, for which jsonschema would take its own class of validators."""
    if not isinstance(schema, Mapping):
        return schema
    changed = map_subschemas(schema, _without_draft)
    changed.pop("$schema", None)
    return changed


@contextmanager
def remembered_checks() -> Iterator[None]:
    """Remember in the block which value was checked by which `$ref`, so that none is checked twice.

    Otherwise, in a schema that contains itself, each level of a value is checked by each option of
    a union, many times as often as the level above.
    """
    token = _CHECKED.set({})
    try:
        yield
    finally:
        _CHECKED.reset(token)


def _pattern_problem(schemas: Sequence[Schema]) -> str | None:
    """Return the pattern of a schema that cannot be matched in linear time, and why; else None."""
    for schema in schemas:
        patterns = [schema["pattern"]] if "pattern" in schema else []
        for text in (*patterns, *schema.get("patternProperties", ())):
            try:
                _compiled(text)
            except ValueError as error:
                return str(error)
    # jsonschema's own `unevaluatedProperties` would match them by Python's `re`.
    if any("patternProperties" in schema for schema in schemas) and any(
        "unevaluatedProperties" in schema for schema in schemas
    ):
        return "unevaluatedProperties cannot stand beside patternProperties; list the properties"
    return None


def matches(pattern: str, text: str) -> bool:
    """Return True if a pattern occurs in a text. Lone surrogates of the text count as U+FFFD.

    Raises ValueError for a pattern that cannot be matched in linear time.
    """
    if not text.isascii():
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return _compiled(pattern)(text)


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Callable[[str], bool]:
    """Return the matcher of a pattern; raises ValueError if it cannot match in linear time."""
    string = core_schema.str_schema(pattern=_escaped(pattern), regex_engine="rust-regex")
    try:
        return SchemaValidator(string).isinstance_python
    except PatternError as error:
        reason = str(error).strip().splitlines()[-1].removeprefix("error: ")
        raise ValueError(
            f"pattern {pattern!r} cannot be matched in linear time: {reason}; write it without "
            "look-around and back-references, and with escaped brackets"
        ) from error


def _escaped(pattern: str) -> str:
    r"""Escape the characters in sets that only Rust's regular expressions read as operators.

    Rust reads ``&&``, ``--`` and ``~~`` as operators on sets, and ``[`` as a set in a set. A JSON
    schema means the characters. Example: ``[a&&b]``, the set of ``a``, ``&`` and ``b``, becomes
    ``[a\&\&b]``.
    """
    tokens: list[str] = []
    in_set, position = False, 0
    while position < len(pattern):
        token = (_TOKEN_IN_SET if in_set else _TOKEN).match(pattern, position)[0]  # type: ignore[index]
        position += len(token)
        if not in_set:
            in_set = token.startswith("[")
        elif token == "]":
            in_set = False
        # An escape is harmless, but would make a range (a-z) of a single hyphen three characters.
        elif token in ("[", "&", "~") or (token == "-" and tokens[-1] == "-"):
            token = f"\\{token}"
        tokens.append(token)
    return "".join(tokens)


@lru_cache(maxsize=8)
def _linear_validators(kind: Any) -> Any:
    """Return a class of validators whose keywords match patterns by `matches`, in linear time.

    jsonschema matches them by Python's `re`, which can take exponential time. A keyword's check
    yields the errors of a value.
    """
    # jsonschema's own checks, which those below call. They return an iterator of errors or None.
    check_additional = kind.VALIDATORS["additionalProperties"]
    check_reference = kind.VALIDATORS["$ref"]

    def additional_properties(
        validator: Any, allowed: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        """Check the properties that `properties` and `patternProperties` do not name.

        jsonschema would match the patterns by Python's `re`. So the properties that match one are
        left out before jsonschema's own check.
        """
        patterns = schema.get("patternProperties", ())
        if patterns and validator.is_type(instance, "object"):
            schema = {key: value for key, value in schema.items() if key != "patternProperties"}
            instance = {
                name: value
                for name, value in instance.items()
                if not any(matches(pattern, name) for pattern in patterns)
            }
        yield from check_additional(validator, allowed, instance, schema) or ()

    def reference(
        validator: Any, target: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        """Follow a `$ref`, unless this value was checked by it already.

        Results are remembered within `remembered_checks` (else `checked` is None), by the ids of
        value and schema. A pair gets its result only once that is certain: at the first error, or
        when the check has ended without one.
        """
        checked, key = _CHECKED.get(), (id(instance), id(schema))
        if checked is not None and key in checked:
            _, _, was_valid = checked[key]
            if not was_valid:
                yield ValidationError(f"{instance!r} does not fit {target}")
            return
        valid = True
        for error in check_reference(validator, target, instance, schema) or ():
            valid = False
            # Before the yield: `is_valid` stops at the first error and never comes back here. The
            # objects are stored to keep them alive, so that no others get their ids.
            if checked is not None:
                checked[key] = instance, schema, False
            yield error
        if valid and checked is not None:
            checked[key] = instance, schema, True

    keywords = {
        "$ref": reference,
        "anyOf": _any_of,
        "oneOf": _one_of,
        "pattern": _pattern,
        "patternProperties": _pattern_properties,
        "additionalProperties": additional_properties,
    }
    return extend(kind, keywords)


def _any_of(validator: Any, options: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Stop at the first option that fits, and at the first error of those that do not."""
    if not any(validator.evolve(schema=option).is_valid(instance) for option in options):
        yield ValidationError(f"{instance!r} is not valid under any of the given schemas")


def _one_of(validator: Any, options: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    fitting = [option for option in options if validator.evolve(schema=option).is_valid(instance)]
    if not fitting:
        yield ValidationError(f"{instance!r} is not valid under any of the given schemas")
    elif len(fitting) > 1:
        listed = ", ".join(map(repr, fitting))
        yield ValidationError(f"{instance!r} is valid under each of {listed}")


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not matches(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, part in patterns.items():
            for name, value in instance.items():
                if matches(pattern, name):
                    yield from validator.descend(value, part, path=name, schema_path=pattern)
