"""The two dialects that models carry: what is read as what, and that no good call is lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from response_cases import FORECAST, SCHEMAS, TEMPLATES
from test_response_families import Expected, check
from transformers.utils.chat_parsing import parse_response as parsed_by_transformers

from agenttrain.chat.loading import make_spec
from agenttrain.chat.parsers.base import parse_response

GOOD = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=forecast>\n<parameter=days>\n7\n</parameter>\n</function>\n</tool_call>"
)
GEMMA = '<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>'


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tags", "Hi.<|im_end|>", ("Hi.", None, [])),
        ("tags", f"<think>\na\n</think>\n\nHi.\n{GOOD}", ("Hi.", "a", [("f", {"x": 1})])),
        ("tags", f"{GOOD}\n{GOOD}<|im_end|>\n", ("", None, [("f", {"x": 1})] * 2)),
        ("parameters", f"a\n</think>\n\nHi.\n\n{XML}", ("Hi.", "a", [("forecast", {"days": 7})])),
        ("parameters", "Hi.<|im_end|>", ("Hi.", None, [])),
        (
            "delimited",
            f"<|channel>thought\na\n<channel|>Hi.{GEMMA}<turn|>",
            ("Hi.", "a", [("f", {"a": 1, "b": "x"})]),
        ),
        ("list", "<SAY>a</SAY>-<SAY>b</SAY>", ("a b", None, [])),
        (
            "list",
            '<ACT>[{"tool": "f", "input": {}}, {"tool": "g", "input": {"x": [1]}}]</ACT>',
            ("", None, [("f", {}), ("g", {"x": [1]})]),
        ),
        ("lines", "Hi.<CALL f>\na: b: c\n</CALL>", ("Hi.", None, [("f", {"a": "b: c"})])),
    ],
)
def test_response_template_as_transformers_reads_it(
    name: str, text: str, expected: Expected
) -> None:
    turn = parse_response(text, make_spec(TEMPLATES[name], source=name), turn=0, schemas=[FORECAST])
    check(turn, expected)
    theirs = parsed_by_transformers(text, TEMPLATES[name], prefix="", tools=[FORECAST])
    calls = [call.get("function", call) for call in _flat(theirs.get("tool_calls", []))]
    assert theirs.get("content", "") == turn.content
    assert theirs.get("reasoning_content", theirs.get("thinking")) == turn.reasoning
    assert [(c["name"], c["arguments"]) for c in calls] == [
        (c.name, c.arguments) for c in turn.calls
    ]


def _flat(calls: list) -> list[dict]:
    return [item for call in calls for item in (call if isinstance(call, list) else [call])]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (
            "tags",
            GOOD + "<tool_call>{bad</tool_call>" + GOOD,
            ("", None, [("f", {"x": 1}), "invalid JSON", ("f", {"x": 1})]),
        ),
        ("tags", "<tool_call>{" + GOOD, ("", None, ["the call is not closed", ("f", {"x": 1})])),
        ("tags", GOOD + '<tool_call>{"name": "g"}', ("", None, [("f", {"x": 1}), "is not closed"])),
        ("tags", '<tool_call>"f"</tool_call>', ("", None, ["must be a JSON object, not a string"])),
        (
            "tags",
            '<tool_call>{"arguments": {}}</tool_call>',
            ("", None, ['"name" must be the name']),
        ),
        (
            "tags",
            '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>Hi.',
            ("Hi.", None, [("f", {"x": "</tool_call>"})]),
        ),
        ("tags", f"Hi. {GOOD} So.", ("Hi. So.", None, [("f", {"x": 1})])),
        ("tags", "<think>a", ("", "a", [])),
        ("parameters", XML + XML[:-12], ("", None, [("forecast", {"days": 7}), "is not closed"])),
        ("parameters", XML.replace("7", "x"), ("", None, [("forecast", {"days": "x"})])),
        (
            "delimited",
            GEMMA.replace("1", "one") + GEMMA,
            ("", None, ["expected a value", ("f", {"a": 1, "b": "x"})]),
        ),
        (
            "list",
            '<ACT>[{"tool": "f"}, 3, {"tool": "g", "input": {}}]</ACT>',
            ("", None, [("f", {}), "must be a JSON object", ("g", {})]),
        ),
        (
            "list",
            '<ACT>{"tool": "f"}</ACT>',
            ("", None, ["the calls must be a JSON array, not an object"]),
        ),
        (
            "lines",
            "<CALL f>\na: 1\na: 2\n</CALL>",
            ("", None, ["the parameter 'a' is given twice"]),
        ),
    ],
)
def test_response_template_where_transformers_fails(
    name: str, text: str, expected: Expected
) -> None:
    turn = parse_response(text, make_spec(TEMPLATES[name], source=name), turn=0, schemas=[FORECAST])
    check(turn, expected)
    assert all(call.text in text for call in turn.calls)


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("<|im_start|>assistant\n<think>x<|im_end|>\n<|im_start|>assistant\n", False),
        ("no anchor <think>", False),
    ],
)
def test_prompts_that_open_the_reasoning(prompt: str, inside: bool) -> None:
    spec = make_spec(TEMPLATES["tags"], source="tags")
    assert spec.opens_reasoning(prompt) is inside
    turn = parse_response("a</think>Hi.", spec, turn=0, in_reasoning=inside)
    assert (turn.reasoning, turn.content) == (("a", "Hi.") if inside else (None, "a</think>Hi."))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("tags", "Hi.<|im_end|>", ("Hi.", None, [])),
        ("tags", f"<think>\na\n</think>\n\nHi.\n{GOOD}", ("Hi.", "a", [("f", {"x": 1})])),
        ("tags", f"{GOOD}\n{GOOD}<|im_end|>", ("", None, [("f", {"x": 1})] * 2)),
        (
            "tags",
            GOOD + "<tool_call>{bad</tool_call>" + GOOD,
            ("", None, [("f", {"x": 1}), "invalid JSON", ("f", {"x": 1})]),
        ),
        ("tags", "<tool_call>{" + GOOD, ("", None, ["the call is not closed", ("f", {"x": 1})])),
        (
            "tags",
            f"<think>a</think>{GOOD}<tool_call>",
            ("", "a", [("f", {"x": 1}), "is not closed"]),
        ),
        ("tags", f"<think>{GOOD}</think>Hi.{GOOD} So.", ("Hi. So.", GOOD, [("f", {"x": 1})])),
        (
            "tags",
            '<tool_call>["f"]</tool_call>',
            ("", None, ["expected a JSON object, found an array"]),
        ),
        (
            "tags",
            '<tool_call>{"arguments": {}}</tool_call>',
            ("", None, ['"name" must be the name']),
        ),
        ("parameters", f"Hi.{XML}", ("Hi.", None, [("forecast", {"days": 7})])),
        ("parameters", XML.replace("days", "city"), ("", None, [("forecast", {"city": "7"})])),
        ("parameters", XML.replace("days", "other"), ("", None, [("forecast", {"other": 7})])),
        ("parameters", XML.replace("forecast", "g"), ("", None, [("g", {"days": 7})])),
        ("parameters", "<tool_call><function=f></tool_call>", ("", None, [("f", {})])),
        (
            "parameters",
            "<tool_call>f</tool_call>" + XML,
            ("", None, ['"name" must be', ("forecast", {"days": 7})]),
        ),
        (
            "list",
            '<|THINK|>a<|END_THINK|><|ACT|>[{"tool_name": "f", "parameters": {"x": 1}}]<|END_ACT|>',
            ("", "a", [("f", {"x": 1})]),
        ),
        (
            "list",
            '<|ACT|>[{"tool_name": "f"}, {"tool_name": x}, {"tool_name": "g"}]<|END_ACT|>',
            ("", None, [("f", {}), "invalid JSON", ("g", {})]),
        ),
        ("list", "<|SAY|>Hi.<|END_SAY|>", ("Hi.", None, [])),
        (
            "substitutions",
            'Hi. to=functions.f<|message|>{"x": 1}<|call|>to=functions.g<|message|>{}<|call|>',
            ("Hi.", None, [("f", {"x": 1}), ("g", {})]),
        ),
        ("substitutions", "<|channel|>final<|message|>Hi.", ("Hi.", None, [])),
        ("substitutions", "to=functions.f<|message|>{x}<|call|>", ("", None, ["invalid JSON"])),
    ],
)
def test_response_schema(name: str, text: str, expected: Expected) -> None:
    turn = parse_response(text, make_spec(SCHEMAS[name], source=name), turn=0, schemas=[FORECAST])
    check(turn, expected)
    assert all(call.text in text for call in turn.calls)


def test_a_stray_mark_after_a_call_makes_no_reasoning_of_it() -> None:
    text = f"{GOOD}</think>{GOOD[:-1]}"
    turn = parse_response(text, make_spec(SCHEMAS["tags"], source="tags"), turn=0)
    check(turn, ("</think>", None, [("f", {"x": 1}), "the call is not closed"]))


def test_two_characters_that_other_texts_hold_too_open_no_call() -> None:
    pattern = r"\[\[\s*(.+?)\s*\]\]"
    calls = {"type": "array", "x-regex-iterator": pattern, "items": {"type": "object"}}
    schema = {"type": "object", "properties": {"content": {}, "tool_calls": calls}}
    turn = parse_response("The matrix [[1, 2", make_spec(schema, source="brackets"), turn=0)
    check(turn, ("The matrix [[1, 2", None, []))


@pytest.mark.parametrize("spec", [TEMPLATES["tags"], SCHEMAS["tags"]])
def test_the_readable_name_of_a_malformed_call(spec: dict) -> None:
    bad = '<tool_call>{"name": "g", "arguments": {"x": oops}}</tool_call>'
    turn = parse_response(bad + GOOD + bad[:24], make_spec(spec, source="tags"), turn=0)
    assert [call.name for call in turn.calls] == ["g", "f", "g"]
    assert [call.malformed is None for call in turn.calls] == [False, True, False]


def test_response_schema_inside_the_reasoning() -> None:
    spec = make_spec(SCHEMAS["tags"], source="tags")
    assert spec.opens_reasoning("<|im_start|>assistant\n<think>\n")
    turn = parse_response("a</think>Hi.", spec, turn=0, in_reasoning=True)
    assert (turn.reasoning, turn.content) == ("a", "Hi.")


def test_control_tokens_that_a_dialect_reads() -> None:
    controls = ["<|im_end|>", "<|im_start|>", "<think>", '<|"|>', "<|tool_call>"]
    tags = ("<|im_end|>", "<think>")
    assert make_spec(TEMPLATES["tags"], source="").marks(controls) == tags
    assert make_spec(SCHEMAS["tags"], source="").marks(controls) == tags
    assert make_spec(TEMPLATES["delimited"], source="").marks(controls) == ('<|"|>', "<|tool_call>")


def test_a_search_that_takes_too_long_finds_nothing() -> None:
    slow = copy.deepcopy(TEMPLATES["tags"])
    slow["fields"]["content"]["close_pattern"] = r"(?:a|a|aa)+\d(?=z)"
    turn = parse_response("a" * 60 + GOOD, make_spec(slow, source="slow"), turn=0)
    assert [(call.name, call.malformed) for call in turn.calls] == [("f", None)]


def changed(source: dict, *path: str, to: Any) -> dict:
    result = copy.deepcopy(source)
    node = result
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = to
    return result


CALLS = ("fields", "tool_calls")
ARGUMENTS = ("properties", "tool_calls", "items", "properties", "function", "properties")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (changed(TEMPLATES["tags"], "anchor", to="x"), "response_template.anchor is not known"),
        (changed(TEMPLATES["tags"], "version", to=2), "version: 2"),
        (changed(TEMPLATES["tags"], "fields", to={}), "at least one field"),
        (changed(TEMPLATES["tags"], "start_anchor", to=None), "start_anchor is missing"),
        (changed(TEMPLATES["tags"], *CALLS, "opens", to="x"), "fields.tool_calls.opens is not"),
        (changed(TEMPLATES["tags"], *CALLS, "open", to="x"), "open and open_pattern exclude"),
        (changed(TEMPLATES["tags"], *CALLS, "open_pattern", to="("), "is no regular expression"),
        (changed(TEMPLATES["tags"], *CALLS, "open_pattern", to=None), "only one of them may have"),
        (changed(TEMPLATES["tags"], *CALLS, "close", to=[]), "none of them empty"),
        (changed(TEMPLATES["tags"], *CALLS, "content", to="yaml"), "'yaml' is not one of text"),
        (changed(TEMPLATES["tags"], *CALLS, "transform", to="a {content}"), "mixes a placeholder"),
        (changed(TEMPLATES["tags"], *CALLS, "transform", to="{name}{content}"), "mixes a placehol"),
        (changed(TEMPLATES["parameters"], *CALLS, "content_args", to={}), "tag_pattern: must be"),
        (changed(SCHEMAS["tags"], "x-regex", to="("), "response_schema.x-regex: .* is no regular"),
        (changed(SCHEMAS["tags"], "type", to="array"), "the root must be an object"),
        (changed(SCHEMAS["tags"], "properties", "content", to={"type": "date"}), "content.type"),
        (
            changed(SCHEMAS["list"], "properties", "tool_calls", "x-parser", to="yaml"),
            "response_schema.tool_calls.x-parser: 'yaml'",
        ),
        (
            changed(
                SCHEMAS["list"], "properties", "tool_calls", "x-parser-args", to={"transform": "["}
            ),
            "x-parser-args.transform",
        ),
        (
            changed(SCHEMAS["parameters"], *ARGUMENTS, "arguments", "x-regex-key-value", to="x"),
            r"x-regex-key-value: needs \(\?P<key>",
        ),
    ],
)
def test_what_is_wrong_with_a_spec_is_named(spec: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        try:
            make_spec(spec, source="the tokenizer's response_template")
        except Exception as error:
            raise ValueError(str(error)) from error


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', ("f", {"x": 1})),
        ('{"args": {"x": 1}, "id": "a", "name": "f"}', ("f", {"x": 1})),
        ('{"name": "f"}', ("f", {})),
        ('{"name": "f", "x": 1}', "'x' is no key of a call"),
        ('{"name": "f", "arguments": {}, "parameters": {"x": 1}}', "given twice"),
    ],
)
@pytest.mark.parametrize("dialect", ["template", "template list", "schema", "schema list"])
def test_no_call_without_the_arguments_that_were_written(
    dialect: str, body: str, expected: Any
) -> None:
    """The schemas pick keys of the JSON, and the others would be lost."""
    specs = TEMPLATES if dialect.startswith("template") else SCHEMAS
    spec, text = specs["tags"], f"<tool_call>{body}</tool_call>"
    if dialect == "template list":
        body = body.replace('"name"', '"tool"').replace('"arguments": {},', "")
        spec, text = specs["list"], f"<ACT>[{body}]</ACT>"
        expected = ("f", {"x": 1}) if expected == "given twice" else expected
    elif dialect == "schema list":
        spec, text = specs["list"], f"<|ACT|>[{body.replace('name', 'tool_name')}]<|END_ACT|>"
    (call,) = parse_response(text, make_spec(spec, source="test"), turn=0).calls
    if isinstance(expected, str):
        assert expected in (call.malformed or "")
    else:
        assert (call.malformed, call.name, call.arguments) == (None, *expected)


@pytest.mark.parametrize("dialect", [TEMPLATES["tags"], SCHEMAS["tags"]])
def test_flat_id_and_type_are_parameters_of_the_tool(dialect: dict[str, Any]) -> None:
    """``{"name": "find", "id": 3}`` must not run without its only argument."""
    spec = make_spec(dialect, source="tags")
    parameters = {"type": "object", "properties": {"id": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    text = '<tool_call>\n{"name": "find", "id": 3}\n</tool_call>'
    (call,) = parse_response(text, spec, turn=0, schemas=[tool]).calls
    assert call.malformed is not None
    (call,) = parse_response(text, spec, turn=0, schemas=[FORECAST]).calls
    assert call.malformed is None and call.arguments == {}


def test_a_call_keeps_its_own_id_beside_types_of_the_tool() -> None:
    schema = {
        "type": "object",
        "properties": {
            "role": {"const": "assistant"},
            "tool_calls": {
                "type": "array",
                "x-regex-iterator": r"<tool_call>\s*(.+?)\s*</tool_call>",
                "items": {"type": "object", "x-parser": "json"},
            },
        },
    }
    parameters = {"type": "object", "properties": {"n": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "find", "parameters": parameters}}
    text = (
        '<tool_call>{"id": "abc", "type": "function", '
        '"function": {"name": "find", "arguments": {"n": "7"}}}</tool_call>'
    )
    spec = make_spec(schema, source="nested")
    for schemas in ([], [tool]):
        (call,) = parse_response(text, spec, turn=0, schemas=schemas).calls
        assert (call.id, call.name, call.arguments) == ("abc", "find", {"n": "7"})
