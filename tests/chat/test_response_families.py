"""What every family's format is read as: (completion, expected turn)."""

from __future__ import annotations

from typing import Any

import pytest
from response_cases import FORECAST

from agenttrain.chat.loading import load_spec, make_spec, spec_names
from agenttrain.chat.parsers.base import parse_response
from agenttrain.tools.arguments import ArgumentSchema
from agenttrain.types import AssistantTurn

Expected = tuple[str, str | None, list[tuple[str, dict[str, Any]] | str]]
"""(content, reasoning, calls); a malformed call is a part of its problem."""


def parse(family: str, text: str) -> AssistantTurn:
    return parse_response(text, load_spec(family), turn=1, schemas=[FORECAST])


def summary(turn: AssistantTurn) -> tuple:
    calls = [call.malformed or (call.name, call.arguments) for call in turn.calls]
    return turn.content, turn.reasoning, calls


def check(turn: AssistantTurn, expected: Expected) -> None:
    content, reasoning, calls = expected
    assert (turn.content, turn.reasoning, len(turn.calls)) == (content, reasoning, len(calls))
    for call, wanted in zip(turn.calls, calls, strict=True):
        if isinstance(wanted, str):
            assert wanted in (call.malformed or "")
        else:
            assert (call.name, call.arguments, call.malformed) == (*wanted, None)


XML = "<tool_call>\n<function={}>\n{}</function>\n</tool_call>"


def parameter(name: str, value: str) -> str:
    return f"<parameter={name}>\n{value}\n</parameter>\n"


@pytest.mark.parametrize("family", ["qwen_xml", "nemotron3"])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n\nHi.", ("Hi.", "a", [])),
        ("a\n</think>\n\n" + XML.format("f", ""), ("", "a", [("f", {})])),
        (XML.format("f", parameter("x", "1")), ("", None, [("f", {"x": "1"})])),
        (XML.format("f", parameter("x", "\n a\n")), ("", None, [("f", {"x": "\n a\n"})])),
        (XML.format("f", "<parameter=x>1</parameter>"), ("", None, [("f", {"x": "1"})])),
        (
            XML.format("f", parameter("x", "</tool_call>")),
            ("", None, [("f", {"x": "</tool_call>"})]),
        ),
        (
            XML.format("f", parameter("x", "a</parameter>b")),
            ("", None, [("f", {"x": "a</parameter>b"})]),
        ),
        (XML.format("f", parameter("x", "") * 2), ("", None, ["'x' is given twice"])),
        (XML.format("", ""), ("", None, ["must be the name of a tool"])),
        ("<tool_call>\n{}\n</tool_call>", ("", None, ["must begin with <function=NAME>: '{}'"])),
        (
            "<tool_call><function=f><parameter=x>1</function></tool_call>",
            ("", None, ["the parameter 'x' is not closed"]),
        ),
        (
            "<tool_call><function=f></tool_call>" + XML.format("g", ""),
            ("", None, ["</function> is missing", ("g", {})]),
        ),
        (
            "<tool_call><function=f><parameter=x>1</tool_call>"
            + XML.format("g", parameter("x", "1") + parameter("y", "2")),
            ("", None, ["the parameter 'x' is not closed", ("g", {"x": "1", "y": "2"})]),
        ),
        (
            "<tool_call><function=f>so</function></tool_call>",
            ("", None, ["</function> is missing, found 'so</function>'"]),
        ),
        (
            "<tool_call><function=f></function>so</tool_call>",
            ("", None, ["text after the call: 'so'"]),
        ),
        (
            "Hi." + XML.format("f", "") + "<tool_call><function=g></function>",
            ("Hi.", None, [("f", {}), "</tool_call> is missing"]),
        ),
    ],
)
def test_parameters_in_tags(family: str, text: str, expected: Expected) -> None:
    check(parse(family, text), expected)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("city", "7", "7"),
        ("days", "7", 7),
        ("days", " 7 ", 7),
        ("days", "007", "007"),
        ("days", "seven", "seven"),
        ("days", "7.5", "7.5"),
        ("scale", "7.5", 7.5),
        ("scale", "7", 7),
        ("scale", "NaN", "NaN"),
        ("hourly", "true", True),
        ("hourly", "False", False),
        ("hourly", "1", "1"),
        ("place", '{"x": [1]}', {"x": [1]}),
        ("place", "[1]", "[1]"),
        ("tags", '["a", null]', ["a", None]),
        ("until", "null", None),
        ("until", "7", "7"),
        ("either", "7", 7),
        ("either", "x", "x"),
        ("unknown", "7", "7"),
    ],
)
def test_parameters_are_typed_by_the_tools_schema(name: str, text: str, value: Any) -> None:
    for family, written in (
        ("qwen_xml", XML.format("forecast", parameter(name, text))),
        (
            "glm4_moe",
            f"<tool_call>forecast\n<arg_key>{name}</arg_key>\n<arg_value>{text}</arg_value>\n"
            "</tool_call>",
        ),
    ):
        (call,) = parse(family, written).calls
        assert call.arguments == {name: value}
        assert type(call.arguments[name]) is type(value)


