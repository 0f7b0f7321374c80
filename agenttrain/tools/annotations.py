"""Annotations of parameters: the schema that the model sees, and the value that the function gets.

pydantic reads them. Dataclasses, TypedDicts and named tuples are handed to it as TypedDicts that
allow no other keys, and their constructors make the instances::

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    Strict,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
)
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import ErrorDetails, PydanticCustomError, core_schema
from typing_extensions import TypedDict

from agenttrain.tools.arguments import InvalidArguments
from agenttrain.types import AgenttrainError
from agenttrain.utils.json_schema import SchemaResolver, map_subschemas

Build = Callable[[Any, str], Any]
"""Builds the function's argument from (a JSON value that fits the schema, the value's place). The
place, such as `lines`, is for the message of InvalidArguments."""
SCALARS = (str, int, float, bool)
JSON_NAMES: dict[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
}
PLAIN_TYPES = (*JSON_NAMES, Any, object, list, dict)
"""Types whose values the function gets as they are in the JSON."""
UNTYPED_CONTAINERS = {list: "array", tuple: "array", dict: "object"}
"""JSON types of containers that are annotated without the types of their items."""
CONCRETE_TYPES: dict[Any, Any] = {
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    collections.abc.Mapping: dict,
    collections.abc.MutableMapping: dict,
}
"""Abstract types, by the type of the values that a function gets for them."""
SCHEMA_ERRORS = (PydanticUserError, PydanticUndefinedAnnotation)
"""Errors of pydantic for a type that it cannot read, or not write as a schema."""
NO_JSON = "has no JSON; use one of str, int, float, bool, list, dict"
DESCRIBED = re.compile(r"^ +(\w+) *(?:\([^)]*\))?: *(\S.*)$", re.MULTILINE)
"""A line ``    name (type): Its meaning.`` in a docstring's Attributes or Args."""
MAX_PROBLEMS = 3
"""Mistakes that one message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterType:
    """An annotation as the model and the function see it."""

    schema: dict[str, Any]
    build: Build | None
    """None: the function gets the JSON value as it is."""


def describe_type(hint: Any, *, shown: bool = True) -> ParameterType:
    """Describe an annotation, without a schema if it is not `shown` to a model.

    Raises ValueError for a type without JSON.
    """
    pydantic_hint = _for_pydantic(hint, within=())
    # Annotations without classes and enums are written as transformers' `get_json_schema` does,
    # whose forms are shorter: {"type": ["integer", "string"]} for `int | str`, and not an `anyOf`.
    dialect = PlainToolDialect if _is_plain(hint) else ToolDialect
    try:
        adapter = TypeAdapter(pydantic_hint)
        schema = _json_schema(adapter, dialect) if shown else {}
    except SCHEMA_ERRORS as error:
        raise ValueError(f"{hint!r} {NO_JSON}") from error
    return ParameterType(schema=schema, build=None if _is_json(hint) else _make_builder(adapter))


def build_instances(builders: Mapping[str, Build], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Replace arguments by instances. Raises InvalidArguments with the message of their class."""
    return {
        name: builders[name](value, name) if name in builders else value
        for name, value in arguments.items()
    }


def _is_json(hint: Any) -> bool:
    """Return True if a JSON value that fits the schema is already a value of the annotated type."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:  # texts are descriptions; anything else may change the value
        return _is_json(parts[0]) and all(isinstance(part, str) for part in parts[1:])
    if origin in (list, Union, types.UnionType):
        return all(map(_is_json, parts))
    if origin is dict:
        return not parts or (parts[0] is str and _is_json(parts[1]))
    return origin is Literal or (origin is None and any(hint is plain for plain in PLAIN_TYPES))


def _has_fields(hint: Any) -> bool:
    """Return True for a dataclass, a TypedDict or a named tuple; False for pydantic's classes."""
    if typing.is_typeddict(hint):
        return True
    is_class = isinstance(hint, type) and not hasattr(hint, "__pydantic_validator__")
    is_tuple = is_class and issubclass(hint, tuple) and hasattr(hint, "_fields")
    return is_tuple or (is_class and dataclasses.is_dataclass(hint))


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, enum.Enum)


def _is_plain(hint: Any) -> bool:
    """Return True if no part of an annotation is a class with fields, or an enum."""
    if _is_enum(hint) or _has_fields(hint) or hasattr(hint, "__pydantic_validator__"):
        return False
    return all(_is_plain(part) for part in get_args(hint))


