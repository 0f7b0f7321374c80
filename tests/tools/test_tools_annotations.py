"""The text that the model sees of each kind of annotation, byte for byte."""

# The spelling of an annotation is the case itself.
# ruff: noqa: UP006, UP045, RUF036

from __future__ import annotations

import enum
import json
import typing
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Optional, Required, TypedDict

import pydantic
import pytest

from agenttrain.tools.tool import FunctionTool


class Color(enum.Enum):
    """Colours."""

    red = "r"
    blue = "b"


class Size(enum.IntEnum):
    small = 1
    large = 2


class Mixed(enum.Enum):
    text = "t"
    number = 1


class Word(enum.StrEnum):
    hello = "hello"


@dataclass
class Line:
    """A line of an order.

    Attributes:
        sku: Which article.
        color (Color): Which color.
    """

    sku: str
    count: int = field(default=1, metadata={"description": "How many."})
    color: Color | None = None
    tags: list[str] = field(default_factory=list)
    size: Size = Size.small
    pair: tuple[int, str] | None = None
    either: int | str | None = "x"
    words: Annotated[str, "Some words."] = ""
    data: dict[str, Any] = field(default_factory=dict)
    anything: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    lines: list[Line]
    first: Line | None = None
    by_name: Mapping[str, Line] = field(default_factory=dict)
    how: Literal["air", "sea"] = "air"
    hidden: int = field(default=0, init=False)


class Point(NamedTuple):
    """A place.

    Attributes:
        x: East.
    """

    x: float
    y: float = 0.0


class Options(TypedDict):
    """Options.

    Attributes:
        gift: Wrapped.
    """

    gift: bool
    extra: NotRequired[list[Line]]
    note: Annotated[str, "A note."]


class Loose(TypedDict, total=False):
    key: Required[str]
    value: int


class Street(pydantic.BaseModel):
    """A street."""

    title: str = pydantic.Field(max_length=5)


class Address(pydantic.BaseModel):
    """An address."""

    street: Street
    zip: int = pydantic.Field(ge=1, description="Postal code.")
    other: Street | None = None
    line: Line | None = None
    kind: Literal["home", "work"] = "home"
    place: Point | None = None
    color: Color = Color.red
    alias: str = pydantic.Field("a", alias="nick", examples=["b"])
    pair: tuple[int, int] = (0, 0)
    more: dict[str, Street] = {}
    model_config = pydantic.ConfigDict(json_schema_extra={"examples": [{"title": 1}]})


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    only: int


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]


class Owner(pydantic.BaseModel):
    pet: Cat | Dog = pydantic.Field(discriminator="kind")


@pydantic.dataclasses.dataclass
class Checked:
    """Checked by pydantic."""

    name: str
    number: int = pydantic.Field(default=3, lt=9)