REFERRING = {
    "name": "plan",
    "parameters": {
        "type": "object",
        "properties": {
            "days": {"$ref": "#/$defs/Days"},
            "until": {"anyOf": [{"$ref": "#/$defs/Days"}, {"type": "null"}]},
            "scale": {"allOf": [{"$ref": "#/$defs/Days"}, {"minimum": 1}]},
            "version": {"const": 2},
            "tree": {"$ref": "#/$defs/Tree"},
            "name": {"$ref": "#/$defs/Name"},
        },
        "$defs": {
            "Days": {"type": "integer"},
            "Name": {"type": "string"},
            "Tree": {"type": "object", "properties": {"left": {"$ref": "#/$defs/Tree"}}},
        },
    },
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("days", "7", 7),
        ("until", "7", 7),
        ("until", "null", None),
        ("scale", "7", 7),
        ("version", "2", 2),
        ("tree", '{"left": {}}', {"left": {}}),
        ("name", "7", "7"),
    ],
)
def test_types_of_parameters_are_read_through_references(name: str, text: str, value: Any) -> None:
    tool = {"type": "function", "function": REFERRING}
    written = f"<tool_call>\n<function=plan>\n{parameter(name, text)}</function>\n</tool_call>"
    (call,) = parse_response(written, load_spec("qwen_xml"), turn=0, schemas=[tool]).calls
    assert call.arguments == {name: value}
    assert ArgumentSchema(REFERRING["parameters"]).read(call.arguments) == call.arguments


def pair(key: str, value: str) -> str:
    return f"\n<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\n<think>a</think>\nHi.", ("Hi.", "a", [])),
        ("<tool_call>f\n</tool_call>", ("", None, [("f", {})])),
        (f"<tool_call>f{pair('x', ' 1')}\n</tool_call>", ("", None, [("f", {"x": " 1"})])),
        (
            f"<tool_call>f{pair('x', '</tool_call>')}</tool_call>",
            ("", None, [("f", {"x": "</tool_call>"})]),
        ),
        (f"<tool_call>f{pair('x', '1') * 2}</tool_call>", ("", None, ["'x' is given twice"])),
        ("<tool_call></tool_call>", ("", None, ["must be the name of a tool"])),
        (
            "<tool_call>f\n<arg_key>x</arg_key></tool_call>",
            ("", None, ["the <arg_key> 'x' has no value"]),
        ),
        (
            "<tool_call>f\n<arg_key>x</tool_call>",
            ("", None, ["the <arg_key> is not closed"]),
        ),
        (
            f"<tool_call>f{pair('x', '1')}\n<arg_key>y</arg_key>\n</tool_call>",
            ("", None, ["the <arg_key> 'y' has no value"]),
        ),
        (
            f"<tool_call>f{pair('x', '1')}\n<tool_call>g\n</tool_call>",
            ("", None, ["</tool_call> is missing", ("g", {})]),
        ),
    ],
)
def test_glm(text: str, expected: Expected) -> None:
    check(parse("glm4_moe", text), expected)


