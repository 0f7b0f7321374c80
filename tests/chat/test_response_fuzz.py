"""What holds for any text at all, of every parser: families and both dialects."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from response_cases import FORECAST, REASONING, WRITERS, all_specs, gemma4, hermes, qwen_xml

from agenttrain.chat.parsers.base import MAX_CALLS, TOO_MANY, parse_response
from agenttrain.types import AssistantTurn, ToolCall

SPECS = all_specs()
PIECES = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
    *("<parameter=x>", "</parameter>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|channel|>", "analysis", "final", "commentary to=functions.f ", "<|message|>", "<|call|>"),
    *(
        "<|end|>",
        "<|start|>",
        "<|return|>",
        "<|constrain|>json",
        "to=functions.f",
        "<|python_tag|>",
    ),
    *("<|tool_call>", "<tool_call|>", "call:f", '<|"|>', "<|channel>thought\n", "<channel|>"),
    *("<|tool_call_start|>", "<|tool_call_end|>", "f(", "g(x=", ")", "[f(x=1)]", ", g()"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    *("function", "```json\n", "```", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *("<SAY>", "</SAY>", "<ACT>", "</ACT>", "<CALL f>", "</CALL>", "<|ACT|>", "<|END_ACT|>"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": ', '{"tool_name": "f"}'),
    *("{", "}", "[", "]", '"', "'", "\\", ":", ",", "=", "null", "True", "1", "-0.5e3", "NaN"),
    *(" ", "\n", "é", "東", "\\ud800", "\x00", "<", "|", ">", "x", "name", "<|im_end|>"),
]


def fuzzed(seed: int, count: int) -> Iterator[str]:
    """Texts made of what parsers react to, and of anything."""
    draw = random.Random(seed)
    for _ in range(count):
        if draw.random() < 0.4:  # a good call, broken somewhere
            name = draw.choice([*WRITERS])
            text = WRITERS[name]("f", {"x": draw.choice([1, "a", [None], {"b": "é"}])})
            at, length = draw.randrange(len(text)), draw.randrange(4)
            text = text[:at] + draw.choice(PIECES) + text[at + length :]
            yield text * draw.randint(1, 3)
        else:
            yield "".join(draw.choices(PIECES, k=draw.randrange(30)))


def check(name: str, text: str, *, inside: bool = False) -> AssistantTurn:
    turn = parse_response(text, SPECS[name], turn=3, in_reasoning=inside, schemas=[FORECAST])
    assert len({call.id for call in turn.calls}) == len(turn.calls)
    for call in turn.calls:
        assert call.text in text or inside
        assert call.malformed or call.name
        assert call.malformed is None or not call.arguments
    json.dumps(turn.message(), ensure_ascii=False, allow_nan=False).encode()
    return turn


@pytest.mark.parametrize("name", SPECS)
def test_no_text_raises(name: str) -> None:
    for index, text in enumerate(fuzzed(seed=1, count=2000)):
        check(name, text, inside=index % 5 == 0)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SPECS)
def test_no_text_raises_long(name: str) -> None:
    for index, text in enumerate(fuzzed(seed=2, count=100_000)):
        check(name, text, inside=index % 5 == 0)


@pytest.mark.parametrize("name", SPECS)
@given(text=st.text())
@settings(max_examples=100)
def test_any_unicode_parses(name: str, text: str) -> None:
    check(name, text)


def completion(family: str) -> str:
    """Reasoning, content and two calls."""
    write = WRITERS[family]
    marks = REASONING.get(family, ("<think>\n", "\n</think>\n\n"))
    thought = f"{marks[0]}hm 東{marks[1]}" if marks else ""
    said = "<|start|>assistant<|channel|>commentary<|message|>Let me see.<|end|>"
    content = said if family == "gpt_oss" else "Let me see.\n"
    calls = [write("forecast", {"city": "Os\nlo", "days": 2}), write("g", {})]
    if family == "lfm2":
        both = "[forecast(city='Os\\nlo', days=2), g()]"
        calls = [f"<|tool_call_start|>{both}<|tool_call_end|>"]
    return thought + content + "\n".join(calls)


@pytest.mark.parametrize("family", WRITERS)
def test_a_whole_completion(family: str) -> None:
    turn = check(family, completion(family))
    assert turn.content.strip() == "Let me see."
    assert turn.reasoning == (None if family == "llama3" else "hm 東")
    found = [(call.name, call.arguments, call.malformed) for call in turn.calls]
    assert found == [("forecast", {"city": "Os\nlo", "days": 2}, None), ("g", {}, None)]


def cut_everywhere(name: str, text: str) -> None:
    """No prefix of the text loses a good call that it holds whole."""
    whole = [call for call in check(name, text).calls if call.malformed is None]
    # The latest position at which each can end: its text may occur several times.
    ends = [text.rfind(call.text) + len(call.text) for call in whole]
    for cut in range(len(text)):
        kept = [call for call in check(name, text[:cut]).calls if call.malformed is None]
        complete = sum(end <= cut for end in ends)
        assert [_said(c) for c in kept[:complete]] == [_said(c) for c in whole[:complete]], cut


def _said(call: ToolCall) -> tuple:
    return call.name, call.arguments


@pytest.mark.parametrize("family", WRITERS)
def test_cutting_a_completion_keeps_the_calls_before(family: str) -> None:
    cut_everywhere(family, completion(family))


@pytest.mark.parametrize("family", WRITERS)
def test_cutting_reasoning_and_content_keeps_what_stands_before(family: str) -> None:
    text = completion(family)
    for cut in range(text.index("Let me see.") + len("Let me see."), len(text)):
        turn = check(family, text[:cut])
        assert turn.content.startswith("Let me see.")
        assert turn.reasoning == (None if family == "llama3" else "hm 東")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("template/tags", "hermes"), ("schema/tags", "hermes")),
        *(("template/parameters", "qwen_xml"), ("schema/parameters", "qwen_xml")),
        ("template/delimited", "gemma4"),
    ],
)
def test_cutting_keeps_the_calls_before_in_both_dialects(name: str, family: str) -> None:
    text = completion(family)
    assert [call.malformed for call in check(name, text).calls] == [None, None]
    cut_everywhere(name, text)


@pytest.mark.parametrize("family", WRITERS)
def test_cutting_broken_completions_keeps_the_calls_before(family: str) -> None:
    draw = random.Random(4)
    for _ in range(12):
        calls = []
        for _ in range(draw.randint(1, 3)):
            call = WRITERS[family]("f", {"x": draw.choice([1, "a"])})
            at = draw.randrange(len(call))
            broken = call[:at] + draw.choice(PIECES) + call[at + draw.randrange(3) :]
            calls.append(draw.choice([call, broken]))
        cut_everywhere(family, draw.choice(["", "Hi. "]) + "".join(calls))


# Text of any kind, without what the family's own template cannot write inside a string.
texts = st.text(max_size=20) | st.sampled_from(
    ["</tool_call>", "a <tool_call> b", "[TOOL_CALLS]", "<tool_call|>", "<|tool_call_end|>", "{'"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | texts
    | st.floats(allow_nan=False).filter(lambda x: abs(x) < 1e300),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts.filter(bool), inner, max_size=3)
    ),
    max_leaves=8,
)
names = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True)
KINDS = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
    type(None): "null",
}
UNWRITABLE = {
    "qwen_xml": ("</parameter>",),
    "glm4_moe": ("</arg_value>",),
    "gemma4": ('<|"|>',),
    "gpt_oss": ("<|call|>",),
}


@pytest.mark.parametrize("family", WRITERS)
@given(name=names, arguments=st.dictionaries(names, values, max_size=4))
@settings(max_examples=60)
def test_what_a_family_writes_is_read_back(family: str, name: str, arguments: dict) -> None:
    text = WRITERS[family](name, arguments)
    plain = repr(arguments)
    if any(mark in plain for mark in UNWRITABLE.get(family, ())):
        return
    properties = {key: {"type": KINDS[type(value)]} for key, value in arguments.items()}
    schema = {"function": {"name": name, "parameters": {"properties": properties}}}
    turn = parse_response("Hi." + text, SPECS[family], turn=0, schemas=[schema])
    (call,) = turn.calls
    assert (turn.content, call.name, call.malformed) == ("Hi.", name, None)
    assert call.arguments == arguments
    assert [type(value) for value in call.arguments.values()] == [
        type(value) for value in arguments.values()
    ]
    assert call.text in text


UNITS = [
    *("<tool_call>", "</tool_call>", '<tool_call>{"a', '<tool_call>["",', "[", "{", "<think>"),
    *("</think>", "<parameter=x>", "</parameter>", "<arg_key>x</arg_key><arg_value>", '"', "'a' "),
    *("<tool_call><function=f><parameter=x>", "<|channel|>analysis<|message|>", "[TOOL_CALLS]"),
    *('[TOOL_CALLS]f[ARGS]{"', "<|tool_call_start|>[f(", "f(x=", ", g()", '<|tool_call>call:f{"'),
    *('{"name": "f", "parameters": ', '{"name": "f",', "to=functions.f", "<ACT>[", "<CALL f>a:b\n"),
    *(" ", "\n", "a", "<|ACT|>[", "<|im_end|>", "<｜tool▁call▁begin｜>f```"),
]


def seconds(name: str, text: str) -> float:
    """CPU time, of the fastest of three."""
    times = []
    for _ in range(3):
        start = time.process_time()
        parse_response(text, SPECS[name], turn=0)
        times.append(time.process_time() - start)
    return max(min(times), 0.001)


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *(("hermes", '<tool_call>{"a'), ("qwen_xml", "<tool_call><function=f><parameter=x>")),
        *(("llama3", '{"name": "f", "parameters": '), ("gpt_oss", "to=functions.f<|message|>")),
        *(("glm4_moe", "<arg_key>x</arg_key><arg_value>"), ("gemma4", '<|tool_call>call:f{"')),
        *(("lfm2", "<|tool_call_start|>[f("), ("deepseek", "<｜tool▁call▁begin｜>f```")),
        *(("mistral", '[TOOL_CALLS]f[ARGS]{"'), ("template/tags", '<tool_call>{"a')),
        *(("template/parameters", "<tool_call><function=f>"), ("template/list", "<ACT>[")),
        *(("schema/tags", "</tool_call>"), ("schema/list", "<|ACT|>[")),
    ],
)
def test_work_grows_with_the_text(name: str, unit: str) -> None:
    # Four times the text: 4 times the work if linear, 16 times if quadratic.
    short = seconds(name, unit * (15_000 // len(unit)))
    assert seconds(name, unit * (60_000 // len(unit))) < 10 * short


PREFIXES = {
    "hermes": '<tool_call>{"name": "f", "arguments": ',
    "qwen_xml": "<tool_call><function=f>",
    "glm4_moe": "<tool_call>f",
    "gemma4": "<|tool_call>call:f{a:[",
    "lfm2": "<|tool_call_start|>[f(x=[",
    "mistral": "[TOOL_CALLS][",
    "llama3": '{"name": "f", "parameters": {"a": "',
    "deepseek": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "gpt_oss": "<|channel|>commentary to=functions.f<|message|>",
}
INSIDE = [
    *("[1,", '{"a":1,', "{'a': 1},", "{a:1},", "1,", "f(),", "{},", "f(x=1),", '\\"', "\\", "'"),
    *("<tool_call>{}</tool_call>", '{"name": "f", "parameters": {}}', "[TOOL_CALLS]f{}"),
    *("<|tool_call>call:f{}<tool_call|>", "<arg_key>", "</arg_value>", '<|"|>', "</function>"),
    *(
        "<|tool_call_start|>[f()]<|tool_call_end|>",
        "<|channel|>to=functions.f<|message|>{}<|call|>",
    ),
    *(
        "<SAY></SAY>",
        "</think>\n",
        "[/THINK]",
        "<|python_tag|>",
        '{"name": "',
        "```",
        "<|message|>",
    ),
]


def operations(name: str, text: str) -> int:
    """Calls of functions, Python's and C's, that a parse makes: the same on every machine."""
    count = 0

    def counted(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        parse_response(text, SPECS[name], turn=0, schemas=[FORECAST])
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", SPECS)
def test_operations_grow_with_the_text(name: str) -> None:
    starts = ["", PREFIXES[name]] if name in PREFIXES else [""]
    for start in starts:
        for unit in UNITS + INSIDE:
            short = operations(name, start + unit * (2_000 // len(unit)))
            long = operations(name, start + unit * (8_000 // len(unit)))
            # Four times the text: 4 times the calls if linear, 16 times if quadratic. A text of few
            # marks has not yet been tried up to the 16th, which a longer one is.
            assert long < 6 * short + 500, (start, unit)


WHOLE_CALLS = {
    **{name: write("f", {}) for name, write in WRITERS.items()},
    "template/tags": hermes("f", {}),
    "template/parameters": qwen_xml("f", {}),
    "template/delimited": gemma4("f", {}),
    "template/list": '<ACT>[{"tool": "f", "input": {}}]</ACT>',
    "template/lines": "<CALL f></CALL>",
    "schema/tags": hermes("f", {}),
    "schema/parameters": qwen_xml("f", {}),
}


@pytest.mark.parametrize("name", WHOLE_CALLS)
def test_calls_beyond_a_limit_are_one_malformed_call(name: str) -> None:
    calls = check(name, WHOLE_CALLS[name] * (MAX_CALLS + 3)).calls
    assert len(calls) == MAX_CALLS + 1
    assert {(call.name, call.malformed) for call in calls[:-1]} == {("f", None)}
    assert calls[-1].malformed == TOO_MANY


@pytest.mark.parametrize(
    ("name", "opening", "item", "closing"),
    [
        ("lfm2", "<|tool_call_start|>[", "f(), ", "f()]<|tool_call_end|>"),
        ("mistral", "[TOOL_CALLS][", '{"name": "f"}, ', '{"name": "f"}]'),
        (
            "template/list",
            "<ACT>[",
            '{"tool": "f", "input": {}}, ',
            '{"tool": "f", "input": {}}]</ACT>',
        ),
        (
            "schema/list",
            "<|ACT|>[",
            '{"tool_name": "f", "parameters": {}}, ',
            '{"tool_name": "f", "parameters": {}}]<|END_ACT|>',
        ),
    ],
)
def test_a_list_of_too_many_calls(name: str, opening: str, item: str, closing: str) -> None:
    calls = check(name, opening + item * (MAX_CALLS + 2) + closing).calls
    assert len(calls) == MAX_CALLS + 1
    assert {(call.name, call.malformed) for call in calls[:-1]} == {("f", None)}
    assert calls[-1].malformed == TOO_MANY


@pytest.mark.long
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_parses(name: str, unit: str) -> None:
    # The test's timeout is the bound: anything quadratic takes many minutes for a megabyte.
    check(name, unit * (1_000_000 // len(unit)))