def _for_pydantic(hint: Any, within: tuple[Any, ...]) -> Any:
    """Return the annotation that pydantic gets in place of `hint`.

    A class with fields becomes a TypedDict: pydantic checks the fields as a dict, from which a
    validator then makes the class's instance. An abstract container becomes a concrete one:
    ``Sequence[int]`` -> ``list[int]``. `within` are the classes around `hint`, to find one that
    contains itself. Raises ValueError for a type that cannot be written as JSON.
    """
    if any(hint is outer for outer in within):
        raise ValueError(f"{hint.__name__} contains itself, so its schema would have no end")
    if hasattr(hint, "__pydantic_validator__"):  # a pydantic model keeps pydantic's schema
        schema = _json_schema(TypeAdapter(hint), GenerateJsonSchema)
        return Annotated[hint, WithJsonSchema(schema)]
    if _has_fields(hint):
        fields = _typed_dict(hint, (*within, hint))
        if typing.is_typeddict(hint):  # the function gets the dict itself
            return fields
        return Annotated[fields, _constructor_validator(hint)]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:  # Annotated[int, "How many."]
        annotated: Any = Annotated  # Any: type checkers refuse a subscript that is no literal
        return annotated[(_for_pydantic(parts[0], within), *_metadata(parts[1:]))]
    if origin in (Union, types.UnionType):  # int | None
        return _union(parts, within)
    if not parts:  # int or an enum; typing.List, whose origin is list
        return _leaf(origin or hint)
    if origin is Literal:  # its parts are values, not annotations
        return hint
    # The parts of a generic dataclass (Box[int]) are no items, and those of Callable[[int], str]
    # begin with a list: pydantic reads the first, and `_leaf` refuses the second.
    if _has_fields(origin) or any(isinstance(part, list) for part in parts):
        return _leaf(hint)
    # list[int], dict[str, Point], tuple[int, ...]
    inner = tuple(part if part is ... else _for_pydantic(part, within) for part in parts)
    return CONCRETE_TYPES.get(origin, origin)[inner]


def _leaf(hint: Any) -> Any:
    """Return the annotation that pydantic gets for a hint without parts, such as `int` or an enum.

    Raises ValueError for a type that cannot be written as JSON.
    """
    if _is_enum(hint):  # without the docstring that pydantic would add
        values = [member.value for member in hint]
        return Annotated[hint, WithJsonSchema(_enum_schema(values, hint.__name__))]
    concrete = CONCRETE_TYPES.get(hint, hint)
    if concrete in UNTYPED_CONTAINERS:  # pydantic would write {} for the type of the items
        return Annotated[concrete, WithJsonSchema({"type": UNTYPED_CONTAINERS[concrete]})]
    if hint not in PLAIN_TYPES:
        # pydantic knows a date, say, and writes its schema later. This only checks that it can, in
        # our dialect, which refuses complex numbers: pydantic would show them as text.
        try:
            _json_schema(TypeAdapter(hint), ToolDialect)
        except SCHEMA_ERRORS as error:
            raise ValueError(f"{hint!r} {NO_JSON}") from error
    return hint


def _metadata(metadata: Sequence[Any]) -> list[Any]:
    """Return the metadata of Annotated, with the first text as the description.

    Example: ``("How many.", Field(ge=1))`` -> ``[Field(description="How many."), Field(ge=1)]``
    """
    texts = [part for part in metadata if isinstance(part, str)]
    fields: list[Any] = [Field(description=text) for text in texts[:1]]
    for part in metadata:
        if isinstance(part, FieldInfo) and part.discriminator is not None:
            # No discriminator: `_union` tries the options one after the other.
            part = Field(description=part.description)
        if not isinstance(part, str):
            fields.append(part)
    return fields


def _union(options: tuple[Any, ...], within: tuple[Any, ...]) -> Any:
    """Return a union whose first option that accepts a value makes the instance.

    Scalars are strict, so that `int` leaves "5" to `str`.
    """
    readable = []
    for option in options:
        if option is not type(None):
            kind = _for_pydantic(option, within)
            # The type below the annotation, e.g. int of Annotated[int, "How many."].
            base = get_args(kind)[0] if get_origin(kind) is Annotated else kind
            readable.append(Annotated[kind, Strict()] if base in SCALARS else kind)
    form: Any = Union  # Any: type checkers refuse a subscript that is no literal
    union = form[tuple(readable)]
    if len(readable) > 1:
        union = Annotated[union, Field(union_mode="left_to_right")]
    return form[union, None] if type(None) in options else union


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The arguments of a class's constructor."""

    hints: dict[str, Any]
    """Name -> annotation, in order."""
    optional: set[str]
    """Names that may be left out."""
    defaults: dict[str, Any]
    """Name -> default value, for the names that have one."""
    descriptions: dict[str, str]
    """Name -> meaning, from the docstring or a dataclass's metadata."""