CALL = '{"name": "f", "parameters": {"x": 1}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi.", ("Hi.", None, [])),
        (CALL, ("", None, [("f", {"x": 1})])),
        ("<|python_tag|>" + CALL, ("", None, [("f", {"x": 1})])),
        ('{"type": "function", "name": "f", "parameters": {}}', ("", None, [("f", {})])),
        (f"Hi. {CALL}\n{CALL}", ("Hi.", None, [("f", {"x": 1})] * 2)),
        ('{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', None, [])),
        (CALL[:-1], ("", None, ["invalid JSON"])),
        (CALL.replace("1", "True") + CALL, ("", None, ["write true, not True", ("f", {"x": 1})])),
        ("<|python_tag|>print(1)", ("", None, ["invalid JSON at line 1 column 1"])),
        ('{"name": "", "parameters": {}}', ("", None, ['"name" must be the name of a tool'])),
        ('{"name": "f", "parameters": [1]}', ("", None, ['"parameters" must be a JSON object'])),
        (
            '{"name": "f", "parameters": {"x": {"name": "g", "parameters": {}}}}',
            ("", None, [("f", {"x": {"name": "g", "parameters": {}}})]),
        ),
    ],
)
def test_llama(text: str, expected: Expected) -> None:
    check(parse("llama3", text), expected)


@pytest.mark.parametrize("between", ["", ";", "; ", "\n", " ;\n"])
def test_llama_calls_behind_each_other(between: str) -> None:
    bad = CALL.replace("1", "True")
    turn = parse("llama3", f"Hi. {CALL}{between}{bad}{between}{CALL}{between}")
    check(turn, ("Hi.", None, [("f", {"x": 1}), "write true, not True", ("f", {"x": 1})]))
    assert [(call.name, call.text) for call in turn.calls] == [("f", CALL), ("f", bad), ("f", CALL)]


def test_a_second_llama_call_that_is_cut_is_no_content() -> None:
    head = '{"name": "get", "parameters": {'
    for cut in range(1, len(head)):
        turn = parse("llama3", f"{CALL}; {head[:cut]}")
        check(turn, ("", None, [("f", {"x": 1}), "invalid JSON" if cut > 28 else "is not closed"]))
        assert turn.calls[1].text == head[:cut].rstrip()
        # the name's last quote is character 14
        assert turn.calls[1].name == ("get" if cut > 13 else "")
    for text in ("so", '{"name": "Bob", "age', "{x"):
        assert parse("llama3", f"{CALL} {text}").content == text
    assert parse("llama3", '{"name": "get", "para').calls == ()


