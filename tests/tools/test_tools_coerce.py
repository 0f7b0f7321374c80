"""Arguments that are almost right: the coercion table, and what must hold for any value."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.tools.arguments import (
    ArgumentSchema,
    InvalidArguments,
    coerce,
    make_validator,
)
from agenttrain.utils.json_schema import without_nullable

INTEGER, NUMBER, STRING, BOOLEAN = (
    {"type": name} for name in ("integer", "number", "string", "boolean")
)
INTEGERS = {"type": "array", "items": INTEGER}
POINT = {"type": "object", "properties": {"x": INTEGER, "y": NUMBER}}
EITHER = {"anyOf": [INTEGERS, STRING]}
MAYBE = {"type": "integer", "nullable": True}


@pytest.mark.parametrize(
    ("schema", "value", "expected"),
    [
        (INTEGER, "3", 3),
        (INTEGER, " -3 ", -3),
        (INTEGER, "3.0", 3),
        (INTEGER, 3.0, 3),
        (INTEGER, "007", "007"),  # a code, not a number
        (INTEGER, "3.5", "3.5"),
        (INTEGER, 3.5, 3.5),
        (INTEGER, True, True),  # booleans are not integers
        (INTEGER, "true", "true"),
        (INTEGER, "1e400", "1e400"),
        (INTEGER, 10**400, 10**400),
        (INTEGER, None, None),
        (NUMBER, "2.5", 2.5),
        (NUMBER, "2", 2),
        (NUMBER, 2, 2),
        (NUMBER, "NaN", "NaN"),
        (NUMBER, True, True),
        (BOOLEAN, "true", True),
        (BOOLEAN, "False", False),
        (BOOLEAN, "yes", "yes"),
        (BOOLEAN, 1, 1),
        (STRING, 3, "3"),
        (STRING, 2.5, "2.5"),
        (STRING, True, "true"),
        (STRING, None, None),
        (STRING, [1], [1]),
        (STRING, "3", "3"),
        (INTEGERS, "[1, 2]", [1, 2]),
        (INTEGERS, ["1", 2.0], [1, 2]),
        (INTEGERS, '["1"]', [1]),
        (INTEGERS, "1, 2", "1, 2"),
        (INTEGERS, 1, 1),
        ({"type": "array", "prefixItems": [STRING, INTEGER]}, [1, "2", "3"], ["1", 2, "3"]),
        (POINT, '{"x": "1", "y": "2"}', {"x": 1, "y": 2}),
        (POINT, {"x": "1", "z": "1"}, {"x": 1, "z": "1"}),
        ({"type": "object", "additionalProperties": INTEGER}, {"a": "1"}, {"a": 1}),
        (MAYBE, None, None),
        (MAYBE, "null", None),
        (MAYBE, "3", 3),
        ({"type": "string", "nullable": True}, "null", "null"),
        ({"type": ["integer", "string"]}, "3", "3"),
        ({"type": ["integer", "number"]}, "3.5", 3.5),
        (EITHER, "[1, 2]", "[1, 2]"),  # a string is welcome here
        (EITHER, ["1"], [1]),
        (EITHER, 5, "5"),
        ({"anyOf": [INTEGER, POINT]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [INTEGER, BOOLEAN]}, "no", "no"),
        ({"type": "integer", "enum": [1, 2]}, "2", 2),
        ({"type": "string", "enum": ["1", "2"]}, 2, "2"),
        ({"enum": [1, "1"]}, "1", "1"),
        ({"enum": [True, 1]}, 1, 1),
        ({"type": "string", "enum": ["red"]}, "Red", "Red"),
        ({}, "3", "3"),
    ],
)
def test_coercion_table(schema, value, expected):
    found = coerce(value, without_nullable(schema))
    assert (found, type(found)) == (expected, type(expected))


def test_more_digits_than_python_reads_or_writes():
    digits, number = "9" * 5000, 10**5000
    assert coerce(digits, INTEGER) is digits
    assert coerce(number, STRING) is number
    with pytest.raises(InvalidArguments, match="too many digits"):
        ArgumentSchema({"type": "object", "properties": {"x": STRING}}).read({"x": number})


def test_nullable_in_json_schemas_own_words():
    assert without_nullable(MAYBE) == {"type": ["integer", "null"]}
    enum = {"type": "string", "enum": ["a"], "nullable": True}
    assert without_nullable(enum) == {"type": ["string", "null"], "enum": ["a", None]}
    union = {"anyOf": [INTEGER, INTEGERS], "nullable": True}
    assert without_nullable(union) == {"anyOf": [INTEGER, INTEGERS, {"type": "null"}]}
    named = {"type": "object", "properties": {"nullable": BOOLEAN}}
    assert without_nullable(named) == named


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
texts = leaves.map(json.dumps) | st.sampled_from(["[1]", '{"x": "1"}', "True", " 1 ", "1.0", "["])
values = st.recursive(
    leaves | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("xyz"), inner),
    max_leaves=6,
)
simple = st.sampled_from(
    [INTEGER, NUMBER, STRING, BOOLEAN, {"type": "null"}, {}, MAYBE]
) | st.lists(leaves, min_size=1, max_size=3).map(lambda members: {"enum": members})
schemas = st.recursive(
    simple,
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda x, y: {"type": "object", "properties": {"x": x, "y": y}}, inner, inner),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda rest: {"type": "object", "additionalProperties": rest}, inner),
        st.just({"type": ["integer", "string", "array"]}),
    ),
    max_leaves=5,
).map(without_nullable)


@settings(max_examples=400)
@given(schemas, values)
def test_coercion_never_raises_never_changes_what_fits_and_is_stable(schema, value):
    before = json.dumps(value)
    found = coerce(value, schema)
    assert json.dumps(value) == before
    fits = make_validator(schema).is_valid
    if fits(value):
        assert found == value
        assert fits(found)
    if fits(found):
        assert coerce(found, schema) == found


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["x", "y", "zz"]), values))
def test_reading_arguments_gives_valid_ones_or_says_why(arguments):
    schema = {**POINT, "required": ["x"]}
    try:
        read = ArgumentSchema(schema).read(arguments)
    except InvalidArguments as error:
        assert str(error)
        assert len(str(error)) < 600
    else:
        assert make_validator(schema).is_valid(read)
        assert set(read) == set(arguments)


def test_open_schemas_take_any_name():
    free = ArgumentSchema({"type": "object", "additionalProperties": {"type": "integer"}})
    assert free.read({"a": "1"}) == {"a": 1}
    half = ArgumentSchema({**POINT, "additionalProperties": True})
    assert half.read({"z": [1]}) == {"z": [1]}
    assert ArgumentSchema({}).read({"z": 1}) == {"z": 1}


def test_faults_inside_of_values_have_their_path():
    schema = ArgumentSchema({"type": "object", "properties": {"rows": INTEGERS}})
    with pytest.raises(InvalidArguments, match=r"^rows\[1\] must be integer, not 'x'$"):
        schema.read({"rows": [1, "x"]})


def test_no_schema_is_fetched():
    with pytest.raises(Exception, match="Unresolvable"):
        make_validator({"$ref": "http://127.0.0.1:9/schema.json"}).is_valid(1)
