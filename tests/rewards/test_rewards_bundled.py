"""The bundled reward functions: what is rewarded, and which settings are refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reward_cases import called, made, reward

from agenttrain.rewards.builtin.answers import (
    Contains,
    ExactMatch,
    NumericClose,
    TokenF1,
    last_number,
)
from agenttrain.rewards.builtin.format import Format, JMESPath, JsonSchema, rollout_view
from agenttrain.rewards.builtin.tools import (
    LengthPenalty,
    ToolPenalty,
    stop_tool_called,
    tool_success,
)
from agenttrain.rewards.function import RewardError
from agenttrain.types import StopReason, ToolError

CITY = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}


def test_exact_match_of_the_last_message():
    function = ExactMatch(tool=None)
    assert reward(function, made(" Oslo\n", answer="Oslo")) == 1.0
    assert reward(function, made("Oslo.", answer="Oslo")) == 0.0
    assert reward(function, made(None, answer="Oslo")) == 0.0


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("It is Oslo.", "Oslo", 1.0),
        ("It is oslo.", "Oslo", 0.0),
        ("Osloer", "Oslo", 0.0),
        ("17", 7, 0.0),
        ("so 7!", 7, 1.0),
        ("New   York", "New York", 1.0),
        ("C++ it is", "C++", 1.0),
        ("Lima, I think", ["Oslo", "Lima"], 1.0),
        ("Rome, I think", ["Oslo", "Lima"], 0.0),
        ("", "Oslo", 0.0),
    ],
)
def test_contains(text, answer, expected):
    assert reward(Contains(), made(text, answer=answer)) == expected


def test_contains_settings():
    assert reward(Contains(ignore_case=True), made("oslo", answer="OSLO")) == 1.0
    handed_in = made("Rome", called("done", text="in Oslo"), city="Oslo")
    assert reward(Contains(tool="done", argument="text", column="city"), handed_in) == 1.0
    with pytest.raises(RewardError, match="'answer' is empty: every answer contains that"):
        reward(Contains(), made("x", answer=" "))
    with pytest.raises(RewardError, match=r"needs the column 'answer', the row has \['b'\]"):
        reward(Contains(), made("x", b=1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3 boxes of 12, so 36.", 36.0),
        ("1,234.5 kg", 1234.5),
        ("12,34", 34.0),
        ("x=3-4", 4.0),
        ("it is -4", -4.0),
        ("\N{MINUS SIGN}4", -4.0),
        ("3/4", 0.75),
        ("1e-3", 0.001),
        ("#### 72", 72.0),
        (".5", 0.5),
        ("3/0", None),
        ("1e999", None),
        ("none", None),
        (True, None),
        (7, 7.0),
    ],
)
def test_the_last_number(text, expected):
    assert last_number(text) == expected


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_number_is_read_as_python_writes_it(number):
    assert last_number(f"it is {number!r}") == number
    assert last_number(number) == number


def test_numeric_close():
    # |100.5 - 100| = 0.5 is within 1 % of 100.5, not within 0.1 %
    assert reward(NumericClose(relative=0.01), made("100.5", answer="#### 100")) == 1.0
    assert reward(NumericClose(relative=0.001), made("100.5", answer=100)) == 0.0
    assert reward(NumericClose(absolute=0.5), made("100.5", answer=100)) == 1.0
    assert reward(NumericClose(), made("no idea", answer=100)) == 0.0
    with pytest.raises(RewardError, match="'answer' holds no number: 'many'"):
        reward(NumericClose(), made("3", answer="many"))
    with pytest.raises(ValueError, match=r"relative=-1: must be a finite number, 0 or more"):
        NumericClose(relative=-1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"city": "Oslo"}', 1.0),
        ('```json\n{"city": "Oslo"}\n```', 1.0),
        ('{"city": 3}', 0.0),
        ('It is {"city": "Oslo"}', 0.0),
        ("", 0.0),
    ],
)
def test_json_schema_of_the_last_message(text, expected):
    assert reward(JsonSchema(schema=CITY), made(text)) == expected


def test_json_schema_of_a_tool_and_of_the_row():
    handed_in = made("", called("done", city="Oslo", data='{"city": 1}'))
    assert reward(JsonSchema(schema=CITY, tool="done"), handed_in) == 1.0
    assert reward(JsonSchema(schema=CITY, tool="done", argument="data"), handed_in) == 0.0
    assert reward(JsonSchema(schema=CITY, tool="other"), handed_in) == 0.0
    row = made('{"city": "Oslo"}', shape='{"required": ["town"]}')
    assert reward(JsonSchema(column="shape"), row) == 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "schema=None: give either a schema or the column"),
        ({"schema": {}, "column": "c"}, "give either a schema or the column"),
        ({"schema": {"type": "objekt"}}, "is no JSON schema: .*'objekt' is not valid"),
        ({"schema": {"pattern": "(?=a)"}}, "is no JSON schema: pattern .* linear time"),
        ({"schema": {"$ref": "http://127.0.0.1:9/s.json"}}, "documents are not fetched"),
        ({"schema": {}, "argument": "a"}, "argument=a: of which tool"),
    ],
)
def test_json_schema_settings_that_cannot_work(settings, said):
    with pytest.raises(ValueError, match=said):
        JsonSchema(**settings)


def test_tool_success():
    calls = [called("a"), called("b", ToolError.timeout), called("", ToolError.malformed)]
    assert reward(tool_success, made("", *calls)) == pytest.approx(1 / 3)
    assert reward(tool_success, made("")) is None
    assert tool_success(made("", *calls), only=["a"]) == 1.0
    assert tool_success(made("", *calls), only=["c"]) is None


def test_tool_penalty():
    calls = [called("a"), called("a"), called("b", ToolError.unknown_tool)]
    # one error: -0.1
    assert reward(ToolPenalty(), made("", *calls)) == pytest.approx(-0.1)
    # one error and one call over two: -(0.1 + 0.5)
    function = ToolPenalty(per_call=0.5, free_calls=2)
    assert reward(function, made("", *calls)) == pytest.approx(-0.6)
    # three calls of 0.5 each are 1.5, and 1.2 is the most
    assert reward(ToolPenalty(per_error=0, per_call=0.5, at_most=1.2), made("", *calls)) == -1.2
    assert reward(ToolPenalty(only=["a"]), made("", *calls)) == 0.0
    with pytest.raises(ValueError, match=r"per_error=-1: must be 0 or more; the reward is its neg"):
        ToolPenalty(per_error=-1)
    with pytest.raises(ValueError, match="the penalty would always be 0"):
        ToolPenalty(per_error=0)


def test_length_penalty_counts_sampled_tokens_only():
    function = LengthPenalty(full_tokens=100, free_tokens=60)
    assert reward(function, made("", sampled=60, tool_tokens=500)) == 0.0
    # (70 - 60) / (100 - 60) = 0.25
    assert reward(function, made("", sampled=70, tool_tokens=500)) == -0.25
    assert reward(function, made("", sampled=300)) == -1.0
    with pytest.raises(ValueError, match=r"free_tokens=100: must be 0 or more, and below full_to"):
        LengthPenalty(full_tokens=100, free_tokens=100)


def test_format():
    assert reward(Format(pattern="Answer: [0-9]+"), made("\nAnswer: 7\n")) == 1.0
    assert reward(Format(pattern="Answer: [0-9]+"), made("My Answer: 7")) == 0.0
    assert reward(Format(pattern="Answer: [0-9]+", whole=False), made("My Answer: 7")) == 1.0
    assert reward(Format(pattern=".*"), made(None)) == 0.0
    thought = made("7", reasoning="first …\nthen …")
    assert reward(Format(pattern="first.*then.*", part="reasoning"), thought) == 1.0
    assert reward(Format(pattern=".+", part="reasoning"), made("7")) == 0.0
    thought.trajectories[0].messages.append({"role": "assistant", "content": "eight"})
    assert reward(Format(pattern="[0-9]", turns="last"), thought) == 0.0
    assert reward(Format(pattern="[0-9]|eight", turns="all"), thought) == 1.0
    assert reward(Format(pattern="[0-9]", turns="all"), thought) == 0.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pattern": "(a"}, r"pattern='\(a': is no regular expression: missing \) \(position 2"),
        ({"pattern": "a", "part": "thoughts"}, "part=thoughts: must be one of content, reasoning"),
        ({"pattern": "a", "turns": "first"}, "turns=first: must be one of last, all"),
    ],
)
def test_format_settings_that_cannot_work(settings, said):
    with pytest.raises(ValueError, match=said):
        Format(**settings)


def test_a_pattern_that_would_take_years_says_so():
    with pytest.raises(RewardError, match="took over 1 s on 60 characters; write it without nest"):
        reward(Format(pattern="(a|aa)+b"), made("a" * 60))


def test_stop_tool_called():
    handed_in, failed = called("done"), called("done", ToolError.timeout)
    ended = {"stop": StopReason.stop_tool}
    assert reward(stop_tool_called, made("", replace(handed_in, stop=True), **ended)) == 1.0
    assert reward(stop_tool_called, made("", replace(failed, stop=True), **ended)) == 0.0
    assert reward(stop_tool_called, made("", called("sql"), **ended)) == 0.0
    assert reward(stop_tool_called, made("", stop=StopReason.max_turns)) == 0.0


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("length(tool_calls[?error == null])", 1.0),
        ("length(tool_calls[?error == 'timeout']) == `1`", 1.0),
        ("contains(tool_calls[1].error, 'time')", 1.0),
        ("row.answer == final", 1.0),
        ("row.nothing", None),
        ("truncated", 0.0),
        ("stop_reason == 'completed' && sampled_tokens < `10`", 1.0),
        ("tokens", 2.0 + 4 + 3),
        ("tool_calls[0].arguments.n", 3.0),
        ("max(tool_calls[].seconds)", 0.5),
        ("starts_with(completion[0].content, 'Os')", 1.0),
    ],
)
def test_jmespath(expression, expected):
    rollout = made(
        "Oslo",
        *(called("a", n=3), called("b", ToolError.timeout)),
        **{"sampled": 4, "tool_tokens": 3, "answer": "Oslo"},
    )
    assert reward(JMESPath(expression=expression), rollout) == expected


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("final", r"expression='final' gave 'Oslo'; it must give a number, true, false, or null"),
        ("tool_calls", r"gave \[\]; it must give"),
        ("sum(final)", r"'sum\(final\)': In function sum\(\), invalid type for value: Oslo"),
    ],
)
def test_an_expression_without_a_number_ends_the_run(expression, said):
    with pytest.raises(RewardError, match=said):
        reward(JMESPath(expression=expression), made("Oslo"))


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("tool_calls[", r"is no JMESPath expression \(position 11, at its end\)"),
        ("a b c", r"\(position 2, before 'b c'\)"),
        ("lenght(final)", r"there is no function lenght\(\); there are: abs, avg"),
        (7, "must be a JMESPath expression, given as a text"),
    ],
)
def test_an_expression_that_cannot_be_read_is_told_with_its_position(expression, said):
    with pytest.raises(ValueError, match=rf"^expression=.*{said}"):
        JMESPath(expression=expression)


def test_the_view_is_plain_data():
    rollout = made("Oslo", called("b", ToolError.timeout), sampled=4, answer="Oslo")
    view = rollout_view(rollout)
    assert view["tool_calls"] == [
        {
            **{"id": "c-b", "name": "b", "arguments": {}, "content": "ok"},
            **{"error": "timeout", "seconds": 0.5},
        }
    ]
    assert (type(view["tool_calls"][0]["error"]), type(view["stop_reason"])) == (str, str)
    assert view["completion"] == [{"role": "assistant", "content": "Oslo"}]
    assert view["prompt_tokens"] + view["sampled_tokens"] == view["tokens"] == 6
    assert math.isclose(view["turns"], 1)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("Issel", "the Issel", 1.0),
        ("the river Issel", "Issel", pytest.approx(2 / 3)),  # one of two and of one
        ("U.S. Open, 1998!", "us open 1998", 1.0),
        ("Oslo", ["Lima", "City of Oslo"], 0.5),  # one of one and of three
        ("a a b", "a b b", pytest.approx(2 / 3)),  # b once, of b and of b b: articles are left out
        ("Rome", "Oslo", 0.0),
        ("", "Oslo", 0.0),
        ("", "the", 1.0),
    ],
)
def test_shared_words(text, answer, expected):
    assert reward(TokenF1(tool=None), made(text, answer=answer)) == expected