@pytest.mark.parametrize(
    ("family", "text", "name"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>', "f"),
        ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {x}}]', "f"),
        ("llama3", '{"name": "f", "parameters": {x}}', "f"),
        ("lfm2", '<|tool_call_start|>[{"name": "f", "arguments": x}]<|tool_call_end|>', "f"),
        ("lfm2", "<|tool_call_start|>[f(x=oops)]<|tool_call_end|>", "f"),
        ("gemma4", "<|tool_call>call:f{x:oops}<tool_call|>", "f"),
        ("gpt_oss", "<|channel|>commentary to=functions.f<|message|>{x}<|call|>", "f"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{x}\n```", "f"),
        ("glm4_moe", "<tool_call>f\n<arg_key>x</arg_key></tool_call>", "f"),
        ("qwen_xml", "<tool_call>\n<function=f>\n<parameter=x>\n1</tool_call>", "f"),
    ],
)
def test_the_readable_name_of_a_malformed_call(family: str, text: str, name: str) -> None:
    (call,) = parse(family, text).calls
    assert call.malformed is not None
    assert (call.name, call.arguments) == (name, {})


TO_F = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hi.", ("Hi.", None, [])),
        ("<|channel|>final<|message|>Hi.<|return|>", ("Hi.", None, [])),
        ("<|channel|>analysis<|message|>a<|end|>" + TO_F + "{}<|call|>", ("", "a", [("f", {})])),
        ("<|channel|>analysis<|message|>a<|end|>" * 2, ("", "a\na", [])),
        ("<|channel|>commentary<|message|>I call.<|end|>", ("I call.", None, [])),
        (TO_F + '{"x": 1}<|call|>', ("", None, [("f", {"x": 1})])),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", ("", None, [("f", {})])),
        ("<|channel|>analysis to=functions.f<|message|><|end|>", ("", None, [("f", {})])),
        ("<|channel|>commentary to=python<|message|>{}<|call|>", ("", None, [("python", {})])),
        (TO_F + '{"x": 1}', ("", None, ["the call is not closed: <|call|> is missing"])),
        (TO_F + "{}" + TO_F + "{}<|call|>", ("", None, ["<|call|> is missing", ("f", {})])),
        (TO_F + "{x: 1}<|call|>", ("", None, ["invalid JSON at line 1 column 2"])),
        (TO_F + "{} so<|call|>", ("", None, ["text after the arguments: 'so'"])),
        (TO_F + "[1]<|call|>", ("", None, ["the arguments must be a JSON object, not an array"])),
        (
            TO_F.replace("functions.f", "functions.") + "{}<|call|>",
            ("", None, ["the name of a tool"]),
        ),
        ("<|channel|>commentary to=functions.f", ("", None, ["<|call|> is missing"])),
        ("<|channel|>ana", ("", None, [])),
    ],
)
def test_harmony(text: str, expected: Expected) -> None:
    check(parse("gpt_oss", text), expected)


GEMMA = "<|tool_call>call:{}<tool_call|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel>thought\na\n<channel|>Hi.", ("Hi.", "a", [])),
        (GEMMA.format("f{}"), ("", None, [("f", {})])),
        (
            GEMMA.format('f{a:<|"|>x"}, <tool_call|><|"|>,b:[1,-2.5,null],c:{<|"|>d e<|"|>:true}}'),
            (
                "",
                None,
                [("f", {"a": 'x"}, <tool_call|>', "b": [1, -2.5, None], "c": {"d e": True}})],
            ),
        ),
        (GEMMA.format("f{a:1,}"), ("", None, ["expected a value, found '}'"])),
        (GEMMA.format("f{a:1,a:2}"), ("", None, ["the key 'a' is given twice"])),
        (GEMMA.format("f{a:None}"), ("", None, [("f", {"a": None})])),
        (GEMMA.format("f{a:True}"), ("", None, ["expected a value, found 'True}'"])),
        (GEMMA.format("f{a:007}"), ("", None, ["expected a value"])),
        (GEMMA.format("f{a:" + "[" * 99 + "}"), ("", None, ["nested more than 64 levels"])),
        (GEMMA.format("f{a:[" + "{b:1}," * 65_537 + "1]}"), ("", None, ["over 65,536 items"])),
        (GEMMA.format('f{"a":[' + "1," * 65_537 + "1]}"), ("", None, [("f", {"a": [1] * 65_538})])),
        (GEMMA.format("f"), ("", None, ["expected a value, found the end"])),
        (GEMMA.format("{}"), ("", None, ["must be the name of a tool"])),
        ("<|tool_call>f{}<tool_call|>", ("", None, ["must begin with call:NAME"])),
        (GEMMA.format("f[1]"), ("", None, ["the arguments must be a JSON object, not an array"])),
        ("<|tool_call>call:f{}" + GEMMA.format("g{}"), ("", None, ["is missing", ("g", {})])),
    ],
)
def test_gemma(text: str, expected: Expected) -> None:
    check(parse("gemma4", text), expected)


LFM = "<|tool_call_start|>[{}]<|tool_call_end|>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>Hi.", ("Hi.", "a", [])),
        (LFM.format("f()") + "Hi.", ("Hi.", None, [("f", {})])),
        (LFM.format("f(x=1, y='a'), g()"), ("", None, [("f", {"x": 1, "y": "a"}), ("g", {})])),
        (
            LFM.format(r"""f(a=[True, None, "b'\n"], c={'d': false, "e": -1.5,},)"""),
            ("", None, [("f", {"a": [True, None, "b'\n"], "c": {"d": False, "e": -1.5}})]),
        ),
        (
            LFM.format("f(x=']<|tool_call_end|>, g(')"),
            ("", None, [("f", {"x": "]<|tool_call_end|>, g("})]),
        ),
        (
            LFM.format("f(x=1), g(1), h()"),
            ("", None, [("f", {"x": 1}), "expected KEY=VALUE", ("h", {})]),
        ),
        (
            LFM.format("f(x=a b), g()"),
            ("", None, ["expected a value, found 'a b), g()]'", ("g", {})]),
        ),
        (LFM.format("f(x=1, x=2)"), ("", None, ["the argument 'x' is given twice"])),
        (LFM.format("f(x=1 y=2)"), ("", None, ["expected ',' or ')'"])),
        (LFM.format("f"), ("", None, ["expected NAME(KEY=VALUE, …), found 'f'"])),
        (LFM.format(""), ("", None, ["the list holds no call"])),
        ("<|tool_call_start|>f(x=1)<|tool_call_end|>", ("", None, [("f", {"x": 1})])),
        ("<|tool_call_start|>[f(), g(x='a", ("", None, [("f", {}), "a string is not closed"])),
        ("<|tool_call_start|>[f(), g()", ("", None, [("f", {}), ("g", {}), "is not closed"])),
        ("<|tool_call_start|>[f()]", ("", None, [("f", {}), "<|tool_call_end|> is missing"])),
        (
            LFM.format('{"name": "f", "arguments": {}}, {"name": "g"}'),
            ("", None, [("f", {}), ("g", {})]),
        ),
    ],
)
def test_lfm(text: str, expected: Expected) -> None:
    check(parse("lfm2", text), expected)


PYTHON_LITERALS: list[tuple[str, Any]] = [
    ("(800, 600)", [800, 600]),
    ("()", []),
    ("(1,)", [1]),
    ("(1)", 1),
    ("((1, 2), 'a')", [[1, 2], "a"]),
    ("{'b', 'a'}", ["b", "a"]),
    ("{(1, 2), (3, 4)}", [[1, 2], [3, 4]]),
    ("[1, (2,), {'a': (3,)}]", [1, [2], {"a": [3]}]),
    ("{1: 'a', True: 2, None: 3, 1.5: 4}", {"1": "a", "true": 2, "null": 3, "1.5": 4}),
    ("1_000", 1000),
    ("0x1f", 31),
    ("-0b11", -3),
    ("0o17", 15),
    ("+1", 1),
    ("07", 7),
    ("1.", 1.0),
    (".5", 0.5),
    ("1_0.5e-3", 0.0105),
    ("'a' \n'b'", "ab"),
    ("('a' \"b\")", "ab"),
    ('"""a\nb"c"""', 'a\nb"c'),
    (r"r'\d+'", r"\d+"),
    (r"'\101\x41\N{BULLET}\v'", "AA\u2022\v"),
    ("f'{{x}}'", "{x}"),
    (r"'\ud83d\ude00'", "\U0001f600"),
]
NO_JSON_VALUES = [
    *(
        "b'x'",
        "f'{x}'",
        "1j",
        "...",
        "1e999",
        "1__0",
        "{1: 1, '1': 2}",
        "(1",
        "(1 2)",
        "[x for x in y]",
    ),
    *("'a' 'b", "{'a', 'b': 1}", r"'\N{no such character}'", "{**{'a': 1}}", "1 if x else 2"),
]


@pytest.mark.parametrize("family", ["lfm2", "pythonic"])
def test_literals_of_python(family: str) -> None:
    form = LFM if family == "lfm2" else "[{}]"
    for literal, value in PYTHON_LITERALS:
        (call,) = parse(family, form.format(f"f(x={literal})")).calls
        assert (call.malformed, call.arguments) == (None, {"x": value}), literal
        assert type(call.arguments["x"]) is type(value)
    for literal in NO_JSON_VALUES:
        (call,) = parse(family, form.format(f"f(x={literal})")).calls
        assert call.malformed is not None, literal
        assert (call.name, call.arguments) == ("f", {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[f(x=1)]", ("", None, [("f", {"x": 1})])),
        (
            """Hm [1]. [f(x=1, y='a]'), g()] [h()]""",
            ("Hm [1].", None, [("f", {"x": 1, "y": "a]"}), ("g", {}), ("h", {})]),
        ),
        ("See [this](url), [f (x) or [].", ("See [this](url), [f (x) or [].", None, [])),
        ("[f(x=1), g(1)]", ("", None, [("f", {"x": 1}), "expected KEY=VALUE"])),
        ("[f(x='a", ("", None, ["a string is not closed"])),
        ("[f(x=1)", ("", None, [("f", {"x": 1}), "the list of calls is not closed"])),
    ],
)
def test_pythonic(text: str, expected: Expected) -> None:
    check(parse("pythonic", text), expected)


BEGIN, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\na\n</think>\n\nHi.", ("Hi.", "a", [])),
        (
            f"Hi.<｜tool▁calls▁begin｜>{BEGIN}function{SEP}f\n```json\n{{}}\n```{END}\n"
            f"{BEGIN}g{SEP}{{}}{END}<｜tool▁calls▁end｜>",
            ("Hi.", None, [("f", {}), ("g", {})]),
        ),
        (f'{BEGIN}f{SEP}{{"x": "{END}"}}{END}', ("", None, [("f", {"x": END})])),
        (f"{BEGIN}f{SEP}{{}}{BEGIN}g{SEP}{{}}{END}", ("", None, ["is missing", ("g", {})])),
        (f"{BEGIN}{SEP}{{}}{END}", ("", None, ["must begin with the name of a tool"])),
        (f"{BEGIN}function{SEP}f\n```json\n{{}}\n{END}", ("", None, [("f", {})])),
        (f"{BEGIN}function{SEP}f\n```json\n3\n```{END}", ("", None, ["not a number"])),
        (
            f"{BEGIN}function{SEP}f\n```json\n{{x}}\n```{END}\n"
            f'{BEGIN}function{SEP}g\n```json\n{{"x": 1}}\n```{END}<｜tool▁calls▁end｜>',
            ("", None, ["invalid JSON", ("g", {"x": 1})]),
        ),
        (
            f"{BEGIN}function{SEP}f\n```json\n{{}}\n```{END}\n"
            f'{BEGIN}function{SEP}g\n```json\n{{"x": 1\n```{END}<｜tool▁calls▁end｜>',
            ("", None, [("f", {}), "invalid JSON"]),
        ),
        (
            f'{BEGIN}function{SEP}f\n```json\n{{"x": 1}}\n```\n{BEGIN}function{SEP}g\n```json\n'
            f"{{}}\n```{END}",
            ("", None, ["is missing", ("g", {})]),
        ),
    ],
)
def test_deepseek(text: str, expected: Expected) -> None:
    check(parse("deepseek", text), expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[THINK]a[/THINK]Hi.", ("Hi.", "a", [])),
        ('[TOOL_CALLS]f[ARGS]{"x": 1}', ("", None, [("f", {"x": 1})])),
        ("[TOOL_CALLS]f{}[TOOL_CALLS]g[ARGS]{}", ("", None, [("f", {}), ("g", {})])),
        ("[TOOL_CALLS]f[ARGS]{}so", ("so", None, [("f", {})])),
        ('[TOOL_CALLS]f[ARGS]{"x": "[TOOL_CALLS]"}', ("", None, [("f", {"x": "[TOOL_CALLS]"})])),
        ("[TOOL_CALLS]f[ARGS]{x}[TOOL_CALLS]g[ARGS]{}", ("", None, ["invalid JSON", ("g", {})])),
        ("[TOOL_CALLS][ARGS]{}", ("", None, ["must begin with the name of a tool"])),
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}]', ("", None, [("f", {})])),
        (
            '[TOOL_CALLS][{"name": "f"}, {"name": g}, {"name": "h"}]',
            ("", None, [("f", {}), "invalid JSON", ("h", {})]),
        ),
        ('[TOOL_CALLS][{"name": "f"}', ("", None, [("f", {}), "the array of calls is not closed"])),
        ('[TOOL_CALLS][{"name": "f"}, 3]', ("", None, [("f", {}), "must be a JSON object"])),
        ("[TOOL_CALLS][]", ("", None, ["the array holds no call"])),
    ],
)
def test_mistral(text: str, expected: Expected) -> None:
    check(parse("mistral", text), expected)


