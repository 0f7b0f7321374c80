"""The route of responses: the loop's ids, items in all their spellings, errors in words."""

from __future__ import annotations

import json
from typing import Any

import agent_kit
import httpx
import openai
import parts
import pytest
from agent_kit import ADD, ASK, TOOLS, client, rollout

from agenttrain.agents import app
from agenttrain.agents.task import AgentTask
from agenttrain.chat.grammar import AnswerForm
from agenttrain.types import Rollout, StopReason

SEVEN = "It is 7.<|im_end|>"
FUNCTIONS = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
USER: dict[str, Any] = {"type": "message", "role": "user"}
USER["content"] = [{"type": "input_text", "text": ASK[0]["content"]}]


async def send(http: httpx.AsyncClient, items: Any, **fields: Any) -> dict[str, Any]:
    """Ask for a response; return its body."""
    body = {"model": "policy", "input": items, "tools": FUNCTIONS, **fields}
    answer = await http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def output_of(item: dict[str, Any], text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": item["call_id"], "output": text}


async def plain(agent: AgentTask) -> None:
    """Two turns; the output of the first is sent back as it came."""
    async with client(agent) as http:
        first = await send(http, [USER])
        (call,) = first["output"]
        assert (call["type"], call["name"], json.loads(call["arguments"])) == (
            "function_call",
            "add",
            {"a": 3, "b": 4},
        )
        second = await send(http, [USER, *first["output"], output_of(call, "7")])
        (message,) = second["output"]
        assert (second["object"], second["status"]) == ("response", "completed")
        assert message["content"][0]["text"] == "It is 7."
        usage = second["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def references(agent: AgentTask) -> None:
    """The same with the ids of items alone, as clients send that trust in store=true."""
    async with client(agent) as http:
        (call,) = (await send(http, "what is 3 + 4?"))["output"]
        reference = {"type": "item_reference", "id": call["id"]}
        await send(http, [USER, reference, output_of(call, "7")])


async def streaming(agent: AgentTask) -> None:
    """The same with OpenAI's client, streamed."""
    plain_http = httpx.AsyncClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=agent.base_url, api_key=agent.api_key, http_client=plain_http
    ) as opened:
        async with opened.responses.stream(model="policy", input=[USER], tools=FUNCTIONS) as stream:
            events = [event async for event in stream]
            first = await stream.get_final_response()
        assert [event.sequence_number for event in events] == list(range(len(events)))
        (call,) = first.output
        items = [USER, *(item.to_dict() for item in first.output)]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "7"})
        async with opened.responses.stream(
            model="policy", input=items, tools=FUNCTIONS, store=False
        ) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert final.output_text == "It is 7."
        assert kinds == [
            *("response.created", "response.in_progress", "response.output_item.added"),
            *("response.content_part.added", "response.output_text.delta"),
            *("response.output_text.done", "response.content_part.done"),
            *("response.output_item.done", "response.completed"),
        ]


@pytest.mark.parametrize("drive", [plain, references, streaming])
def test_responses_give_the_ids_of_the_loop(drive) -> None:
    done, loop = rollout(drive, ADD, SEVEN), parts.rollout(ADD, SEVEN)
    (mine,), (theirs,) = done.trajectories, loop.trajectories
    assert (mine.spans, mine.messages) == (theirs.spans, theirs.messages)
    assert (done.stop_reason, done.error, done.turns) == (StopReason.completed, None, 2)


TWO = ADD.removesuffix("<|im_end|>") + "\n" + parts.call("add", '{"a": 5, "b": 6}')


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (1, 0, 3, 2)])
def test_calls_and_outputs_in_any_order_are_one_turn(order: tuple[int, ...]) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            first, second = (await send(http, [USER]))["output"]
            items = [first, second, output_of(first, "7"), output_of(second, "11")]
            await send(http, [USER, *(items[index] for index in order)])

    if order[0] == 1:  # the calls themselves have another order: an edit
        with pytest.warns(RuntimeWarning, match="agent/restarts/edited"):
            assert len(rollout(drive, TWO, SEVEN).trajectories) == 2
        return
    done = rollout(drive, TWO, SEVEN)
    assert done.trajectories[0].spans == parts.rollout(TWO, SEVEN).trajectories[0].spans