def _read_fields(cls: Any) -> _Fields:
    """Return the fields of a dataclass, a named tuple or a TypedDict."""
    hints = typing.get_type_hints(cls, include_extras=True)
    defaults: dict[str, Any] = {}
    descriptions: dict[str, str] = dict(  # of lines `name (type): Its meaning.`
        DESCRIBED.findall((inspect.getdoc(cls) or "").replace("\r", ""))
    )
    if dataclasses.is_dataclass(cls):
        fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
        missing = dataclasses.MISSING
        names = list(fields)
        defaults = {
            name: field.default for name, field in fields.items() if field.default is not missing
        }
        has_factory = {
            name for name, field in fields.items() if field.default_factory is not missing
        }
        optional = {*defaults, *has_factory}
        for name, field in fields.items():
            if "description" in field.metadata:
                descriptions[name] = field.metadata["description"]
    elif typing.is_typeddict(cls):
        names = list(hints)
        optional = set(cls.__optional_keys__)
        # `__optional_keys__` ignores these markers where annotations are postponed (texts).
        for name, hint in hints.items():
            marker = get_origin(hint)
            if marker is NotRequired:
                optional.add(name)
            elif marker is Required:
                optional.discard(name)
            if marker in (Required, NotRequired):
                hints[name] = get_args(hint)[0]
    else:  # a named tuple
        names, defaults = list(cls._fields), dict(cls._field_defaults)
        optional = set(defaults)
    ordered_hints = {name: hints[name] for name in names}
    return _Fields(
        hints=ordered_hints, optional=optional, defaults=defaults, descriptions=descriptions
    )


def _typed_dict(cls: Any, within: tuple[Any, ...]) -> Any:
    """Return a TypedDict of the fields of a class. Raises ValueError that names the field."""
    fields = _read_fields(cls)
    members: dict[str, Any] = {}
    for name, hint in fields.hints.items():
        try:
            kind = _for_pydantic(hint, within)
        except ValueError as error:
            raise ValueError(f"{cls.__name__}.{name}: {error}") from error
        if name in fields.descriptions:
            kind = Annotated[kind, Field(description=fields.descriptions[name])]
        # Only shown to the model: the constructor fills in what a call leaves out.
        if type(fields.defaults.get(name)) in SCALARS:
            default = {"default": fields.defaults[name]}
            kind = Annotated[kind, Field(json_schema_extra=default)]
        members[name] = NotRequired[kind] if name in fields.optional else kind
    make_typed_dict: Any = TypedDict  # called as a function, which type checkers do not follow
    typed_dict = make_typed_dict(cls.__name__, members)
    typed_dict.__pydantic_config__ = ConfigDict(extra="forbid")
    return typed_dict


def _constructor_validator(cls: Callable[..., Any]) -> AfterValidator:
    """Return the validator that calls `cls`; an error becomes one that the model can read."""

    def make(keywords: dict[str, Any]) -> Any:
        """Make the instance of `cls`; pydantic reports the error that it raises."""
        try:
            return cls(**keywords)
        except AgenttrainError:  # ToolUnavailable and the like have their usual meaning
            raise
        except Exception as error:
            raise PydanticCustomError(
                "instance", "{problem}", {"problem": _reason(error)}
            ) from error

    return AfterValidator(make)


def _reason(error: Exception) -> str:
    """Return the text of an error for the model."""
    if isinstance(error, ValidationError):
        return "; ".join(problem["msg"] for problem in error.errors()[:MAX_PROBLEMS])
    return str(error) or type(error).__name__


def _make_builder(adapter: TypeAdapter[Any]) -> Build:
    """Return a Build that makes values of an adapter's annotation."""

    def build(value: Any, where: str) -> Any:
        """Make the function's argument; InvalidArguments names the places that do not fit."""
        try:
            return adapter.validate_python(value)
        except AgenttrainError:  # ToolUnavailable and the like have their usual meaning
            raise
        except ValidationError as error:
            problems = [
                f"{where}{_place(value, problem)}: {problem['msg']}"
                for problem in error.errors()[:MAX_PROBLEMS]
            ]
            raise InvalidArguments("; ".join(problems)) from error
        except Exception as error:  # raised by the user's own validator
            raise InvalidArguments(f"{where}: {_reason(error)}") from error

    return build


def _place(value: Any, problem: ErrorDetails) -> str:
    """Return the place in a value where pydantic found a problem, for the model.

    Example: in a value of ``list[Pen | Book]`` pydantic reports the steps ``(1, "Pen", "color")``,
    and the place is ``[1].color``. A step that names an option of a union is no part of the value
    and is left out. The last step of a `missing` problem is the absent key.
    """
    steps = problem["loc"]
    place = ""
    for number, step in enumerate(steps):
        is_missing = problem["type"] == "missing" and number == len(steps) - 1
        if isinstance(value, dict) and (step in value or is_missing):
            place, value = f"{place}.{step}", value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            place, value = f"{place}[{step}]", value[step]
        elif isinstance(value, list) and isinstance(step, int) and is_missing:
            place, value = f"{place}[{step}]", None
    return place