def test_ids_that_the_model_wrote_are_kept_unless_they_repeat() -> None:
    call = "[TOOL_CALLS]f[CALL_ID]{}[ARGS]{{}}"
    turn = parse("mistral", call.format("abcdefgh1") + call.format("abcdefgh2"))
    assert [call.id for call in turn.calls] == ["abcdefgh1", "abcdefgh2"]
    turn = parse("mistral", call.format("abcdefgh1") * 2 + "[TOOL_CALLS]f[ARGS]{}")
    assert [call.id for call in turn.calls] == ["0001c0000", "0001c0001", "0001c0002"]
    assert all(len(call.id) == 9 and call.id.isalnum() for call in turn.calls)


@pytest.mark.parametrize(
    ("family", "text", "ids"),
    [
        (
            "hermes",
            '<tool_call>{"id": "call_0_1", "name": "f"}</tool_call>'
            '<tool_call>{"name": "f"}</tool_call>',
            ["call_0_1", "call_0_2"],
        ),
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'
            '<tool_call>{"id": "call_0_0", "name": "f"}</tool_call>'
            '<tool_call>{"id": "call_0_4", "name": "f"}</tool_call>',
            ["call_0_5", "call_0_1", "call_0_0", "call_0_4"],
        ),
        (
            "mistral",
            "[TOOL_CALLS]f[CALL_ID]0000c0001[ARGS]{}[TOOL_CALLS]f[ARGS]{}",
            ["0000c0001", "0000c0002"],
        ),
        (
            "hermes",
            '<tool_call>{"id": "\\ud800", "name": "f"}</tool_call>',
            ["call_0_0"],  # no file could hold half a character
        ),
    ],
)
def test_no_two_calls_of_a_turn_have_the_same_id(family: str, text: str, ids: list[str]) -> None:
    turn = parse_response(text, load_spec(family), turn=0)
    assert [call.id for call in turn.calls] == ids
    assert [call["id"] for call in turn.message()["tool_calls"]] == ids
    assert [call.malformed for call in turn.calls] == [None] * len(ids)


