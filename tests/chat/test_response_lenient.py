"""Arguments that are almost JSON: what is read always, what where `lenient` is set, and counted."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import parts
import pytest
import tiny
from parts import LIMITS
from response_cases import FORECAST
from test_response_fuzz import SPECS, fuzzed

from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.loading import load_chat, load_spec, make_spec, resolve_spec
from agenttrain.chat.parsers.base import parse_response
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.tracking.metrics import rollout_metrics

ARGUMENTS = {"a": 3, "b": 4}
TWICE = json.dumps(json.dumps(ARGUMENTS))
LOOSE = [
    '"a": 3, "b": 4',
    "a: 3, b: 4",
    "{a: 3, b: 4}",
    "{'a': 3, 'b': 4}",
    "{'a': 3, 'b': 4,}",
    '"a": 3, "b": 4}',
]
FORMATS = {
    "hermes": '<tool_call>{{"name": "add", "arguments": {}}}</tool_call>',
    "llama3": '{{"name": "add", "parameters": {}}}',
    "mistral": "[TOOL_CALLS]add[ARGS]{}",
    "deepseek": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "gpt_oss": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
}


def read(spec: Any, text: str) -> list[tuple[Any, bool]]:
    """(arguments, or what is malformed, and whether it took a lenient spec) of each call."""
    calls = parse_response(text, spec, turn=0).calls
    assert all(call.name in ("", "add") for call in calls)
    return [(call.malformed or call.arguments, call.lenient) for call in calls]


def lenient(name: str) -> Any:
    return resolve_spec(None, ResponseSchemaConfig(name=name, lenient=True), None)


@pytest.mark.parametrize("arguments", LOOSE)
@pytest.mark.parametrize("family", FORMATS)
def test_loose_arguments_are_malformed_unless_lenient_is_set(family: str, arguments: str) -> None:
    text = FORMATS[family].format(arguments)
    for malformed, loose in read(load_spec(family), text):
        assert isinstance(malformed, str) and not loose
    assert read(lenient(family), text) == [(ARGUMENTS, True)]


@pytest.mark.parametrize("family", FORMATS)
def test_loose_arguments_inside_a_string(family: str) -> None:
    for arguments in LOOSE:
        text = FORMATS[family].format(json.dumps(arguments))
        assert read(lenient(family), text) == [(ARGUMENTS, True)]
        ((malformed, _),) = read(load_spec(family), text)
        assert "is a string without a JSON object" in malformed


@pytest.mark.parametrize("family", FORMATS)
def test_json_in_single_quotes_takes_a_lenient_spec(family: str) -> None:
    quoted = f"'{json.dumps(ARGUMENTS)}'"
    for arguments in (quoted, json.dumps(quoted)):
        text = FORMATS[family].format(arguments)
        assert read(lenient(family), text) == [(ARGUMENTS, True)]
        assert all(isinstance(malformed, str) for malformed, _ in read(load_spec(family), text))


@pytest.mark.parametrize("family", FORMATS)
def test_json_that_was_encoded_twice_is_decoded_always(family: str) -> None:
    for spec in (load_spec(family), lenient(family)):
        for arguments in (json.dumps(ARGUMENTS), json.dumps(json.dumps(ARGUMENTS)), TWICE):
            assert read(spec, FORMATS[family].format(arguments)) == [(ARGUMENTS, False)]
        assert read(spec, FORMATS[family].format(json.dumps(TWICE))) == [(ARGUMENTS, False)]
    ((malformed, _),) = read(
        load_spec(family), FORMATS[family].format(json.dumps(json.dumps(TWICE)))
    )
    assert "must be a JSON object, not a string" in malformed


def test_siblings_of_a_loose_call_are_as_they_were() -> None:
    texts = ['{"a": 3, "b": 4}', '"a": 3, "b": 4', "{a: }"]
    text = "".join(FORMATS["hermes"].format(arguments) for arguments in texts)
    good, loose, bad = read(lenient("hermes"), text)
    assert (good, loose) == ((ARGUMENTS, False), (ARGUMENTS, True))
    assert "expected a value" in bad[0] and not bad[1]
    deep = FORMATS["hermes"].format("a: " * 100_000 + "3")
    ((malformed, _),) = read(lenient("hermes"), deep)
    assert "nested more than 64 levels" in malformed


SCHEMA = {  # the older dialect: the expression takes the braces
    "type": "object",
    "properties": {
        "content": {"type": "string", "x-regex": r"^(.*?)(?:<tool_call>|$)"},
        "tool_calls": {
            "type": "array",
            "x-regex-iterator": r"<tool_call>(.*?)</tool_call>",
            "items": {
                "type": "object",
                "x-regex": r'"name": "(?P<name>\w+)", "arguments": \{(?P<arguments>.*)\}\}',
                "properties": {
                    "name": {"type": "string"},
                    "arguments": {"type": "object", "x-parser": "json", "additionalProperties": {}},
                },
            },
        },
    },
}
TEXT = {  # the same, and the arguments stay text
    **SCHEMA,
    "properties": {
        **SCHEMA["properties"],
        "tool_calls": {
            **SCHEMA["properties"]["tool_calls"],
            "items": {
                **SCHEMA["properties"]["tool_calls"]["items"],
                "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            },
        },
    },
}
MARKS = {  # the newer dialect: the braces belong to the marks
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r'<tool_call>\{"name": "(?P<name>\w+)", "arguments": \{',
            "close": "}}</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
CAPTURED = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": (
                r'<tool_call>\{"name": "(?P<name>\w+)", "arguments": \{(?P<arguments>[^}]*)\}'
            ),
            "close": "}</tool_call>",
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{arguments}"}},
        },
        "content": {},
    },
}
HEADER = {
    "call_open": "<tool_call>",
    "call_close": "</tool_call>",
    "syntax": "named_json",
    "header": r'\{"name": "(?P<name>\w+)", "arguments": \{',
    "footer": "}}",
}


@pytest.mark.parametrize("spec", [SCHEMA, TEXT, MARKS, CAPTURED, HEADER])
def test_a_spec_that_captures_the_inside_of_the_braces_gets_them_back(spec: dict[str, Any]) -> None:
    strict = make_spec(spec, source="test")
    call = FORMATS["hermes"].format
    assert read(strict, call('{"a": 3, "b": 4}') + call("{}")) == [(ARGUMENTS, False), ({}, False)]
    ((malformed, loose),) = read(strict, call("{a: 3, b: 4}"))
    assert isinstance(malformed, str) and not loose


@pytest.mark.parametrize("spec", [SCHEMA, TEXT, MARKS, CAPTURED, HEADER])
def test_a_spec_of_any_dialect_can_be_lenient(spec: dict[str, Any]) -> None:
    loose = resolve_spec(None, ResponseSchemaConfig(name="mine", spec=spec, lenient=True), None)
    call = FORMATS["hermes"].format
    for arguments in ("{a: 3, b: 4}", "{'a': 3, 'b': 4,}"):
        assert read(loose, call(arguments)) == [(ARGUMENTS, True)]
    assert read(loose, call('{"a": 3, "b": 4}')) == [(ARGUMENTS, False)]


def test_braces_are_not_added_where_the_expression_captures_them() -> None:
    whole = json.loads(json.dumps(TEXT).replace(r"\\{(?P<arguments>.*)\\}", "(?P<arguments>.*)"))
    spec = make_spec(whole, source="test")
    call = FORMATS["hermes"].format
    assert read(spec, call('{"a": 3, "b": 4}')) == [(ARGUMENTS, False)]
    ((malformed, _),) = read(spec, call('"a": 3, "b": 4'))
    assert "is a string without a JSON object" in malformed


@pytest.mark.parametrize("family", ["qwen_xml", "glm4_moe", "gemma4"])
def test_lenient_is_refused_where_calls_are_no_json(family: str) -> None:
    with pytest.raises(ChatError, match=r"response_schema\.lenient=true: lenient: has no effect"):
        lenient(family)


def test_lenient_calls_run_and_are_counted() -> None:
    chat = load_chat(
        tiny.tokenizer(), ChatTemplateConfig(), ResponseSchemaConfig(name="hermes", lenient=True)
    )
    answers = [parts.call("add", text) for text in ("{'a': 3, 'b': 4}", '{"a": 1, "b": 2}')]
    rollout = asyncio.run(
        run_rollout(
            RolloutRequest(task=parts.TASK),
            RolloutContext(
                engine=ScriptedEngine(parts.script(*answers, "Done.<|im_end|>"), max_context=4096),
                chat=chat,
                toolbox=parts.toolbox(),
                limits=LIMITS,
            ),
        )
    )
    assert [result.content for result in rollout.tool_results] == ["7", "3"]
    assert rollout_metrics([[rollout]])["tools/lenient_calls"] == 1.0


@pytest.mark.parametrize("name", SPECS)
def test_no_text_raises_where_lenient_is_set(name: str) -> None:
    spec = replace(SPECS[name], lenient=True)
    for text in fuzzed(seed=3, count=1000):
        loose = parse_response(text, spec, turn=3, schemas=[FORECAST]).calls
        assert len({call.id for call in loose}) == len(loose)
        assert not any(call.lenient and call.malformed for call in loose)
        # What strict parsing reads is read the same, and counted as nobody's looseness.
        strict = parse_response(text, SPECS[name], turn=3, schemas=[FORECAST]).calls
        if all(call.malformed is None for call in strict):
            assert loose == strict


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        *(("hermes", '<tool_call>{"a: '), ("hermes", '"arguments": a: '), ("hermes", "{'a': '")),
        *(("mistral", "[TOOL_CALLS]f[ARGS]a: "), ("mistral", 'a: "'), ("gpt_oss", "a: {'")),
        *(("schema/tags", '{"name": a: '), ("template/tags", "a: '")),
    ],
)
def test_lenient_work_grows_with_the_text(name: str, unit: str) -> None:
    spec = replace(SPECS[name], lenient=True)
    heads = {"mistral": "[TOOL_CALLS]f[ARGS]", "gpt_oss": "to=functions.f<|message|>"}

    def seconds(length: int) -> float:
        text = heads.get(name, '<tool_call>{"name": "f", ') + unit * (length // len(unit))
        times = []
        for _ in range(3):
            start = time.thread_time()
            parse_response(text + "<|call|></tool_call>", spec, turn=0)
            times.append(time.thread_time() - start)
        return max(min(times), 0.001)

    assert seconds(60_000) < 10 * seconds(15_000)
