"""Schemas of tools: references, `allOf`, `const`, recursion, and patterns in linear time."""

from __future__ import annotations

import pytest

from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments, coerce
from agenttrain.utils.json_schema import SchemaResolver, without_nullable
from agenttrain.utils.json_validator import make_validator, matches, schema_problem

NODE = {
    "type": "object",
    "properties": {
        "v": {"type": "integer"},
        "left": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}], "default": None},
    },
    "required": ["v"],
}
TREE = {
    "type": "object",
    "properties": {"root": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]}},
    "$defs": {"Node": NODE},
}
"""What pydantic writes for ``root: Optional[Node]``, of a Node that holds Nodes."""
ID = {"$defs": {"Id": {"type": "integer", "minimum": 1}}}


@pytest.mark.parametrize(
    ("schema", "expanded"),
    [
        ({"$ref": "#/$defs/Id"}, {"type": "integer", "minimum": 1}),
        ({"$ref": "#/$defs/Id", "title": "t"}, {"title": "t", "type": "integer", "minimum": 1}),
        ({"const": 3}, {"enum": [3]}),
        ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}]}, {"enum": [2, 3]}),
        ({"allOf": [{"type": ["number", "null"]}, {"type": "integer"}]}, {"type": ["integer"]}),
        (
            {
                "allOf": [
                    {"properties": {"a": {}}, "required": ["a"]},
                    {"properties": {"b": {}}, "required": ["a", "b"]},
                ]
            },
            {"properties": {"a": {}, "b": {}}, "required": ["a", "b"]},
        ),
        ({"$ref": "#"}, {**ID}),  # a schema that is itself, without end
        ({"$ref": "#/$defs/Other"}, {}),
        ({"$ref": "http://127.0.0.1:9/schema.json"}, {}),
        (True, {}),
    ],
)
def test_an_expanded_schema_says_all_itself(schema, expanded):
    assert SchemaResolver(ID).expand(schema) == expanded


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/Id"}, ["integer"]),
        ({"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]}, ["integer", "null"]),
        ({"allOf": [{"$ref": "#/$defs/Id"}]}, ["integer"]),
        ({"const": True}, ["boolean"]),
        ({"enum": [1, "a"]}, ["integer", "string"]),
        ({"type": "array", "nullable": True}, ["array", "null"]),
        ({}, []),
    ],
)
def test_the_types_of_a_parameter(schema, types):
    assert SchemaResolver(ID).types(without_nullable(schema)) == types


def test_a_schema_that_contains_itself_is_not_inlined():
    with pytest.raises(ValueError, match="Node contains itself"):
        SchemaResolver(TREE).inlined()
    one = {"type": "array", "items": {"$ref": "#/$defs/Id", "title": "t"}, **ID}
    items = {"type": "integer", "minimum": 1, "title": "t"}
    assert SchemaResolver(one).inlined() == {"type": "array", "items": items}


@pytest.mark.parametrize(
    ("schema", "merged"),
    [
        (  # as pydantic 1 writes a description beside a reference
            {"properties": {"next": {"allOf": [{"$ref": "#"}], "title": "n"}}},
            {"properties": {"next": {"properties": {"next": {"$ref": "#"}}, "title": "n"}}},
        ),
        (
            {
                "allOf": [{"$ref": "#/$defs/Node"}, {"required": ["next"]}],
                "$defs": {"Node": {"properties": {"next": {"allOf": [{"$ref": "#/$defs/Node"}]}}}},
            },
            {
                "properties": {"next": {"$ref": "#/$defs/Node"}},
                "required": ["next"],
                "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/Node"}}}},
            },
        ),
        (
            {"items": {"allOf": [{"allOf": [{"$ref": "#"}]}, {"type": "array"}]}},
            {"items": {"type": "array", "items": {"$ref": "#"}}},
        ),
    ],
)
def test_merging_ends_where_a_schema_contains_itself(schema, merged):
    assert SchemaResolver(schema).merged() == merged


def test_nullable_of_names_and_references():
    named = {"properties": {"default": {"type": "integer", "nullable": True}}}
    assert without_nullable(named)["properties"]["default"]["type"] == ["integer", "null"]
    either = {"anyOf": [{"$ref": "#/$defs/Id"}, {"type": "null"}]}
    assert without_nullable({"$ref": "#/$defs/Id", "nullable": True}) == either
    assert without_nullable({"const": 1, "nullable": True}) == {"enum": [1, None]}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (TREE, {"root": '{"v": "1"}'}, {"root": {"v": 1}}),
        (TREE, {"root": None}, {"root": None}),
        (
            TREE,
            {"root": {"v": "1", "left": {"v": "2", "left": None}}},
            {"root": {"v": 1, "left": {"v": 2, "left": None}}},
        ),
        ({"$ref": "#/$defs/Id", **ID}, "3", 3),
        ({"allOf": [{"$ref": "#/$defs/Id"}, {"maximum": 9}], **ID}, "3", 3),
        ({"const": 3}, "3", 3),
        ({"const": "3"}, 3, "3"),
        ({"oneOf": [{"const": 1}, {"const": 2}]}, "2", 2),
    ],
)
def test_values_are_coerced_through_references(schema, value, expected):
    assert coerce(value, schema) == expected