@pytest.mark.parametrize(
    ("body", "strict", "lenient"),
    [
        ('{"name": "f", "arguments": {"x": 1}}', ("f", {"x": 1}), ("f", {"x": 1})),
        ('{"name": "f", "arguments": "{\\"x\\": 1}"}', ("f", {"x": 1}), ("f", {"x": 1})),
        ('{"name": "f", "arguments": null}', ("f", {}), ("f", {})),
        ('{"name": "f", "arguments": ""}', ("f", {}), ("f", {})),
        ('{name: "f", arguments: {}}', "Expecting property name", ("f", {})),
        ("{'name': 'f'}", "Expecting property name", ("f", {})),
        ('{"name": "f", "arguments": {"x": True}}', "(write true, not True)", ("f", {"x": True})),
        ('{"name": "f",}', "invalid JSON", ("f", {})),
        ('{"name": "f", "name": "g"}', "'name' is given twice", "'name' is given twice"),
        ('{"name": "f", "arguments": {"x": 1, "x": 1}}', "given twice", "given twice"),
        ('{"name": "f" "arguments": {}}', "Expecting ',' delimiter", "expected ',' or '}'"),
        ('{"name": "f", "arguments": {"x": y}}', "Expecting value", "expected a value"),
        ('{"name": "f", "arguments": {"x": 1e999}}', "not a JSON number", "not a finite number"),
        ('{"name": "f"', "Expecting ',' delimiter", "found the end"),
    ],
)
def test_what_is_no_json(body: str, strict: Any, lenient: Any) -> None:
    base = {"call_open": "<tool_call>", "call_close": "</tool_call>"}
    for wanted, extra in ((strict, {}), (lenient, {"lenient": True})):
        spec = make_spec({**base, **extra}, source="test")
        turn = parse_response(f"<tool_call>{body}</tool_call>", spec, turn=0)
        check(turn, ("", None, [wanted]))


