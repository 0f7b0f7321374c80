"""Grammars of calls without an engine: what they say, who gets which, and what is refused."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace

import engine_kit
import parts
import pytest
import tiny
from parts import LIMITS, add, call, toolbox

from agenttrain import cli
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.fixes import families
from agenttrain.chat.grammar import AnswerForm, CallGrammar
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import original, small_tokenizer
from agenttrain.data.tasks import TaskSource
from agenttrain.engines.base import EngineError
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.environments.environments import Environments
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.request import RolloutContext
from agenttrain.runs.row_checks import check_rows
from agenttrain.settings.checks import check_for_verb
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.types import ConfigError, RowTool

ADD = {
    "type": "sequence",
    "elements": [
        {"type": "const_string", "value": '\n{"name": "add", "arguments": '},
        {
            "type": "json_schema",
            "json_schema": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "One number."},
                    "b": {"type": "integer", "description": "The other."},
                },
                "required": ["a", "b"],
            },
            "max_whitespace_cnt": 8,
        },
        {"type": "const_string", "value": "}\n</tool_call>"},
    ],
}
"""What may follow <tool_call>, with the blanks of the template's own calls."""
ORIGINALS = [(name, one) for name, f in families().items() for one in f.originals if f.tools]
TIGHT = json.loads(
    json.dumps(ADD).replace('"\\n{', '"{').replace("}\\n</tool_call>", "}</tool_call>")
)
"""The same for a template that writes no line breaks."""
HAVE_ONE = {
    **dict.fromkeys(("qwen2.5", "qwen3", "qwen3-2507", "qwen3-vl"), ADD),
    "smollm2": TIGHT,
}
ON = ("rollout.structured_calls=true", "engine=vllm")
RIGHT = ("algorithm.correction.level=token", "algorithm.behaviour=recomputed")
UNWATCHED = "guards.logprob_gap.limit=null"


def test_free_text_reasoning_and_calls() -> None:
    chat = parts.chat()
    found = json.loads(chat.grammar(toolbox(add).schemas()))["format"]
    calls = {"type": "or", "elements": [ADD]}
    answer = {
        "type": "dispatch",
        "rules": [["<tool_call>", calls]],
        "excludes": [],
        "loop": True,
    }
    free = {"type": "any_text", "excludes": ["</think>"]}
    closed = [free, {"type": "const_string", "value": "</think>"}, answer]
    thought = {"type": "or", "elements": [{"type": "sequence", "elements": closed}, free]}
    assert found["rules"] == [
        ["<tool_call>", {"type": "sequence", "elements": [calls, answer]}],
        ["<think>", thought],
    ]
    assert (found["type"], found["loop"], found["excludes"]) == ("dispatch", False, [])
    grammar = CallGrammar(chat.response, chat.render)
    inside = grammar.grammar_for(toolbox(add).schemas(), in_reasoning=True)
    assert json.loads(inside)["format"] == thought, "the prompt has opened it"


def test_without_a_tool_no_call_is_opened() -> None:
    found = json.loads(parts.chat().grammar([]))["format"]
    assert found["excludes"] == ["<tool_call>"]
    assert [text for text, _ in found["rules"]] == ["<think>"]


def text(value: str) -> dict:
    return {"type": "const_string", "value": value}


def test_a_demanded_call_stands_behind_the_reasoning() -> None:
    chat = parts.chat()
    schemas = toolbox(add, parts.final_answer).schemas()
    found = json.loads(chat.grammar(schemas, form=AnswerForm(call=True, tool="add")))["format"]
    gap = {"type": "or", "elements": [text(""), text("\n"), text("\n\n")]}
    rest = {"type": "any_text", "excludes": ["<tool_call>"]}
    call = [text("<tool_call>"), {"type": "or", "elements": [ADD]}, rest]
    answer = [gap, {"type": "or", "elements": [{"type": "sequence", "elements": call}]}]
    plain = {"type": "sequence", "elements": answer}
    thought = [{"type": "any_text", "excludes": ["</think>"]}, text("</think>"), plain]
    opened = [text("<think>"), {"type": "sequence", "elements": thought}]
    assert found == {"type": "or", "elements": [plain, {"type": "sequence", "elements": opened}]}
    any_call = chat.grammar(schemas, form=AnswerForm(call=True))
    assert any_call.count('"value": "<tool_call>"') == 2  # with and without reasoning
    assert "final_answer" in any_call


def test_demanded_json_ends_the_answer() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    form = AnswerForm(schema=json.dumps(schema))
    found = elements(json.loads(parts.chat().grammar([], form=form)))
    value = {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 8}
    assert {"type": "or", "elements": [value]} in found  # without tools nothing but JSON


