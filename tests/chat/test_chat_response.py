from __future__ import annotations

import json

import pytest
from chat_cases import ADD, CALL, CALL_IDS, EOS, chat
from hypothesis import given, settings
from hypothesis import strategies as st

from agenttrain.chat.loading import load_spec
from agenttrain.chat.parsers.base import parse_response
from agenttrain.types import AssistantTurn, ToolCall

HERMES = load_spec("hermes")
GOOD = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def parse(text: str, in_reasoning: bool = False) -> AssistantTurn:
    return parse_response(text, HERMES, turn=2, in_reasoning=in_reasoning)


def only(text: str) -> ToolCall:
    turn = parse(text)
    assert turn.content == ""
    (call,) = turn.calls
    assert call.text == text
    return call


def test_ids_to_turn() -> None:
    assert chat().parse(CALL_IDS, [ADD], turn=0) == CALL
    #             I   t   is   ␣   7   .
    answer = [47, 90, 277, 227, 29, 20]
    for end in ([], [EOS], [0]):
        turn = chat().parse([*answer, *end], [ADD], turn=0)
        assert turn == AssistantTurn(content="It is 7.", reasoning=None, calls=())


def test_special_tokens_inside_are_stripped_but_their_text_is_not() -> None:
    ids = [*chat().encode_plain("a<|im_end|>"), 1, *chat().encode_plain("b")]
    assert chat().parse(ids, [], turn=0).content == "a<|im_end|>b"


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        ("", "", None, 0),
        (" Hi.\n", "Hi.", None, 0),
        ("<think>\na\n</think>\n\nHi.", "Hi.", "a", 0),
        ("<think></think>Hi.", "Hi.", "", 0),
        ("<think>cut" + GOOD, "", "cut" + GOOD, 0),
        ("so <think>a</think>Hi.", "so Hi.", "a", 0),
        ("a</think>Hi." + GOOD, "Hi.", "a", 1),
        (GOOD + "</think>", "</think>", None, 1),
        (GOOD + "<think>a</think>", "<think>a</think>", None, 1),
        ("<think>no " + GOOD + "</think>" + GOOD, "", "no " + GOOD, 1),
        ("One" + GOOD + "\ntwo\n" + GOOD, "One\ntwo", None, 2),
        ("a</tool_call>b", "a</tool_call>b", None, 0),
    ],
)
def test_content_and_reasoning(text: str, content: str, reasoning: str | None, calls: int) -> None:
    turn = parse(text)
    assert (turn.content, turn.reasoning, len(turn.calls)) == (content, reasoning, calls)
    assert all(call.malformed is None for call in turn.calls)


def test_reasoning_that_the_prompt_has_opened() -> None:
    assert parse("a</think>Hi.", in_reasoning=True) == parse("<think>a</think>Hi.")
    assert parse("\n<think>\na</think>Hi.", in_reasoning=True) == parse("<think>a</think>Hi.")
    assert parse("a" + GOOD, in_reasoning=True) == parse("<think>a" + GOOD)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"x": 1, "y": [True, None, -2.5e3], "z": {"é": "東京"}},
        {"x": "a </tool_call> b <tool_call> c"},
        {"x": '"\\\n\t{}[]'},
        {"x": 10**400},
    ],
)
def test_arguments_survive(arguments: dict) -> None:
    for body in (arguments, json.dumps(arguments)):
        text = json.dumps({"name": "f", "arguments": body}, ensure_ascii=False)
        for pad in ("", "\n", " \r\n\t "):
            call = only(f"<tool_call>{pad}{text}{pad}</tool_call>")
            assert (call.name, call.arguments, call.malformed) == ("f", arguments, None)


def test_arguments_may_be_missing() -> None:
    call = only('<tool_call>{"name": "f"}</tool_call>')
    assert (call.name, call.arguments, call.malformed) == ("f", {}, None)