def test_every_family_has_a_format() -> None:
    assert spec_names() == [
        *("deepseek", "gemma4", "glm4_moe", "gpt_oss", "hermes", "lfm2", "llama3", "mistral"),
        *("nemotron3", "pythonic", "qwen", "qwen_xml"),
    ]


@pytest.mark.parametrize(
    ("family", "prompt", "inside"),
    [
        ("qwen_xml", "<|im_start|>assistant\n<think>\n", True),
        ("qwen_xml", "<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("gemma4", "<|turn>model\n<|channel>thought\n", True),
        ("llama3", "assistant\n\n", False),
        ("gpt_oss", "<|start|>assistant", False),
        ("gpt_oss", "<|start|>assistant<|channel|>analysis<|message|>", True),
    ],
)
def test_prompts_that_open_the_reasoning(family: str, prompt: str, inside: bool) -> None:
    assert load_spec(family).opens_reasoning(prompt) is inside
    if inside:
        close = {"gpt_oss": "<|end|>", "gemma4": "<channel|>"}.get(family, "</think>")
        turn = parse_response("a" + close, load_spec(family), turn=0, in_reasoning=True)
        assert (turn.reasoning, turn.content) == ("a", "")


def test_control_tokens_that_a_format_reads() -> None:
    controls = [
        "<|im_end|>",
        "<|call|>",
        "<|message|>",
        "[ARGS]",
        '<|"|>',
        "<tool_call>",
        "<think>",
    ]
    assert load_spec("hermes").marks(controls) == ("<tool_call>", "<think>")
    assert load_spec("gpt_oss").marks(controls) == ("<|call|>", "<|message|>")
    assert load_spec("mistral").marks(controls) == ("[ARGS]",)
    assert load_spec("gemma4").marks(controls) == ('<|"|>',)


GET = {
    "name": "get",
    "parameters": {
        "type": "object",
        "properties": {"id": {"type": "string"}, "type": {"type": "string"}, "top": {}},
    },
}


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", '<tool_call>{"name": "get", "id": "a7"}</tool_call>'),
        ("llama3", '<|python_tag|>{"name": "get", "id": "a7"}'),
        ("mistral", '[TOOL_CALLS][{"name": "get", "type": "a7"}]'),
        ("qwen_xml", XML.format("get", "<parameter=id>\na7\n" + parameter("top", "3"))),
        (
            "nemotron3",
            "<function=get>\n<parameter=id>\na7\n" + parameter("top", "3") + "</function>",
        ),
        (
            "qwen_xml",
            XML.format(
                "get",
                "<parameter=id>\na7\n</function>\n<function=get>\n" + parameter("id", "b8"),
            ),
        ),
        (
            "glm4_moe",
            "<tool_call>get\n<arg_key>id</arg_key>\n<arg_value>a7\n<arg_key>top</arg_key>\n"
            "<arg_value>3</arg_value>\n</tool_call>",
        ),
    ],
)
def test_a_call_whose_arguments_are_not_where_they_belong(family: str, text: str) -> None:
    turn = parse_response(text, load_spec(family), turn=0, schemas=[GET])
    assert [call.malformed is not None for call in turn.calls] == [True]