Alias = list[Line]
TEXTS = {
    "Line": (
        '{"type": "object", "properties": {"sku": {"type": "string", '
        '"description": "Which article."}, "count": {"type": "integer", '
        '"description": "How many.", "default": 1}, "color": {"type": '
        '"string", "enum": ["r", "b"], "nullable": true, "description": "Which '
        'color."}, "tags": {"type": "array", "items": {"type": "string"}}, '
        '"size": {"type": "integer", "enum": [1, 2]}, "pair": {"type": '
        '"array", "prefixItems": [{"type": "integer"}, {"type": "string"}], '
        '"minItems": 2, "maxItems": 2, "nullable": true}, "either": {"anyOf": '
        '[{"type": "integer"}, {"type": "string"}], "nullable": true, '
        '"default": "x"}, "words": {"type": "string", "description": "Some '
        'words.", "default": ""}, "data": {"type": "object", '
        '"additionalProperties": {}}, "anything": {}}, "required": ["sku"], '
        '"additionalProperties": false}'
    ),
    "Street": (
        '{"description": "A street.", "properties": {"title": {"maxLength": 5, '
        '"type": "string"}}, "required": ["title"], "type": "object"}'
    ),
    "Point": (
        '{"type": "object", "properties": {"x": {"type": "number", '
        '"description": "East."}, "y": {"type": "number", "default": 0.0}}, '
        '"required": ["x"], "additionalProperties": false}'
    ),
    "Cat": (
        '{"properties": {"kind": {"const": "cat", "type": "string"}, "lives": '
        '{"default": 9, "type": "integer"}}, "required": ["kind"], "type": '
        '"object"}'
    ),
    "Dog": (
        '{"properties": {"kind": {"const": "dog", "type": "string"}}, '
        '"required": ["kind"], "type": "object"}'
    ),
}
"""Schemas that stand in the table by their name: <Line>."""
TABLE: list[tuple[Any, str]] = [
    (str, '{"type": "string", "description": "It."}'),
    (int, '{"type": "integer", "description": "It."}'),
    (float, '{"type": "number", "description": "It."}'),
    (bool, '{"type": "boolean", "description": "It."}'),
    (Any, '{"description": "It."}'),
    (None, '{"type": "null", "description": "It."}'),
    (dict, '{"type": "object", "description": "It."}'),
    (list, '{"type": "array", "description": "It."}'),
    (tuple, '{"type": "array", "description": "It."}'),
    (typing.List, '{"type": "array", "description": "It."}'),
    (typing.Dict, '{"type": "object", "description": "It."}'),
    (list[int], '{"type": "array", "items": {"type": "integer"}, "description": "It."}'),
    (typing.List[str], '{"type": "array", "items": {"type": "string"}, "description": "It."}'),
    (
        list[list[float]],
        (
            '{"type": "array", "items": {"type": "array", "items": {"type": '
            '"number"}}, "description": "It."}'
        ),
    ),
    (list[Any], '{"type": "array", "items": {}, "description": "It."}'),
    (
        dict[str, int],
        ('{"type": "object", "additionalProperties": {"type": "integer"}, "description": "It."}'),
    ),
    (dict[str, Any], '{"type": "object", "additionalProperties": {}, "description": "It."}'),
    (
        dict[str, list[int]],
        (
            '{"type": "object", "additionalProperties": {"type": "array", "items": '
            '{"type": "integer"}}, "description": "It."}'
        ),
    ),
    (
        dict[int, str],
        ('{"type": "object", "additionalProperties": {"type": "string"}, "description": "It."}'),
    ),
    (
        typing.Dict[str, bool],
        ('{"type": "object", "additionalProperties": {"type": "boolean"}, "description": "It."}'),
    ),
    (
        tuple[int, str],
        (
            '{"type": "array", "prefixItems": [{"type": "integer"}, {"type": '
            '"string"}], "description": "It."}'
        ),
    ),
    (
        tuple[int, int, float],
        (
            '{"type": "array", "prefixItems": [{"type": "integer"}, {"type": '
            '"integer"}, {"type": "number"}], "description": "It."}'
        ),
    ),
    (
        list[tuple[int, str]],
        (
            '{"type": "array", "items": {"type": "array", "prefixItems": [{"type": '
            '"integer"}, {"type": "string"}]}, "description": "It."}'
        ),
    ),
    (int | str, '{"type": ["integer", "string"], "description": "It."}'),
    (str | int, '{"type": ["integer", "string"], "description": "It."}'),
    (int | float | str, '{"type": ["integer", "number", "string"], "description": "It."}'),
    (
        list[int] | str,
        (
            '{"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": '
            '"string"}], "description": "It."}'
        ),
    ),
    (list | tuple | None, '{"type": "array", "nullable": true, "description": "It."}'),
    (
        dict[str, int] | None,
        (
            '{"type": "object", "additionalProperties": {"type": "integer"}, '
            '"nullable": true, "description": "It."}'
        ),
    ),
    (Optional[int], '{"type": "integer", "nullable": true, "description": "It."}'),
    (int | None, '{"type": "integer", "nullable": true, "description": "It."}'),
    (None | str, '{"type": "string", "nullable": true, "description": "It."}'),
    (int | str | None, ('{"type": ["integer", "string"], "nullable": true, "description": "It."}')),
    (
        Optional[list[int]],
        ('{"type": "array", "items": {"type": "integer"}, "nullable": true, "description": "It."}'),
    ),
    (
        list[int | None],
        ('{"type": "array", "items": {"type": "integer", "nullable": true}, "description": "It."}'),
    ),
    (
        list[str] | dict[str, str] | None,
        (
            '{"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": '
            '"object", "additionalProperties": {"type": "string"}}], "nullable": '
            'true, "description": "It."}'
        ),
    ),
    (Literal["a", "b"], '{"type": "string", "enum": ["a", "b"], "description": "It."}'),
    (Literal[1, 2], '{"type": "integer", "enum": [1, 2], "description": "It."}'),
    (
        Literal["a", 1, None],
        ('{"type": ["string", "integer", "null"], "enum": ["a", 1, null], "description": "It."}'),
    ),
    (Literal[True], '{"type": "boolean", "enum": [true], "description": "It."}'),
    (
        Literal["a"] | None,
        ('{"type": "string", "enum": ["a"], "nullable": true, "description": "It."}'),
    ),
    (
        Literal["a"] | int,
        (
            '{"anyOf": [{"type": "string", "enum": ["a"]}, {"type": "integer"}], '
            '"description": "It."}'
        ),
    ),
    (
        list[Literal["a", "b"]],
        (
            '{"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, '
            '"description": "It."}'
        ),
    ),
    (Color, '{"type": "string", "enum": ["r", "b"], "description": "It."}'),
    (Size, '{"type": "integer", "enum": [1, 2], "description": "It."}'),
    (Mixed, ('{"type": ["string", "integer"], "enum": ["t", 1], "description": "It."}')),
    (Word, '{"type": "string", "enum": ["hello"], "description": "It."}'),
    (
        Color | None,
        ('{"type": "string", "enum": ["r", "b"], "nullable": true, "description": "It."}'),
    ),
    (
        list[Color],
        (
            '{"type": "array", "items": {"type": "string", "enum": ["r", "b"]}, '
            '"description": "It."}'
        ),
    ),
    (
        dict[str, Color],
        (
            '{"type": "object", "additionalProperties": {"type": "string", "enum": '
            '["r", "b"]}, "description": "It."}'
        ),
    ),
    (
        Color | int,
        (
            '{"anyOf": [{"type": "string", "enum": ["r", "b"]}, {"type": '
            '"integer"}], "description": "It."}'
        ),
    ),
    (
        Line,
        (
            '{"type": "object", "properties": {"sku": {"type": "string", '
            '"description": "Which article."}, "count": {"type": "integer", '
            '"description": "How many.", "default": 1}, "color": {"type": '
            '"string", "enum": ["r", "b"], "nullable": true, "description": "Which '
            'color."}, "tags": {"type": "array", "items": {"type": "string"}}, '
            '"size": {"type": "integer", "enum": [1, 2]}, "pair": {"type": '
            '"array", "prefixItems": [{"type": "integer"}, {"type": "string"}], '
            '"minItems": 2, "maxItems": 2, "nullable": true}, "either": {"anyOf": '
            '[{"type": "integer"}, {"type": "string"}], "nullable": true, '
            '"default": "x"}, "words": {"type": "string", "description": "Some '
            'words.", "default": ""}, "data": {"type": "object", '
            '"additionalProperties": {}}, "anything": {}}, "required": ["sku"], '
            '"additionalProperties": false, "description": "It."}'
        ),
    ),
    (
        Line | None,
        (
            '{"type": "object", "properties": {"sku": {"type": "string", '
            '"description": "Which article."}, "count": {"type": "integer", '
            '"description": "How many.", "default": 1}, "color": {"type": '
            '"string", "enum": ["r", "b"], "nullable": true, "description": "Which '
            'color."}, "tags": {"type": "array", "items": {"type": "string"}}, '
            '"size": {"type": "integer", "enum": [1, 2]}, "pair": {"type": '
            '"array", "prefixItems": [{"type": "integer"}, {"type": "string"}], '
            '"minItems": 2, "maxItems": 2, "nullable": true}, "either": {"anyOf": '
            '[{"type": "integer"}, {"type": "string"}], "nullable": true, '
            '"default": "x"}, "words": {"type": "string", "description": "Some '
            'words.", "default": ""}, "data": {"type": "object", '
            '"additionalProperties": {}}, "anything": {}}, "required": ["sku"], '
            '"additionalProperties": false, "nullable": true, "description": "It."}'
        ),
    ),
    (list[Line], '{"type": "array", "items": <Line>, "description": "It."}'),
    (Alias, '{"type": "array", "items": <Line>, "description": "It."}'),
    (Sequence[Line], '{"type": "array", "items": <Line>, "description": "It."}'),
    (Iterable[Line], '{"type": "array", "items": <Line>, "description": "It."}'),
    (
        set[Color],
        (
            '{"type": "array", "items": {"type": "string", "enum": ["r", "b"]}, '
            '"uniqueItems": true, "description": "It."}'
        ),
    ),
    (
        frozenset[Color],
        (
            '{"type": "array", "items": {"type": "string", "enum": ["r", "b"]}, '
            '"uniqueItems": true, "description": "It."}'
        ),
    ),
    (tuple[Line, ...], '{"type": "array", "items": <Line>, "description": "It."}'),
    (
        tuple[Line, int],
        (
            '{"type": "array", "prefixItems": [<Line>, {"type": "integer"}], '
            '"minItems": 2, "maxItems": 2, "description": "It."}'
        ),
    ),
    (dict[str, Line], ('{"type": "object", "additionalProperties": <Line>, "description": "It."}')),
    (
        Mapping[str, Line],
        ('{"type": "object", "additionalProperties": <Line>, "description": "It."}'),
    ),
    (
        MutableMapping[str, Line | None],
        (
            '{"type": "object", "additionalProperties": {"type": "object", '
            '"properties": {"sku": {"type": "string", "description": "Which '
            'article."}, "count": {"type": "integer", "description": "How many.", '
            '"default": 1}, "color": {"type": "string", "enum": ["r", "b"], '
            '"nullable": true, "description": "Which color."}, "tags": {"type": '
            '"array", "items": {"type": "string"}}, "size": {"type": "integer", '
            '"enum": [1, 2]}, "pair": {"type": "array", "prefixItems": [{"type": '
            '"integer"}, {"type": "string"}], "minItems": 2, "maxItems": 2, '
            '"nullable": true}, "either": {"anyOf": [{"type": "integer"}, {"type": '
            '"string"}], "nullable": true, "default": "x"}, "words": {"type": '
            '"string", "description": "Some words.", "default": ""}, "data": '
            '{"type": "object", "additionalProperties": {}}, "anything": {}}, '
            '"required": ["sku"], "additionalProperties": false, "nullable": '
            'true}, "description": "It."}'
        ),
    ),
    (Line | Point, '{"anyOf": [<Line>, <Point>], "description": "It."}'),
    (Line | Point | None, '{"anyOf": [<Line>, <Point>], "nullable": true, "description": "It."}'),
    (
        list[Line | int | str],
        (
            '{"type": "array", "items": {"anyOf": [<Line>, {"type": "integer"}, '
            '{"type": "string"}]}, "description": "It."}'
        ),
    ),
    (
        list[int | None | Color],
        (
            '{"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": '
            '"string", "enum": ["r", "b"]}], "nullable": true}, "description": '
            '"It."}'
        ),
    ),
    (
        dict[str, list[Line]] | Color,
        (
            '{"anyOf": [{"type": "object", "additionalProperties": {"type": '
            '"array", "items": <Line>}}, {"type": "string", "enum": ["r", "b"]}], '
            '"description": "It."}'
        ),
    ),
    (
        Order,
        (
            '{"type": "object", "properties": {"lines": {"type": "array", "items": '
            '<Line>}, "first": {"type": "object", "properties": {"sku": {"type": '
            '"string", "description": "Which article."}, "count": {"type": '
            '"integer", "description": "How many.", "default": 1}, "color": '
            '{"type": "string", "enum": ["r", "b"], "nullable": true, '
            '"description": "Which color."}, "tags": {"type": "array", "items": '
            '{"type": "string"}}, "size": {"type": "integer", "enum": [1, 2]}, '
            '"pair": {"type": "array", "prefixItems": [{"type": "integer"}, '
            '{"type": "string"}], "minItems": 2, "maxItems": 2, "nullable": true}, '
            '"either": {"anyOf": [{"type": "integer"}, {"type": "string"}], '
            '"nullable": true, "default": "x"}, "words": {"type": "string", '
            '"description": "Some words.", "default": ""}, "data": {"type": '
            '"object", "additionalProperties": {}}, "anything": {}}, "required": '
            '["sku"], "additionalProperties": false, "nullable": true}, "by_name": '
            '{"type": "object", "additionalProperties": <Line>}, "how": {"type": '
            '"string", "enum": ["air", "sea"], "default": "air"}}, "required": '
            '["lines"], "additionalProperties": false, "description": "It."}'
        ),
    ),
    (
        Point,
        (
            '{"type": "object", "properties": {"x": {"type": "number", '
            '"description": "East."}, "y": {"type": "number", "default": 0.0}}, '
            '"required": ["x"], "additionalProperties": false, "description": '
            '"It."}'
        ),
    ),
    (list[Point], '{"type": "array", "items": <Point>, "description": "It."}'),
    (
        Options,
        (
            '{"type": "object", "properties": {"gift": {"type": "boolean", '
            '"description": "Wrapped."}, "extra": {"type": "array", "items": '
            '<Line>}, "note": {"type": "string", "description": "A note."}}, '
            '"required": ["gift", "note"], "additionalProperties": false, '
            '"description": "It."}'
        ),
    ),
    (
        Loose,
        (
            '{"type": "object", "properties": {"key": {"type": "string"}, "value": '
            '{"type": "integer"}}, "required": ["key"], "additionalProperties": '
            'false, "description": "It."}'
        ),
    ),
    (
        Street,
        (
            '{"description": "It.", "properties": {"title": {"maxLength": 5, '
            '"type": "string"}}, "required": ["title"], "type": "object"}'
        ),
    ),
    (
        Address,
        (
            '{"description": "It.", "examples": [{"title": 1}], "properties": '
            '{"street": <Street>, "zip": {"description": "Postal code.", '
            '"minimum": 1, "type": "integer"}, "other": {"anyOf": [<Street>, '
            '{"type": "null"}], "default": null}, "line": {"anyOf": '
            '[{"description": "A line of an order.\\n\\nAttributes:\\n    sku: Which '
            'article.\\n    color (Color): Which color.", "properties": {"sku": '
            '{"type": "string"}, "count": {"default": 1, "description": "How '
            'many.", "type": "integer"}, "color": {"anyOf": [{"description": '
            '"Colours.", "enum": ["r", "b"], "type": "string"}, {"type": "null"}], '
            '"default": null}, "tags": {"items": {"type": "string"}, "type": '
            '"array"}, "size": {"enum": [1, 2], "type": "integer", "default": 1}, '
            '"pair": {"anyOf": [{"maxItems": 2, "minItems": 2, "prefixItems": '
            '[{"type": "integer"}, {"type": "string"}], "type": "array"}, {"type": '
            '"null"}], "default": null}, "either": {"anyOf": [{"type": "integer"}, '
            '{"type": "string"}, {"type": "null"}], "default": "x"}, "words": '
            '{"default": "", "type": "string"}, "data": {"additionalProperties": '
            'true, "type": "object"}, "anything": {"default": null}}, "required": '
            '["sku"], "type": "object"}, {"type": "null"}], "default": null}, '
            '"kind": {"default": "home", "enum": ["home", "work"], "type": '
            '"string"}, "place": {"anyOf": [{"maxItems": 2, "minItems": 1, '
            '"prefixItems": [{"type": "number"}, {"default": 0.0, "type": '
            '"number"}], "type": "array"}, {"type": "null"}], "default": null}, '
            '"color": {"description": "Colours.", "enum": ["r", "b"], "type": '
            '"string", "default": "r"}, "nick": {"default": "a", "examples": '
            '["b"], "type": "string"}, "pair": {"default": [0, 0], "maxItems": 2, '
            '"minItems": 2, "prefixItems": [{"type": "integer"}, {"type": '
            '"integer"}], "type": "array"}, "more": {"additionalProperties": '
            '<Street>, "default": {}, "type": "object"}}, "required": ["street", '
            '"zip"], "type": "object"}'
        ),
    ),
    (
        list[Address],
        (
            '{"type": "array", "items": {"description": "An address.", "examples": '
            '[{"title": 1}], "properties": {"street": <Street>, "zip": '
            '{"description": "Postal code.", "minimum": 1, "type": "integer"}, '
            '"other": {"anyOf": [<Street>, {"type": "null"}], "default": null}, '
            '"line": {"anyOf": [{"description": "A line of an '
            "order.\\n\\nAttributes:\\n    sku: Which article.\\n    color (Color): "
            'Which color.", "properties": {"sku": {"type": "string"}, "count": '
            '{"default": 1, "description": "How many.", "type": "integer"}, '
            '"color": {"anyOf": [{"description": "Colours.", "enum": ["r", "b"], '
            '"type": "string"}, {"type": "null"}], "default": null}, "tags": '
            '{"items": {"type": "string"}, "type": "array"}, "size": {"enum": [1, '
            '2], "type": "integer", "default": 1}, "pair": {"anyOf": [{"maxItems": '
            '2, "minItems": 2, "prefixItems": [{"type": "integer"}, {"type": '
            '"string"}], "type": "array"}, {"type": "null"}], "default": null}, '
            '"either": {"anyOf": [{"type": "integer"}, {"type": "string"}, '
            '{"type": "null"}], "default": "x"}, "words": {"default": "", "type": '
            '"string"}, "data": {"additionalProperties": true, "type": "object"}, '
            '"anything": {"default": null}}, "required": ["sku"], "type": '
            '"object"}, {"type": "null"}], "default": null}, "kind": {"default": '
            '"home", "enum": ["home", "work"], "type": "string"}, "place": '
            '{"anyOf": [{"maxItems": 2, "minItems": 1, "prefixItems": [{"type": '
            '"number"}, {"default": 0.0, "type": "number"}], "type": "array"}, '
            '{"type": "null"}], "default": null}, "color": {"description": '
            '"Colours.", "enum": ["r", "b"], "type": "string", "default": "r"}, '
            '"nick": {"default": "a", "examples": ["b"], "type": "string"}, '
            '"pair": {"default": [0, 0], "maxItems": 2, "minItems": 2, '
            '"prefixItems": [{"type": "integer"}, {"type": "integer"}], "type": '
            '"array"}, "more": {"additionalProperties": <Street>, "default": {}, '
            '"type": "object"}}, "required": ["street", "zip"], "type": "object"}, '
            '"description": "It."}'
        ),
    ),
    (
        Address | None,
        (
            '{"description": "It.", "examples": [{"title": 1}], "properties": '
            '{"street": <Street>, "zip": {"description": "Postal code.", '
            '"minimum": 1, "type": "integer"}, "other": {"anyOf": [<Street>, '
            '{"type": "null"}], "default": null}, "line": {"anyOf": '
            '[{"description": "A line of an order.\\n\\nAttributes:\\n    sku: Which '
            'article.\\n    color (Color): Which color.", "properties": {"sku": '
            '{"type": "string"}, "count": {"default": 1, "description": "How '
            'many.", "type": "integer"}, "color": {"anyOf": [{"description": '
            '"Colours.", "enum": ["r", "b"], "type": "string"}, {"type": "null"}], '
            '"default": null}, "tags": {"items": {"type": "string"}, "type": '
            '"array"}, "size": {"enum": [1, 2], "type": "integer", "default": 1}, '
            '"pair": {"anyOf": [{"maxItems": 2, "minItems": 2, "prefixItems": '
            '[{"type": "integer"}, {"type": "string"}], "type": "array"}, {"type": '
            '"null"}], "default": null}, "either": {"anyOf": [{"type": "integer"}, '
            '{"type": "string"}, {"type": "null"}], "default": "x"}, "words": '
            '{"default": "", "type": "string"}, "data": {"additionalProperties": '
            'true, "type": "object"}, "anything": {"default": null}}, "required": '
            '["sku"], "type": "object"}, {"type": "null"}], "default": null}, '
            '"kind": {"default": "home", "enum": ["home", "work"], "type": '
            '"string"}, "place": {"anyOf": [{"maxItems": 2, "minItems": 1, '
            '"prefixItems": [{"type": "number"}, {"default": 0.0, "type": '
            '"number"}], "type": "array"}, {"type": "null"}], "default": null}, '
            '"color": {"description": "Colours.", "enum": ["r", "b"], "type": '
            '"string", "default": "r"}, "nick": {"default": "a", "examples": '
            '["b"], "type": "string"}, "pair": {"default": [0, 0], "maxItems": 2, '
            '"minItems": 2, "prefixItems": [{"type": "integer"}, {"type": '
            '"integer"}], "type": "array"}, "more": {"additionalProperties": '
            '<Street>, "default": {}, "type": "object"}}, "required": ["street", '
            '"zip"], "type": "object", "nullable": true}'
        ),
    ),
    (
        Address | Line,
        (
            '{"anyOf": [{"description": "An address.", "examples": [{"title": 1}], '
            '"properties": {"street": <Street>, "zip": {"description": "Postal '
            'code.", "minimum": 1, "type": "integer"}, "other": {"anyOf": '
            '[<Street>, {"type": "null"}], "default": null}, "line": {"anyOf": '
            '[{"description": "A line of an order.\\n\\nAttributes:\\n    sku: Which '
            'article.\\n    color (Color): Which color.", "properties": {"sku": '
            '{"type": "string"}, "count": {"default": 1, "description": "How '
            'many.", "type": "integer"}, "color": {"anyOf": [{"description": '
            '"Colours.", "enum": ["r", "b"], "type": "string"}, {"type": "null"}], '
            '"default": null}, "tags": {"items": {"type": "string"}, "type": '
            '"array"}, "size": {"enum": [1, 2], "type": "integer", "default": 1}, '
            '"pair": {"anyOf": [{"maxItems": 2, "minItems": 2, "prefixItems": '
            '[{"type": "integer"}, {"type": "string"}], "type": "array"}, {"type": '
            '"null"}], "default": null}, "either": {"anyOf": [{"type": "integer"}, '
            '{"type": "string"}, {"type": "null"}], "default": "x"}, "words": '
            '{"default": "", "type": "string"}, "data": {"additionalProperties": '
            'true, "type": "object"}, "anything": {"default": null}}, "required": '
            '["sku"], "type": "object"}, {"type": "null"}], "default": null}, '
            '"kind": {"default": "home", "enum": ["home", "work"], "type": '
            '"string"}, "place": {"anyOf": [{"maxItems": 2, "minItems": 1, '
            '"prefixItems": [{"type": "number"}, {"default": 0.0, "type": '
            '"number"}], "type": "array"}, {"type": "null"}], "default": null}, '
            '"color": {"description": "Colours.", "enum": ["r", "b"], "type": '
            '"string", "default": "r"}, "nick": {"default": "a", "examples": '
            '["b"], "type": "string"}, "pair": {"default": [0, 0], "maxItems": 2, '
            '"minItems": 2, "prefixItems": [{"type": "integer"}, {"type": '
            '"integer"}], "type": "array"}, "more": {"additionalProperties": '
            '<Street>, "default": {}, "type": "object"}}, "required": ["street", '
            '"zip"], "type": "object"}, <Line>], "description": "It."}'
        ),
    ),
    (
        Closed,
        (
            '{"additionalProperties": false, "properties": {"only": {"type": '
            '"integer"}}, "required": ["only"], "type": "object", "description": '
            '"It."}'
        ),
    ),
    (
        Owner,
        (
            '{"properties": {"pet": {"oneOf": [<Cat>, <Dog>]}}, "required": '
            '["pet"], "type": "object", "description": "It."}'
        ),
    ),
    (
        Checked,
        (
            '{"description": "It.", "properties": {"name": {"type": "string"}, '
            '"number": {"default": 3, "exclusiveMaximum": 9, "type": "integer"}}, '
            '"required": ["name"], "type": "object"}'
        ),
    ),
    (
        Checked | None,
        (
            '{"description": "It.", "properties": {"name": {"type": "string"}, '
            '"number": {"default": 3, "exclusiveMaximum": 9, "type": "integer"}}, '
            '"required": ["name"], "type": "object", "nullable": true}'
        ),
    ),
    (Cat | Dog, '{"anyOf": [<Cat>, <Dog>], "description": "It."}'),
    (
        Annotated[Line, "A line."],
        (
            '{"type": "object", "properties": {"sku": {"type": "string", '
            '"description": "Which article."}, "count": {"type": "integer", '
            '"description": "How many.", "default": 1}, "color": {"type": '
            '"string", "enum": ["r", "b"], "nullable": true, "description": "Which '
            'color."}, "tags": {"type": "array", "items": {"type": "string"}}, '
            '"size": {"type": "integer", "enum": [1, 2]}, "pair": {"type": '
            '"array", "prefixItems": [{"type": "integer"}, {"type": "string"}], '
            '"minItems": 2, "maxItems": 2, "nullable": true}, "either": {"anyOf": '
            '[{"type": "integer"}, {"type": "string"}], "nullable": true, '
            '"default": "x"}, "words": {"type": "string", "description": "Some '
            'words.", "default": ""}, "data": {"type": "object", '
            '"additionalProperties": {}}, "anything": {}}, "required": ["sku"], '
            '"additionalProperties": false, "description": "It."}'
        ),
    ),
    (
        Annotated[Color, "A color."] | None,
        ('{"type": "string", "enum": ["r", "b"], "nullable": true, "description": "It."}'),
    ),
    (
        Annotated[Color, pydantic.Field(description="Which.")],
        '{"type": "string", "enum": ["r", "b"], "description": "It."}',
    ),
    (
        list[object] | Color,
        (
            '{"anyOf": [{"type": "array", "items": {}}, {"type": "string", "enum": '
            '["r", "b"]}], "description": "It."}'
        ),
    ),
]


def shown(annotation: Any) -> str:
    """Return the text of a parameter of this annotation."""

    def tool(value: Any) -> None:
        """Take.

        Args:
            value: It.
        """

    tool.__annotations__["value"] = annotation
    return json.dumps(FunctionTool(tool).schema["function"]["parameters"]["properties"]["value"])


@pytest.mark.parametrize(("annotation", "text"), TABLE, ids=[repr(kind) for kind, _ in TABLE])
def test_the_text_of_an_annotation(annotation, text):
    for _ in range(2):  # a text of the table may itself hold names
        for name, schema in TEXTS.items():
            text = text.replace(f"<{name}>", schema)
    assert shown(annotation) == text