def test_a_schema_means_to_the_grammar_what_it_means_to_the_tool() -> None:
    """`nullable` is transformers' own word, and a schema without `type` is an object's."""
    parameters = {"properties": {"a": {"type": "integer", "nullable": True}}}
    schema = {"type": "function", "function": {"name": 'a"b', "parameters": parameters}}
    text = parts.chat().grammar([schema])
    read = {"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}
    assert json.dumps({"json_schema": read})[1:-1] in text
    assert json.dumps('\n{"name": "a\\"b", "arguments": ') in text


def test_a_grammar_has_every_part_of_all_of() -> None:
    """xgrammar reads `$ref`, and ignores an `allOf` of several schemas."""
    both = {"allOf": [{"$ref": "#/$defs/I"}, {"maximum": 5}]}
    parameters = {
        "type": "object",
        "properties": {"a": both, "b": {"$ref": "#/$defs/I"}},
        "$defs": {"I": {"type": "integer"}},
    }
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    text = parts.chat().grammar([schema])
    properties = {"a": {"type": "integer", "maximum": 5}, "b": {"$ref": "#/$defs/I"}}
    assert json.dumps({"properties": properties, "$defs": parameters["$defs"]})[1:-1] in text


def test_each_rollout_has_the_grammar_of_its_own_tools() -> None:
    own = RowTool(
        name="plus",
        description="Add.",
        parameters={"properties": {"answer": {"enum": ["1", "2"]}}, "required": ["answer"]},
        executor="final_answer",
    )

    def sent(tools, structured: bool = True) -> list[str | None]:
        engine = ScriptedEngine(parts.script(call("add", '{"a": 3, "b": 4}'), "7<|im_end|>"))
        asyncio.run(
            run_rollout(
                RolloutRequest(task=replace(parts.TASK, tools=tools)),
                RolloutContext(
                    engine=engine,
                    chat=parts.chat(),
                    toolbox=toolbox(),
                    limits=replace(LIMITS, structured_calls=structured),
                ),
            )
        )
        return [one.sampling.grammar for one in engine.sent]

    schemas = toolbox().schemas()
    plus = {"type": "function", "function": {"name": "plus", "parameters": own.parameters}}
    rows = [(None, schemas), (("add",), schemas[:1]), ((own, "add"), [plus, schemas[0]])]
    for tools, expected in rows:
        assert sent(tools) == [parts.chat().grammar(expected)] * 2
    assert sent(None, structured=False) == [None, None]


def test_engines_without_grammars_refuse_them() -> None:
    async def main() -> None:
        async with engine_kit.running(tiny.model()) as engine:
            with pytest.raises(EngineError, match="engine=transformers has none"):
                await engine.generate([1, 7], Sampling(max_tokens=2, grammar="{}"), session="a")

    asyncio.run(main())


@pytest.mark.parametrize("schema", ["qwen_xml", "llama3", "mistral", "gpt_oss"])
def test_formats_without_a_grammar(schema: str) -> None:
    chat = load_chat(tiny.tokenizer(), ChatTemplateConfig(), ResponseSchemaConfig(name=schema))
    with pytest.raises(ChatError, match="structured_calls=true: the response schema does not"):
        rows = {"data.train": TaskSource([{"prompt": "a"}])}
        check_rows(chat, toolbox(add), Environments(), rows, structured_calls=True)


@pytest.mark.parametrize(("family", "source"), ORIGINALS)
def test_families_of_json_between_marks_have_one(family: str, source: str) -> None:
    text = original(source)
    assert text is not None, "pip install 'agenttrain[test]'"
    tokenizer = copy.copy(small_tokenizer(families()[family]))
    tokenizer.chat_template = text
    chat = load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())
    if family in HAVE_ONE:
        found = json.loads(chat.grammar(toolbox(add).schemas()))
        assert HAVE_ONE[family] in elements(found)
        return
    with pytest.raises(ChatError, match=r"^rollout\.structured_calls=true: "):
        chat.grammar([])


def elements(found: object) -> list[object]:
    """Everything in a JSON value."""
    inner = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
    return [found, *(item for one in inner for item in elements(one))]


def test_a_template_that_writes_calls_otherwise() -> None:
    chat = parts.chat()
    chat.template = tiny.TEMPLATE.replace('"arguments": ', '"parameters": ')
    with pytest.raises(ChatError, match="the chat template does not write calls as the response"):
        chat.grammar([])


def refused(verb: str, *overrides: str) -> list[str]:
    with hydra_session(Source()):
        config = compose_run([*ON, *overrides], Source()).config
    try:
        check_for_verb(verb, config)
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([UNWATCHED], "algorithm.correction=null: with rollout.structured_calls=true completions"),
        (
            [UNWATCHED, "algorithm.correction.level=geometric", RIGHT[1]],
            "algorithm.correction.level=geometric: with rollout.structured_calls=true",
        ),
        (
            [UNWATCHED, *RIGHT, "algorithm.correction.min=0.5"],
            "algorithm.correction.min=0.5: with rollout.structured_calls=true it would raise",
        ),
        (
            [UNWATCHED, *RIGHT, "algorithm.kl.beta=0.1"],
            "algorithm.kl.beta=0.1: with rollout.structured_calls=true tokens are not the policy's",
        ),
        (
            [UNWATCHED, *RIGHT, "algorithm.off_policy_threshold=0.1"],
            "algorithm.off_policy_threshold=0.1: with rollout.structured_calls=true it would take",
        ),
        (RIGHT, "guards.logprob_gap.limit=1.0: with rollout.structured_calls=true the gap"),
    ],
)
def test_training_weighs_what_the_grammar_changed(overrides: list[str], expected: str) -> None:
    (told,) = refused("train", *overrides)
    assert told.startswith(expected)
    assert refused("eval", *overrides) == [], "no gradient comes of it"


def test_what_training_takes() -> None:
    assert refused("train", *RIGHT, UNWATCHED) == []
    sequence = ("algorithm.correction.level=sequence", RIGHT[1])
    assert refused("train", *sequence, UNWATCHED) == []
    in_reward = ("algorithm.kl.beta=0.1", "algorithm.kl.place=reward")
    assert refused("train", *RIGHT, UNWATCHED, *in_reward) == []
    masked = ("algorithm.correction.min=0.5", "algorithm.correction.mode=mask")
    assert refused("train", *RIGHT, UNWATCHED, *masked) == []


def test_the_command_names_both_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *ON]) == 2
    told = capsys.readouterr().err
    assert "algorithm.correction=null: with rollout.structured_calls=true" in told
    assert (
        "set algorithm.correction.level=token or sequence, with algorithm.behaviour=recomputed"
        in told
    )
    assert "add guards.logprob_gap.limit=null" in told