def test_keys_beside_the_arguments_and_tags_in_a_value_are_read() -> None:
    beside = '<tool_call>{"type": "function", "id": "x", "name": "get", "arguments": {"id": "a"}}'
    turn = parse_response(f"{beside}</tool_call>", load_spec("hermes"), turn=0, schemas=[GET])
    assert [call.arguments for call in turn.calls] == [{"id": "a"}]
    value = "write <parameter=top>, or\n<parameter=other>\n1"
    text = XML.format("get", parameter("id", value))
    turn = parse_response(text, load_spec("qwen_xml"), turn=0, schemas=[GET])
    assert [call.arguments for call in turn.calls] == [{"id": value}]


TWICE = "<arg_value>1</arg_value><arg_value>2</arg_value>"


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("llama3", '<|python_tag|>{"name": "find"} {"q": "tea"}'),
        ("llama3", '<|python_tag|>{"name": "find"}; {"parameters": {"q": "tea"}}'),
        ("llama3", '{"name": "find", "parameters": {}}; {"q": "tea"}'),
        ("mistral", '[TOOL_CALLS][{"name": "find"}, {"q": "tea"}]'),
        ("mistral", '[TOOL_CALLS][{"name": "find"}] {"q": "tea"}'),
        ("mistral", '[TOOL_CALLS]find[ARGS]{}{"q": "tea"}'),
        ("lfm2", '<|tool_call_start|>[find(), {"q": "tea"}]<|tool_call_end|>'),
        ("lfm2", '<|tool_call_start|>[find()](q="tea")<|tool_call_end|>'),
        ("pythonic", '[find(), {"q": "tea"}]'),
        ("glm4_moe", f"<tool_call>find\n<arg_key>q</arg_key>{TWICE}</tool_call>"),
    ],
)  # fmt: skip
def test_a_call_does_not_run_without_arguments_that_stand_behind_it(family: str, text: str) -> None:
    calls = parse(family, text).calls
    assert calls and all(call.malformed for call in calls) and calls[0].name == "find"


@pytest.mark.parametrize(
    ("family", "text", "count"),
    [
        ("llama3", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}', 2),
        ("llama3", '{"name": "f", "parameters": {}} as you asked', 1),
        ("mistral", "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", 2),
        ("lfm2", "<|tool_call_start|>[f(), g()]<|tool_call_end|>", 2),
    ],
)
def test_calls_without_arguments_run(family: str, text: str, count: int) -> None:
    assert [call.malformed for call in parse(family, text).calls] == [None] * count


def test_parameters_of_patterns_have_types() -> None:
    root = {"patternProperties": {"^n_": {"type": "integer"}}}
    root |= {"type": "object", "additionalProperties": {"type": "boolean"}}
    schemas = [{"type": "function", "function": {"name": "f", "parameters": root}}]
    pair = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    text = f"<tool_call>f\n{pair.format('n_a', 3)}{pair.format('b', 'true')}</tool_call>"
    (call,) = load_spec("glm4_moe").parse(text, in_reasoning=False, schemas=schemas).calls
    assert call.arguments == {"n_a": 3, "b": True}