@pytest.mark.parametrize(
    ("parameters", "arguments", "problem"),
    [
        (TREE, {"root": {"v": 1, "left": {"v": "x"}}}, "root: "),
        ({"$ref": "#/$defs/A", "$defs": {"A": NODE}}, {"w": 1}, "unknown argument 'w'"),
        ({"allOf": [{"required": ["b"]}, {"properties": {"b": {}}}]}, {}, "missing argument 'b'"),
    ],
)
def test_wrong_calls_are_refused_through_references(parameters, arguments, problem):
    parameters = {**parameters, "$defs": {"Node": NODE, **parameters.get("$defs", {})}}
    with pytest.raises(InvalidArguments, match=problem):
        ArgumentSchema(parameters).read(arguments)


def test_names_of_options_are_known_arguments():
    first, second = ({"properties": {n: {"type": "integer"}}, "required": [n]} for n in "ab")
    schema = ArgumentSchema({"type": "object", "properties": {}, "anyOf": [first, second]})
    assert schema.read({"b": "1"}) == {"b": 1}
    with pytest.raises(InvalidArguments, match="unknown argument 'c'"):
        schema.read({"c": 1})


@pytest.mark.parametrize("operator", ["add", "sub"])
def test_a_wrong_value_of_a_recursive_union_takes_no_exponential_time(operator):
    """Each level fits two options with two parts each: 4^12 checks without a memory."""
    expression = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in ("Num", "Add", "Mul")]}
    part = {"left": expression, "right": expression}
    schema = {
        "type": "object",
        "properties": {"e": expression},
        "$defs": {
            "Num": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
            **{
                name: {
                    "type": "object",
                    "properties": {**part, "op": {"const": name.lower()}},
                    "required": ["op", "left", "right"],
                }
                for name in ("Add", "Mul")
            },
        },
    }
    value: dict = {"n": 1}
    for _ in range(12):
        value = {"op": operator, "left": value, "right": {"n": "2"}}
    schema = ArgumentSchema(schema)
    if operator == "add":
        assert schema.read({"e": value})["e"]["right"] == {"n": 2}
    else:
        with pytest.raises(InvalidArguments, match=r"^e: "):
            schema.read({"e": value})


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ({"$ref": "#/$defs/Other"}, r"\$ref: '#/\$defs/Other' leads to no part"),
        ({"items": {"$ref": "http://127.0.0.1:9/schema.json"}}, "documents are not fetched"),
        ({"properties": {"a": {"pattern": "^(?=a)"}}}, r"'\^\(\?=a\)' cannot .*linear time"),
        ({"pattern": r"(a)\1"}, "linear time: backreferences"),
        ({"patternProperties": {"(?<!a)b": {}}}, "linear time: look-around"),
        ({"type": "objekt"}, r"\$\.type: 'objekt' is not valid"),
        (
            {"patternProperties": {"a": {}}, "unevaluatedProperties": False},
            "unevaluatedProperties cannot stand beside patternProperties",
        ),
        ({"$ref": "#/x/a", "x": {"a": {"pattern": "(?=a)"}}}, "linear time"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"pattern": "(?=a)"}]},
            "linear time",
        ),
        ({"properties": {"$ref": {"type": "string"}, "pattern": {"type": "string"}}}, None),
        ({"pattern": r"^\p{Lu}\u00e9{1,4000}$"}, None),
    ],
)
def test_what_cannot_be_checked_is_named_at_the_start(schema, problem):
    found = schema_problem(schema)
    if problem is None:
        assert found is None
        return
    with pytest.raises(ValueError, match=problem):
        ArgumentSchema(schema)


@pytest.mark.parametrize(
    ("pattern", "text", "expected"),
    [
        (r"^(a+)+$", "a" * 40 + "!", False),  # Python's re takes hours
        (r"^(\w+\s?)*$", "word " * 40 + "!", False),
        (r"(x+x+)+y", "x" * 40, False),
        (r"^\w+$", "Óbidos", True),
        (r"b", "abc", True),  # anywhere in the text
        (r"^[+--/]$", ",", True),  # a range from + to -, and /
        (r"^[a&&b~~[]+$", "&~[", True),
        (r"^[^[]$", "[", False),
        (r"^[\]\[-]+$", "[-]", True),
        (r"^a$", "a\n", False),
        (r"^.$", "\ud800", True),
    ],
)
def test_patterns(pattern, text, expected):
    assert matches(pattern, text) is expected
    assert make_validator({"pattern": pattern}).is_valid(text) is expected
    named = make_validator({"patternProperties": {pattern: {"type": "integer"}}})
    assert named.is_valid({text: "x"}) is not expected
    closed = make_validator({"patternProperties": {pattern: {}}, "additionalProperties": False})
    assert closed.is_valid({text: 1}) is expected


def test_a_schema_that_names_its_draft_matches_in_linear_time_too():
    draft = "https://json-schema.org/draft/2020-12/schema"
    inner = {"$ref": "#", "$schema": draft}
    schema = {"$schema": draft, "properties": {"p": {"pattern": "^(a+)+$"}, "inner": inner}}
    assert not make_validator(schema).is_valid({"inner": {"p": "a" * 40 + "!"}})
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "string"}]}
    assert not make_validator(old).is_valid([1])


def test_a_schema_that_is_too_deep_is_refused():
    schema: dict = {"type": "object"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ValueError, match="nested too deeply"):
        ArgumentSchema({"properties": {"a": schema}})