THOUGHT = "<think>I add</think>" + ADD


@pytest.mark.parametrize(
    "change",
    [
        lambda item: None,
        lambda item: item.update(content=None),
        lambda item: item.pop("encrypted_content"),
        lambda item: (item.clear(), item.update(id=ids[-1])),
    ],
    ids=["as issued", "handle alone", "text alone", "id alone"],
)
def test_reasoning_is_an_item_of_its_turn(change) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            reasoning, call = (await send(http, [USER]))["output"]
            assert reasoning["content"] == [{"type": "reasoning_text", "text": "I add"}]
            assert reasoning["encrypted_content"]
            ids.append(reasoning["id"])
            change(reasoning)
            await send(http, [USER, reasoning, call, output_of(call, "7")])

    done = rollout(drive, THOUGHT, SEVEN)
    assert (len(done.trajectories), done.turns) == (1, 2)


ids: list[str] = []


def test_reasoning_that_was_edited_is_another_trajectory() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            reasoning, call = (await send(http, [USER]))["output"]
            reasoning["content"][0]["text"] = "I guess"
            await send(http, [USER, reasoning, call, output_of(call, "7")])

    with pytest.warns(RuntimeWarning, match="agent/restarts/edited"):
        assert len(rollout(drive, THOUGHT, SEVEN).trajectories) == 2


def test_tools_of_namespaces_are_shown_and_those_of_the_provider_are_counted() -> None:
    """As Codex sends them: the call goes back with its namespace, and comes with it."""
    space = {"type": "namespace", "name": "agents", "tools": [FUNCTIONS[0]]}
    tools = [FUNCTIONS[1], space, {"type": "web_search"}, {"type": "custom", "name": "patch"}]

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            (call,) = (await send(http, [USER], tools=tools))["output"]
            assert (call["namespace"], call["name"]) == ("agents", "add")
            await send(http, [USER, call, output_of(call, "7")], tools=tools)

    done = rollout(drive, ADD, SEVEN)
    assert (len(done.trajectories), done.counts["agent/hosted_tools"]) == (1, 4)
    names = [schema["function"]["name"] for schema in done.trajectories[0].schemas or ()]
    assert names == [TOOLS[1]["function"]["name"], "add"]


def test_instructions_and_developer_messages_are_the_systems() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await send(http, [USER], instructions="Be brief.")
            developer = {"role": "developer", "content": "Be brief."}
            await send(http, [developer, USER])

    with pytest.warns(RuntimeWarning, match="dropped"):
        done = rollout(drive, SEVEN)
    first, second = (trajectory.messages for trajectory in done.trajectories)
    assert first == second
    assert first[0] == {"role": "system", "content": "Be brief."}


def test_an_answer_that_is_cut_is_incomplete() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            answer = await send(http, [USER], max_output_tokens=2)
            assert answer["status"] == answer["output"][0]["status"] == "incomplete"
            assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
            body = {"input": "x", "stream": True, "max_output_tokens": 2}
            streamed = await http.post("/v1/responses", json=body)
            assert "event: response.incomplete" in streamed.text

    assert rollout(drive, SEVEN).stop_reason is StopReason.max_tokens


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"tool_choice": "required"}, AnswerForm(call=True)),
        ({"tool_choice": {"type": "function", "name": "add"}}, AnswerForm(call=True, tool="add")),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "null"}}}},
            AnswerForm(schema='{"type": "null"}'),
        ),
        ({"text": {"format": {"type": "json_object"}}}, AnswerForm(schema='{"type": "object"}')),
    ],
)
def test_a_demand_is_the_grammar_of_its_turn(fields, form: AnswerForm) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await send(http, [USER], **fields)

    engine = agent_kit.engine_of(ADD)
    rollout(drive, engine=engine, limits={"structured_calls": True})
    (sent,) = engine.sent
    assert sent.sampling.grammar == agent_kit.shared_chat().grammar(TOOLS, form=form)


CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "nothing is kept here between requests; send the whole"),
    ({"conversation": "conv_1"}, "nothing is kept here between requests"),
    ({"background": True}, "nothing is kept here"),
    ({"temperature": 0}, "agent.on_sampling=override"),
    ({"parallel_tool_calls": False}, "agent.on_sampling=override"),
    ({"top_logprobs": 3}, "top_logprobs=3: is not supported here"),
    ({"tool_choice": "required"}, "tool_choice: demands a call, which needs a grammar"),
    ({"tool_choice": {"type": "web_search"}}, "expected auto, none, required, or"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format="),
    ({"input": []}, "input"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, 'input[1].id="msg_1": no such'),
    ({"input": [USER, {"type": "computer_call"}]}, "items of the type computer_call are not"),
    ({"input": [USER, {**CALL, "type": "custom_tool_call"}]}, "functions are the only tools"),
    ({"input": [USER, CALL]}, "answers are not continued"),
    ({"input": [USER, CALL, USER]}, "each needs exactly one tool message"),
    ({"input": [USER, output_of(CALL, "7")]}, "call_id=c: no item before it"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
        "a part of type input_im",
    ),
    ({"input": [{"role": "tool", "content": "x"}]}, "role=tool: expected user"),
    ({"tools": [{"type": "function"}]}, "tools[0]: needs a name"),
    ({"tools": [{"name": "f"}]}, "tools[0]: needs a type"),
]


@pytest.mark.parametrize(("fields", "text"), BAD, ids=[text[:25] for _, text in BAD])
def test_bad_input_is_answered_in_words(fields: dict[str, Any], text: str) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            answer = await http.post(
                "/v1/responses", json={"input": [USER], "tools": FUNCTIONS, **fields}
            )
            assert answer.status_code == 400
            assert text in answer.json()["error"]["message"]

    assert rollout(drive, SEVEN).stop_reason is StopReason.error


def test_a_failure_in_a_stream_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that fails after the stream has begun."""

    async def drive(agent: AgentTask) -> None:
        engine.delay = 0.3
        async with client(agent) as http:
            body = {"input": "x", "stream": True, "tools": []}
            answer = await http.post("/v1/responses", json=body)
            kinds = [line[7:] for line in answer.text.splitlines() if line[:6] == "event:"]
            assert kinds == ["response.created", "response.in_progress", "response.failed"]
            data = json.loads(answer.text.splitlines()[-2].removeprefix("data: "))
            assert "the script has no answer" in data["response"]["error"]["message"]

    engine = agent_kit.ScriptedEngine([], max_context=4096)
    monkeypatch.setattr(app, "KEPT_ALIVE_S", 0.05)
    assert rollout(drive, engine=engine).stop_reason is StopReason.error


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "text"),
    [
        ("GET", "/v1/responses", {}, 405, "there are POST chat/completions, responses, messages"),
        ("POST", "/v1/embeddings", {}, 404, "POST /"),
        ("GET", "/v1/responses", {"upgrade": "websocket", "connection": "upgrade"}, 426, "by POST"),
    ],
)
def test_other_routes_are_answered_with_those_that_there_are(
    method: str, path: str, headers: dict[str, str], status: int, text: str
) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            answer = await http.request(method, path, headers=headers)
            assert (answer.status_code, text in answer.json()["error"]["message"]) == (status, True)
            await send(http, [USER])

    assert rollout(drive, SEVEN).turns == 1


@pytest.mark.parametrize("path", ["/responses", "/chat/completions", "/messages", "/models"])
def test_a_base_url_without_v1_reaches_the_same_routes(path: str) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            body = {"messages": ASK, "input": "3 + 4?", "max_tokens": 50}
            body.pop("input" if "responses" not in path else "messages")
            method = "GET" if path == "/models" else "POST"
            answer = await http.request(method, path, json=body if method == "POST" else None)
            assert answer.status_code == 200, answer.text

    done: Rollout = rollout(drive, SEVEN, on_sampling="override")
    assert done.turns == (path != "/models")


def test_requests_of_both_apis_are_one_conversation() -> None:
    """A call that came as a chat completion is answered as a response."""

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await agent_kit.ask(http, ASK)
            (call,) = message["tool_calls"]
            item = {"type": "function_call", "call_id": call["id"], **call["function"]}
            await send(http, [USER, item, output_of(item, "7")])

    assert len(rollout(drive, ADD, SEVEN).trajectories) == 1
