"""Requests that demand a call or JSON: their grammars, and what is refused without one."""

from __future__ import annotations

import json

import agent_kit
import pytest
from agent_kit import ADD, ASK, TOOLS, ask, client, post, reply, rollout

from agenttrain.agents.task import AgentTask
from agenttrain.chat.grammar import ANY_FORM, AnswerForm
from agenttrain.types import StopReason

SEVEN = "It is 7.<|im_end|>"
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
NAMED = {"type": "function", "function": {"name": "add"}}
JSON = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
STRUCTURED = {"structured_calls": True}


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({}, ANY_FORM),
        ({"tool_choice": "auto", "response_format": {"type": "text"}}, ANY_FORM),
        ({"tool_choice": "required"}, AnswerForm(call=True)),
        ({"tool_choice": NAMED}, AnswerForm(call=True, tool="add")),
        ({"response_format": JSON}, AnswerForm(schema=json.dumps(POINT))),
        ({"response_format": {"type": "json_object"}}, AnswerForm(schema='{"type": "object"}')),
    ],
)
def test_a_demand_is_the_grammar_of_its_turn(fields, form: AnswerForm) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK, **fields)
            await ask(http, [*ASK, *reply(message, "7")])  # continues it, whatever it demanded

    engine = agent_kit.engine_of(ADD, SEVEN)
    done = rollout(drive, engine=engine, limits=STRUCTURED)
    chat = agent_kit.shared_chat()
    assert [sent.sampling.grammar for sent in engine.sent] == [
        chat.grammar(TOOLS, after="user", form=form),
        chat.grammar(TOOLS, after="tool"),
    ]
    assert len(done.trajectories) == 1


@pytest.mark.parametrize(
    ("choice", "form"),
    [
        ({"type": "any"}, AnswerForm(call=True)),
        ({"type": "tool", "name": "add"}, AnswerForm(call=True, tool="add")),
    ],
)
def test_the_same_in_anthropics_shape(choice, form: AnswerForm) -> None:
    tool = {"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            asked = {"messages": ASK, "tools": [tool], "max_tokens": 200, "tool_choice": choice}
            answer = await http.post("/v1/messages", json=asked)
            assert answer.json()["content"][0]["name"] == "add"

    engine = agent_kit.engine_of(ADD)
    rollout(drive, engine=engine, limits=STRUCTURED)
    (sent,) = engine.sent
    schema = {"name": "add", "parameters": tool["input_schema"]}
    shown = [{"type": "function", "function": schema}]
    assert sent.sampling.grammar == agent_kit.shared_chat().grammar(shown, form=form)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice: demands a call, which needs a grammar"),
        ({"tool_choice": {"type": "tool"}}, "expected the type auto, none, any, or tool with a na"),
        ({"tool_choice": {"type": "tool", "name": "sub"}}, "demands a call of the tool sub, and "),
    ],
)
def test_anthropics_error_names_the_remedy(fields, text: str) -> None:
    tool = {"name": "add", "input_schema": TOOLS[0]["function"]["parameters"]}

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            asked = {"messages": ASK, "tools": [tool], "max_tokens": 200, **fields}
            answer = await http.post("/v1/messages", json=asked)
            assert (answer.status_code, answer.json()["type"]) == (400, "error")
            assert answer.json()["error"]["type"] == "invalid_request_error"
            assert text in answer.json()["error"]["message"]

    assert rollout(drive, ADD).stop_reason is StopReason.error


def test_a_schema_that_is_none_is_refused() -> None:
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": 3}}}

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            response = await post(http, ASK, response_format=bad)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "response_format"
            assert error["message"].startswith("response_format: not a JSON schema: $.type: 3 is")

    rollout(drive, SEVEN, limits=STRUCTURED)