def _json_schema(adapter: TypeAdapter[Any], dialect: type[GenerateJsonSchema]) -> dict[str, Any]:
    """Return the schema without references and without pydantic's `title` and `discriminator`."""
    schema = adapter.json_schema(schema_generator=dialect)
    inlined: dict[str, Any] = _without_titles(SchemaResolver(schema).inlined())
    return inlined


def _without_titles(schema: Any) -> Any:
    """Remove `title` and `discriminator` from a schema and those inside it."""
    if not isinstance(schema, Mapping):
        return schema
    untitled = map_subschemas(schema, _without_titles)
    return {key: value for key, value in untitled.items() if key not in ("title", "discriminator")}


def _enum_schema(values: list[Any], name: str) -> dict[str, Any]:
    """Return the schema of an enum or Literal; raises ValueError for values that are no JSON."""
    if not values or any(type(value) not in JSON_NAMES for value in values):
        raise ValueError(f"{name}: its values {values} are not all plain JSON")
    kinds = list(dict.fromkeys(JSON_NAMES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


class ToolDialect(GenerateJsonSchema):
    """Writes schemas as chat templates know them: those of transformers' `get_json_schema`.

    pydantic calls ``<kind>_schema`` for each part of an annotation.
    """

    def sort(self, value: JsonSchemaValue, parent_key: str | None = None) -> JsonSchemaValue:
        """Keep the order in which keys are written."""
        return value

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        """Write null as a keyword: ``{"type": "integer", "nullable": true}``."""
        return {**self.generate_inner(schema["schema"]), "nullable": True}

    def literal_schema(self, schema: core_schema.LiteralSchema) -> JsonSchemaValue:
        """Write the values of a Literal with their types."""
        return _enum_schema(list(schema["expected"]), "Literal")

    def dict_schema(self, schema: core_schema.DictSchema) -> JsonSchemaValue:
        """Write the values alone: keys are strings in JSON."""
        values = self.generate_inner(schema.get("values_schema", core_schema.any_schema()))
        return {**super().dict_schema(schema), "additionalProperties": values}

    def set_schema(self, schema: core_schema.SetSchema) -> JsonSchemaValue:
        """Write the items first."""
        return _items_first(super().set_schema(schema))

    def frozenset_schema(self, schema: core_schema.FrozenSetSchema) -> JsonSchemaValue:
        """Write the items first."""
        return _items_first(super().frozenset_schema(schema))

    def typed_dict_schema(self, schema: core_schema.TypedDictSchema) -> JsonSchemaValue:
        """Write `required` also if it is empty."""
        json_schema = super().typed_dict_schema(schema)
        required = json_schema.get("required", [])
        ordered = {"type": "object", "properties": json_schema["properties"], "required": required}
        return {**ordered, **json_schema}

    def complex_schema(self, schema: core_schema.ComplexSchema) -> JsonSchemaValue:
        """Refuse complex numbers, which JSON does not have."""
        return self.handle_invalid_for_json_schema(schema, "a complex number")


def _items_first(schema: JsonSchemaValue) -> JsonSchemaValue:
    return {"type": schema["type"], "items": schema["items"], **schema}


class PlainToolDialect(ToolDialect):
    """Writes the schema of an annotation without classes as transformers' `get_json_schema` does.

    Example: ``int | str`` is ``{"type": ["integer", "string"]}``, not an ``anyOf`` of two schemas.
    """

    def tuple_schema(self, schema: core_schema.TupleSchema) -> JsonSchemaValue:
        """Leave out the length; a tuple of another length is refused when it is built."""
        json_schema = super().tuple_schema(schema)
        if "variadic_item_index" not in schema:  # tuple[int, str]; tuple[int, ...] has no length
            del json_schema["minItems"], json_schema["maxItems"]
        return json_schema

    def union_schema(self, schema: core_schema.UnionSchema) -> JsonSchemaValue:
        """Write a union of simple types as a list of their names."""
        # A choice is a schema, or (a schema, its label).
        choices = (c[0] if isinstance(c, tuple) else c for c in schema["choices"])
        options = [self.generate_inner(choice) for choice in choices]
        names = [option["type"] for option in options if option.keys() == {"type"}]
        all_simple = len(names) == len(options) and all(isinstance(name, str) for name in names)
        if not all_simple:
            return {"anyOf": options}
        names = sorted(set(names))
        return {"type": names[0] if len(names) == 1 else names}
