"""Requests that cannot be answered: each API's own error with a remedy, and why the rollout ended.

Parameters that are refused are in test_endpoint.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import parts
import pytest
import tiny
from agent_kit import ASK, client, rollout

from agenttrain.agents import app
from agenttrain.agents.task import AgentTask
from agenttrain.engines.base import EngineError
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.types import Completion, StopReason

SEVEN = "It is 7.<|im_end|>"
NO_SYSTEM = (
    "{%- if messages[0].role == 'system' %}{{ raise_exception('No system role') }}{%- endif %}"
)
BAD_SCHEMA = {"type": "object", "properties": {"a": {"type": 3}}}


def openais(messages: list[Any], parameters: dict[str, Any] | None, model: str) -> tuple[str, dict]:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    tools = [tool] if parameters else []
    return "/v1/chat/completions", {"model": model, "messages": messages, "tools": tools}


def anthropics(
    messages: list[Any], parameters: dict[str, Any] | None, model: str
) -> tuple[str, dict]:
    system = [m["content"] for m in messages if m["role"] == "system"]
    body: dict[str, Any] = {"model": model, "max_tokens": 99}
    body["messages"] = [m for m in messages if m["role"] != "system"]
    if system:
        body["system"] = system[0]
    if parameters:
        body["tools"] = [{"name": "f", "input_schema": parameters}]
    return "/v1/messages", body


def openais_error(response: httpx.Response) -> tuple[str, str, str | None]:
    """Message, type and the parameter at fault."""
    assert response.json().keys() == {"error"}
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error["message"], error["type"], error["param"]


def anthropics_error(response: httpx.Response) -> tuple[str, str, str | None]:
    """Message and type."""
    answer = response.json()
    assert (answer["type"], answer.keys()) == ("error", {"type", "error"})
    assert answer["error"].keys() == {"type", "message"}
    return answer["error"]["message"], answer["error"]["type"], None


BAD: dict[str, tuple[tuple[Any, ...], int, str, str, str]] = {
    "an unknown model": (
        (ASK, None, "gpt"),
        404,
        "not_found_error",
        "model",
        "model=gpt: is not among agent.models=['policy']; name one of them, or add it there",
    ),
    "a tool that is no JSON schema": (
        (ASK, BAD_SCHEMA, "policy"),
        400,
        "invalid_request_error",
        "tools",
        "tools: f: its parameters are not a JSON schema: $.properties.a.type: 3 is not valid",
    ),
    "messages that the template refuses": (
        ([{"role": "system", "content": "Be brief."}, *ASK], None, "policy"),
        400,
        "invalid_request_error",
        "messages",
        "refuses messages of the roles ['system', 'user']: No system role; change the messages or",
    ),
    "a conversation over the context": (
        ([{"role": "user", "content": "x " * 3000}], None, "policy"),
        400,
        "invalid_request_error",
        "messages",
        "tokens fill the context of 4096; shorten them, or raise engine.max_context",
    ),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("request_of", "error_of"),
    [(openais, openais_error), (anthropics, anthropics_error)],
    ids=["openai", "anthropic"],
)
def test_the_apis_own_error_names_the_remedy_and_ends_the_rollout(
    bad: str, request_of, error_of
) -> None:
    asked, status, kind, param, text = BAD[bad]

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            path, body = request_of(*asked)
            response = await http.post(path, json=body)
            message, given, named = error_of(response)
            assert (response.status_code, named) == (
                status,
                param if error_of is openais_error else None,
            )
            assert given == (kind if error_of is anthropics_error else "invalid_request_error")
            assert text in message
            errors.append(message)

    errors: list[str] = []
    chat = parts.chat()
    chat.template = NO_SYSTEM + tiny.TEMPLATE
    done = rollout(drive, SEVEN, chat=chat, models={"policy": "policy"})
    if "context" in bad:
        assert (done.stop_reason, done.error) == (StopReason.context_full, errors[0])
    else:
        assert (done.stop_reason, done.error) == (StopReason.error, errors[0])


class Failing(ScriptedEngine):
    """Fails after some seconds."""

    async def generate(self, *asked: Any, **more: Any) -> Completion:
        await asyncio.sleep(self.delay)
        raise EngineError("no memory")


def test_a_rollout_whose_request_is_nested_too_deeply_ends_with_that_reason() -> None:
    deep: Any = {}
    for _ in range(700):
        deep = {"a": deep}
    function = {"name": "f", "arguments": deep}
    call = {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}
    statuses: list[int] = []

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            messages = [*ASK, call, {"role": "tool", "tool_call_id": "c", "content": "7"}]
            response = await http.post("/v1/chat/completions", json={"messages": messages})
            statuses.append(response.status_code)

    done = rollout(drive, SEVEN)
    assert statuses == [400]
    assert (done.stop_reason, done.error) == (StopReason.error, "the request is nested too deeply")


@pytest.mark.parametrize(
    ("request_of", "event"), [(openais, "data: {"), (anthropics, "event: error\ndata: {")]
)
def test_a_stream_that_has_begun_ends_with_an_error(request_of, event: str, monkeypatch) -> None:
    """Before its first comment it has the status of any other answer."""
    monkeypatch.setattr(app, "KEPT_ALIVE_S", 0.2)

    async def drive(agent: AgentTask) -> None:
        path, body = request_of(ASK, None, "policy")
        async with client(agent) as http:
            response = await http.post(path, json={**body, "stream": True})
        answers.append((response.status_code, response.text))

    answers: list[tuple[int, str]] = []
    for delay in (0.0, 0.5):
        engine = Failing([])
        engine.delay = delay
        assert rollout(drive, engine=engine).error == "no memory"
    (at_once, text), (later, events) = answers
    assert (at_once, later) == (500, 200)
    assert "no memory" in text and event not in text
    comment, _, error = events.partition("\n\n")
    assert comment == ": keep-alive" and event in error and "no memory" in error