@pytest.mark.parametrize(
    ("body", "name", "problem"),
    [
        ("", "", "invalid JSON at line 1 column 1: Expecting value"),
        ('{"name": "f",}', "f", "invalid JSON at line 1 column 14: "),
        ('{"name": "f}', "", "invalid JSON at line 1 column 10: Unterminated string"),
        ("\n{'name': 'f'}", "f", "invalid JSON at line 2 column 2: "),
        ('{"name": "f\n"}', "", "Invalid control character at"),
        ('{"name": "f", "arguments": {"x": NaN}}', "f", "invalid JSON: NaN is not a JSON number"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "f", "1e999 is not a JSON number"),
        ("[" * 100_000, "", "invalid JSON: nested too deeply"),
        ('{"name": "f", "arguments": {"x": ' + "1" * 5000 + "}}", "f", "invalid JSON: "),
        ('{"name": "f"}}', "f", "text after the call: '}'"),
        ('["f"]', "", "the call must be a JSON object, not an array"),
        ('"f"', "", "the call must be a JSON object, not a string"),
        ("null", "", "the call must be a JSON object, not null"),
        ('{"arguments": {}}', "", '"name" must be the name of a tool'),
        ('{"id": "a", name: \'f\', "arguments": {"name": "g"', "f", "invalid JSON"),
        ('{"arguments": {"name": "g"', "", "invalid JSON"),
        ('{"arguments": oops, "name": "g"}', "", "invalid JSON"),
        ('{"name": ["f"]}', "", '"name" must be the name of a tool'),
        ('{"name": "f", "arguments": [1]}', "f", '"arguments" must be a JSON object, not an array'),
        ('{"name": "f", "arguments": 3}', "f", '"arguments" must be a JSON object, not a number'),
        ('{"name": "f", "arguments": true}', "f", "not a boolean"),
        ('{"name": "f", "arguments": "[1]"}', "f", "not an array"),
        ('{"name": "f", "arguments": "x = 1"}', "f", "is a string without a JSON object: 'x = 1'"),
        ('{"name": "f", "arguments": {"x": "\\ud800"}}', "f", "values that JSON text cannot carry"),
        ('{"name": "f", "arguments": {"x": ' + "[" * 99 + "]" * 99 + "}}", "f", "cannot carry"),
    ],
)
def test_malformed_calls_stand_beside_good_ones(body: str, name: str, problem: str) -> None:
    text = f"<tool_call>{body}</tool_call>"
    first, bad, last = parse(GOOD + text + GOOD).calls
    assert bad.malformed is not None
    assert problem in bad.malformed
    assert (bad.name, bad.arguments, bad.text) == (name, {}, text)
    assert (
        (first.malformed, first.arguments) == (last.malformed, last.arguments) == (None, {"x": 1})
    )
    assert [c.id for c in (first, bad, last)] == ["call_2_0", "call_2_1", "call_2_2"]


@pytest.mark.parametrize("after", ["", "\n", " and so on"])
def test_an_unclosed_call_is_malformed(after: str) -> None:
    opened = GOOD.removesuffix("</tool_call>") + after
    turn = parse(GOOD + opened)
    assert turn.calls[1].malformed == "the call is not closed: </tool_call> is missing"
    assert turn.calls[1].text == opened
    first, second = parse(opened + GOOD).calls
    assert (first.malformed is None, second.malformed is None) == (False, True)


# Text made of what the parser reacts to, and of anything.
tokens = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            GOOD,
            '{"name": "f", "arguments": ',
        ),
        *("{", "}", "[", "]", '"', "\\", ":", ",", "null", "1", " ", "\n", "é", "\\ud800", "<"),
    ]
)
completions = st.one_of(st.text(), st.lists(tokens, max_size=30).map("".join))


@given(text=completions, inside=st.booleans())
@settings(max_examples=1000)
def test_any_text_parses(text: str, inside: bool) -> None:
    turn = parse(text, inside)
    assert [call.id for call in turn.calls] == [f"call_2_{i}" for i in range(len(turn.calls))]
    for call in turn.calls:
        assert call.text in text
        assert call.malformed or (call.name and call.text.endswith("</tool_call>"))
        assert call.malformed is None or not call.arguments
    json.dumps(turn.message(), ensure_ascii=False, allow_nan=False).encode()


@given(text=completions)
@settings(max_examples=300)
def test_cutting_anywhere_keeps_the_calls_before(text: str) -> None:
    whole = [call for call in parse(text).calls if call.malformed is None]
    for cut in range(len(text)):
        kept = [call for call in parse(text[:cut]).calls if call.malformed is None]
        complete = [c for c in whole if _end(text, c, whole) <= cut]
        assert kept[: len(complete)] == complete


def _end(text: str, call: ToolCall, calls: list[ToolCall]) -> int:
    """Latest position at which the call can end: its text may occur several times."""
    return text.rfind(call.text) + len(call.text)


def test_cutting_ids_anywhere_never_raises() -> None:
    ids = chat().encoder.encode("<think>é</think>東京 " + GOOD + GOOD + "<|im_end|>")
    counts = []
    for cut in range(len(ids) + 1):
        turn = chat().parse(ids[:cut], [], turn=2)
        counts.append(sum(call.malformed is None for call in turn.calls))
    assert counts == sorted(counts)
    assert counts[-1] == 2


@given(st.lists(st.integers(0, 319)))
def test_any_ids_parse(ids: list[int]) -> None:
    chat().parse(ids, [], turn=0)
