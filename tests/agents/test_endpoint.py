"""The endpoint over a scripted engine: the loop's ids in all shapes, restarts, replays, limits."""

from __future__ import annotations

import asyncio
import copy
import json
import socket
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import agent_kit
import httpx
import openai
import parts
import pytest
import tiny
from agent_kit import ADD, ASK, TOOLS, ask, client, post, reply, rollout

from agenttrain.agents import runner
from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.agents.task import AgentTask
from agenttrain.chat.chat import Chat
from agenttrain.chat.wire.http import body_limit
from agenttrain.chat.wire.normal import Question
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.runtimes.base import MachineLost
from agenttrain.tracking.rollouts import read_rollout, rollout_record
from agenttrain.types import Completion, Rollout, StopReason, ToolError

END = "<|im_end|>"
SEVEN = f"It is 7.{END}"


async def plain(agent: AgentTask) -> None:
    """Two turns with plain requests."""
    async with client(agent) as http:
        message = await ask(http, ASK)
        assert agent_kit.arguments(message) == {"a": 3, "b": 4}
        await ask(http, [*ASK, *reply(message, "7")])


async def in_process(agent: AgentTask) -> None:
    """The same without a socket, with the run's own client."""
    async with agent.http_client() as http:
        message = await ask(http, ASK)
        assert (await http.post("/reward", json={"reward": 0.25})).status_code == 200
        wrong = {"authorization": "Bearer another"}
        assert (await post(http, ASK, headers=wrong)).status_code == 401
        assert (await http.post("/reward", json={}, auth=("me", "another"))).status_code == 401
        body = {"messages": [*ASK, *reply(message, "7")], "tools": TOOLS, "stream": True}
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert (await response.aread()).endswith(b"data: [DONE]\n\n")


async def hooked(agent: AgentTask) -> None:
    """The same with hooks of httpx's client."""
    seen = []

    async def note(response: httpx.Response) -> None:
        seen.append((response.request.url.path.rpartition("/")[2], response.status_code))

    async with agent.http_client(event_hooks={"response": [note]}) as http:
        message = await ask(http, ASK)
        await ask(http, [*ASK, *reply(message, "7")])
    assert seen == [("completions", 200)] * 2
    with pytest.raises(RuntimeError, match="the client has been closed"):
        await http.get("/v1/models")


async def streaming(agent: AgentTask) -> None:
    """The same with OpenAI's client, streamed."""
    plain_http = httpx.AsyncClient(verify=False)
    async with openai.AsyncOpenAI(
        base_url=agent.base_url, api_key=agent.api_key, http_client=plain_http
    ) as opened:
        async with opened.chat.completions.stream(
            model=agent.model, messages=ASK, tools=TOOLS
        ) as stream:
            got = (await stream.get_final_completion()).choices[0]
        assert got.finish_reason == "tool_calls"
        messages = [*ASK, *reply(got.message.model_dump(exclude_none=True), "7")]
        async with opened.chat.completions.stream(
            model=agent.model, messages=messages, tools=TOOLS
        ) as stream:
            got = (await stream.get_final_completion()).choices[0]
        assert (got.message.content, got.finish_reason) == ("It is 7.", "stop")


async def anthropics(agent: AgentTask) -> None:
    """The same in Anthropic's shape; the second answer is a stream."""
    tools = [
        {
            "name": t["function"]["name"],
            "description": t["function"]["description"],
            "input_schema": t["function"]["parameters"],
            "cache_control": {"type": "ephemeral"},
        }
        for t in TOOLS
    ]
    async with client(agent) as http:
        asked = {"model": "policy", "messages": ASK, "tools": tools, "max_tokens": 200}
        count = await http.post("/v1/messages/count_tokens", json=asked)
        answer = (await http.post("/v1/messages", json=asked)).json()
        assert count.json() == {"input_tokens": answer["usage"]["input_tokens"]}
        (use,) = answer["content"]
        assert (use["type"], use["input"], answer["stop_reason"]) == (
            "tool_use",
            {"a": 3, "b": 4},
            "tool_use",
        )
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "7"}
        history = [
            *ASK,
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [result]},
        ]
        response = await http.post(
            "/v1/messages", json={**asked, "messages": history, "stream": True}
        )
        events = [line[7:] for line in response.text.splitlines() if line.startswith("event: ")]
        assert events == [
            "message_start",
            *("content_block_start", "content_block_delta", "content_block_stop"),
            "message_delta",
            "message_stop",
        ]
        data = [json.loads(line[6:]) for line in response.text.splitlines() if line[:5] == "data:"]
        assert data[2]["delta"] == {"type": "text_delta", "text": "It is 7."}
        assert data[-2]["delta"]["stop_reason"] == "end_turn"


@pytest.mark.parametrize("drive", [plain, in_process, hooked, streaming, anthropics])
def test_every_client_gives_the_ids_of_the_loop(drive) -> None:
    done, loop = rollout(drive, ADD, SEVEN), parts.rollout(ADD, SEVEN)
    (mine,), (theirs,) = done.trajectories, loop.trajectories
    assert (mine.spans, mine.messages) == (theirs.spans, theirs.messages)
    assert (done.stop_reason, done.error, done.turns) == (StopReason.completed, None, 2)
    assert done.counts["agent/requests"] == 2
    assert [(r.call.name, r.content, r.error) for r in done.tool_results] == [("add", "7", None)]


def test_seeds_are_those_of_the_loop() -> None:
    mine, theirs = agent_kit.engine_of(ADD, SEVEN), agent_kit.engine_of(ADD, SEVEN)
    rollout(plain, engine=mine)
    parts.rollout(engine=theirs)
    assert [sent.sampling.seed for sent in mine.sent] == [
        sent.sampling.seed for sent in theirs.sent
    ]
    assert [sent.sampling.max_tokens for sent in mine.sent] == [
        sent.sampling.max_tokens for sent in theirs.sent
    ]


def test_a_recorded_rollout_is_read_again() -> None:
    done = rollout(plain, ADD, SEVEN)
    again = read_rollout(json.loads(json.dumps(rollout_record(done))), parts.TASK)
    verify(again, agent_kit.shared_chat(), [])
    assert again.trajectories[0].schemas == tuple(TOOLS)
    assert again.counts == done.counts


def test_a_closing_conversation_appends_the_replies_that_nothing_follows() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK)
            closing = {"messages": [*ASK, *reply(message, "ok")], "reward": 0.25}
            assert (await http.post("/finish", json=closing)).status_code == 200
            late = await post(http, ASK)
            assert (late.status_code, late.json()["error"]["code"]) == (403, "completed")

    answer = parts.call("final_answer", '{"answer": "7"}')
    done = rollout(drive, answer)
    loop = parts.rollout(answer, tools=parts.toolbox(stop_tools=["final_answer"]))
    assert done.trajectories[0].spans == loop.trajectories[0].spans
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.25)


def edited(change) -> Rollout:
    """A rollout of two turns whose second request `change` has rewritten."""

    async def drive(agent: AgentTask) -> None:
        system = {"role": "system", "content": "It is 12:00."}
        async with client(agent) as http:
            message = await ask(http, [system, *ASK])
            history = copy.deepcopy([system, *ASK, *reply(message, "7")])
            tools = copy.deepcopy(TOOLS)
            change(history, tools)
            await ask(http, history, tools=tools)

    return rollout(drive, ADD, SEVEN)


def _clock(history, tools) -> None:
    history[0]["content"] = "It is 12:01."


def _tools(history, tools) -> None:
    del tools[1]


def _edit(history, tools) -> None:
    history[2]["tool_calls"][0]["function"]["arguments"] = '{"a": 3, "b": 5}'


def _drop(history, tools) -> None:
    del history[2:]


@pytest.mark.parametrize(
    ("change", "kind", "difference"),
    [
        (_clock, "system", "character 10: sent '1.', issued '0.'"),
        (_tools, "tools", "the definitions of the tools"),
        (_edit, "edited", "message 2 .assistant."),
        (_drop, "dropped", "messages that followed are missing"),
    ],
)
def test_a_rewritten_history_opens_a_trajectory_and_is_counted(change, kind, difference) -> None:
    with pytest.warns(RuntimeWarning, match=f"agent/restarts/{kind}: .*{difference}"):
        done = edited(change)
    first, second = done.trajectories
    assert {k: v for k, v in done.counts.items() if "restarts" in k} == {
        f"agent/restarts/{kind}": 1
    }
    assert second.parent is not None and second.parent[0] == 0
    assert second.token_ids[: second.parent[1]] == first.token_ids[: second.parent[1]]
    assert (first.turns, second.turns) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda history, tools: history[1].update(
            content=[{"type": "text", "text": ASK[0]["content"]}]
        ),
        lambda history, tools: history[2].update(content=" \n", refusal=None),
        lambda history, tools: tools.reverse(),
        lambda history, tools: history[2]["tool_calls"][0]["function"].update(
            arguments='{"b":4.0,"a":3}'
        ),
        lambda history, tools: history[0].update(role="developer"),
    ],
    ids=["parts", "stripped", "order of tools", "spelling of arguments", "developer"],
)
def test_other_spellings_of_a_history_continue_it(change) -> None:
    done = edited(change)
    assert len(done.trajectories) == 1
    assert not [name for name in done.counts if "restarts" in name]


def test_parallel_replies_in_any_order_are_rendered_in_call_order() -> None:
    two = ADD.removesuffix(END) + "\n" + parts.call("add", '{"a": 5, "b": 6}')

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message, *replies = reply(await ask(http, ASK), "7", "11")
            wrong = await post(http, [*ASK, message, replies[0]])
            assert (wrong.status_code, "exactly one" in wrong.text) == (400, True)
            twice = await post(http, [*ASK, message, replies[0], replies[0], replies[1]])
            assert twice.status_code == 400
            await ask(http, [*ASK, message, *reversed(replies)])

    done = rollout(drive, two, SEVEN)
    assert done.trajectories[0].spans == parts.rollout(two, SEVEN).trajectories[0].spans


def test_a_malformed_call_with_a_name_is_a_call_and_others_are_text() -> None:
    named = '<tool_call>\n{"name": "add", "arguments": 3}\n</tool_call><|im_end|>'
    nameless = "<tool_call>\n{oops\n</tool_call><|im_end|>"

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            first = await ask(http, ASK)
            history = [*ASK, *reply(first, "no")] if first.get("tool_calls") else [*ASK, first]
            history += [] if first.get("tool_calls") else [{"role": "user", "content": "again"}]
            await ask(http, history)

    for broken in (named, nameless):
        done = rollout(drive, broken, SEVEN)
        assert len(done.trajectories) == 1
        assert done.tool_results[0].error is ToolError.malformed
    text = tiny.tokenizer().decode(done.trajectories[0].token_ids)
    assert f"{nameless}\n<|im_start|>user\n<tool_response>\nError: malformed call: " in text


def test_a_replay_gets_the_same_answer_and_is_sampled_once() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            key = {"idempotency-key": "k"}
            first = await post(http, ASK, key)
            again = await post(http, ASK, key)
            retried = await post(http, ASK, {"x-stainless-retry-count": "1"})
            assert first.json() == again.json() == retried.json()
            other = await post(http, [{"role": "user", "content": "other"}], key)
            assert (other.status_code, other.json()["error"]["code"]) == (400, "idempotency_error")
            assert (await post(http, ASK)).json()["id"] != first.json()["id"]

    with pytest.warns(RuntimeWarning, match="dropped"):
        done = rollout(drive, ADD, SEVEN)
    assert (done.turns, done.counts["agent/requests"]) == (2, 2)


def test_a_cut_connection_gets_its_answer_with_the_next_equal_request() -> None:
    async def drive(agent: AgentTask) -> None:
        engine.delay = 0.3
        async with client(agent) as http:
            with pytest.raises(httpx.ReadTimeout):
                await http.post(
                    "/v1/chat/completions", json={"messages": ASK, "tools": TOOLS}, timeout=0.1
                )
            await asyncio.sleep(0.05)
            await ask(http, ASK)

    engine = agent_kit.engine_of(SEVEN)
    done = rollout(drive, engine=engine)
    assert (done.turns, len(done.trajectories)) == (1, 1)


@pytest.mark.parametrize(
    ("fields", "status", "text"),
    [
        ({"temperature": 0.2}, 400, "agent.on_sampling=override"),
        ({"top_p": 0.9}, 400, "top_p=0.9"),
        ({"seed": 3}, 400, "seed=3"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"n": 2}, 400, "n=2: is not supported"),
        ({"tool_choice": "required"}, 400, "tool_choice: demands a call, which needs a grammar"),
        (
            {"response_format": {"type": "json_object"}},
            400,
            "set engine=vllm|vllm_server and rollout.structured_calls=true, and algorithm.correc",
        ),
        ({"tool_choice": "required", "tools": []}, 400, "demands a call of a tool, and tools are"),
        ({"tool_choice": {"type": "function"}}, 400, "expected auto, none, required, or"),
        ({"response_format": {"type": "json_schema"}}, 400, "expected the type text, json_object"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}]},
            400,
            "not a JSON schema",
        ),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, 400, "engine.max_context"),
        ({"messages": [*ASK, {"role": "assistant", "content": "So"}]}, 400, "not continued"),
        ({"messages": "hello"}, 400, "messages"),
        ({"model": "gpt"}, 404, "agent.models"),
    ],
)
def test_bad_input_is_answered_in_the_apis_shape_and_ends_the_rollout(fields, status, text) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            body = {"model": "good", "messages": ASK, "tools": TOOLS, **fields}
            response = await http.post("/v1/chat/completions", json=body)
            assert response.status_code == status
            assert text in response.json()["error"]["message"]

    done = rollout(drive, SEVEN, models={"good": "policy"})
    full = "max_context" in text
    assert done.stop_reason is (StopReason.context_full if full else StopReason.error)
    assert full or text in str(done.error)


def test_an_agent_that_recovers_from_an_error_goes_on() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            assert (await post(http, ASK, temperature=0.5)).status_code == 400
            await ask(http, ASK, temperature=1, top_p=1.0)

    done = rollout(drive, SEVEN)
    assert (done.stop_reason, done.error) == (StopReason.completed, None)


@pytest.mark.parametrize(
    ("fields", "overridden"),
    [
        ({"temperature": 0.5, "seed": 1}, 1),
        ({"parallel_tool_calls": False}, 1),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 1),
        ({"repetition_penalty": 1.2, "unheard_of": [1]}, 1),
        ({"store": False, "metadata": {}, "thinking": {}, "parallel_tool_calls": True}, 0),
    ],
)
def test_what_would_change_samples_or_prompt_is_refused_or_replaced_and_counted(
    fields: dict[str, Any], overridden: int
) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            response = await post(http, ASK, **fields)
            statuses.append(response.status_code)
            if response.status_code == 400:
                error = response.json()["error"]
                assert (error["param"] in fields, error["code"]) == (True, "unsupported_value")
                assert "agent.on_sampling=override" in error["message"]

    statuses: list[int] = []
    replaced, refused = agent_kit.engine_of(SEVEN), agent_kit.engine_of(SEVEN)
    done = rollout(drive, engine=replaced, on_sampling="override")
    assert done.counts.get("agent/overridden", 0) == overridden
    rollout(drive, engine=refused)
    assert statuses == [200, 400 if overridden else 200]
    assert len(refused.sent) == 1 - overridden
    (sent,) = replaced.sent
    assert list(sent.token_ids) == agent_kit.shared_chat().prompt_ids(ASK, TOOLS)
    assert (sent.sampling.temperature, sent.sampling.grammar) == (1.0, None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_body_that_no_context_holds_is_not_read(path: str) -> None:
    limit, piece, taken = body_limit(4096), 2**16, []

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            taken.append(piece)
            yield b" " * piece

    async def drive(agent: AgentTask) -> None:
        async with agent.http_client() as http:
            response = await http.post(path, content=endless())
            assert response.status_code == 413

    done = rollout(drive, SEVEN)
    assert (done.stop_reason, done.turns) == (StopReason.context_full, 0)
    assert "a context of 4096 tokens cannot hold" in str(done.error)
    assert sum(taken) <= limit + piece


def test_a_large_request_is_read_in_a_thread(monkeypatch) -> None:
    prompt_ids, in_loop = Chat.prompt_ids, []

    def noted(self: Chat, *arguments: Any, **options: Any) -> list[int]:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return prompt_ids(self, *arguments, **options)

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            for size in (10, 2**15):
                await ask(http, ASK, tools=[], metadata={"x": "y" * size})

    monkeypatch.setattr(Chat, "prompt_ids", noted)
    with pytest.warns(RuntimeWarning, match="dropped"):
        rollout(drive, SEVEN)
    assert in_loop == [True, False]


def test_limits_end_the_rollout() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            history = list(ASK)
            for _ in range(9):
                response = await post(http, history)
                if response.status_code != 200:
                    assert response.status_code == 403
                    return
                history += reply(response.json()["choices"][0]["message"], "7")

    assert rollout(drive, ADD, limits={"max_turns": 2}).stop_reason is StopReason.max_turns
    assert rollout(drive, ADD, max_requests=2).stop_reason is StopReason.max_requests
    spent = rollout(drive, ADD, limits={"max_completion_tokens": 100, "max_turns": 50})
    assert spent.stop_reason is StopReason.max_tokens


def test_keys_of_rollouts_do_not_open_others() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            for headers in ({"authorization": "Bearer x"}, {"authorization": ""}):
                assert (await post(http, ASK, headers)).status_code == 401
            other = await http.post(f"{agent.url}x/v1/chat/completions", json={})
            assert (other.status_code, other.json()["error"]["code"]) == (401, "invalid_api_key")
            models = (await http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in models] == ["policy"]
            await ask(http, ASK)

    assert rollout(drive, SEVEN).turns == 1


def test_frozen_and_side_conversations_are_answered_and_not_trained() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK, model="big")
            await ask(http, [{"role": "user", "content": "a title?"}], model="small", tools=[])
            await ask(http, [{"role": "user", "content": "a helper"}], model="big", tools=[])
            await ask(http, [*ASK, *reply(message, "7")], model="big")

    models = {"big": "policy", "small": "frozen"}
    trained = rollout(drive, ADD, SEVEN, models=models, train="all")
    assert [(t.role, t.turns) for t in trained.trajectories] == [("main", 2), ("agent", 1)]
    assert [(side.model, side.frozen) for side in trained.untrained] == [("small", True)]
    for train in ("main", "agents"):
        done = rollout(drive, ADD, SEVEN, models=models, train=train)
        assert [(t.role, t.turns) for t in done.trajectories] == [("main", 2)]
        assert [(side.model, side.frozen) for side in done.untrained] == [
            ("big", False),
            ("small", True),
        ]


class Counting(ScriptedEngine):
    """Knows how many requests it had at once."""

    at_once = most_at_once = 0

    async def generate(self, *arguments: Any, **words: Any) -> Completion:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await super().generate(*arguments, **words)
        finally:
            self.at_once -= 1


def add_once(ids: Any, session: str, turn: int) -> Any:
    return parts.ids(SEVEN if turn or "/" in session else ADD)


def test_requests_at_once_open_trajectories_and_wait_in_lockstep() -> None:
    async def drive(agent: AgentTask) -> None:
        engine.delay = 0.1
        async with client(agent) as http:
            message = await ask(http, ASK)
            both = await asyncio.gather(
                *(post(http, [*ASK, *reply(message, text)]) for text in ("7", "8"))
            )
            statuses[:] = sorted(response.status_code for response in both)

    statuses: list[int] = []
    engine = Counting(add_once)
    with pytest.warns(RuntimeWarning, match="dropped"):
        done = rollout(drive, engine=engine)
    assert (statuses, len(done.trajectories)) == ([200, 200], 2)
    assert engine.most_at_once == 2
    engine = Counting(add_once)
    with pytest.warns(RuntimeWarning, match="dropped"):
        done = rollout(drive, engine=engine, lockstep=True)
    assert (statuses, len(done.trajectories), engine.most_at_once) == ([200, 200], 2, 1)


def test_an_agent_that_raises_is_an_error_and_no_zero() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await ask(http, ASK)
        raise OSError("no network")

    done = rollout(drive, SEVEN)
    assert (done.stop_reason, done.turns) == (StopReason.error, 1)
    assert done.error == "the agent raised OSError: no network"
    assert rollout(drive, SEVEN, on_failure="zero").stop_reason is StopReason.agent_failed


@pytest.mark.parametrize("wrap", ["", "cause", "group"])
def test_a_machine_that_is_lost_is_no_failure_of_the_agent(wrap: str) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await ask(http, ASK)
        lost = MachineLost("the container ended")
        if wrap == "cause":
            raise ValueError from lost
        raise ExceptionGroup("g", [lost]) if wrap else lost

    done = rollout(drive, SEVEN, on_failure="zero")
    assert (done.stop_reason, done.error) == (StopReason.error, "the container ended")


def test_an_agent_that_hangs_runs_out_of_time() -> None:
    async def drive(agent: AgentTask) -> None:
        await asyncio.sleep(60)

    done = rollout(drive, SEVEN, timeout_s=0.2)
    assert (done.stop_reason, done.error) == (StopReason.error, "agent.timeout_s=0.2 passed")


def test_what_a_coroutine_prints_is_kept_with_its_rollout(tmp_path, capsys) -> None:
    async def drive(agent: AgentTask) -> None:
        print("thinking")
        await asyncio.to_thread(print, "in a thread", file=sys.stderr)
        async with client(agent) as http:
            await ask(http, ASK)
        print("done")

    rollout(drive, SEVEN, folder=tmp_path)
    print("the run's own")
    assert (tmp_path / "rollout.stdout").read_text() == "thinking\ndone\n"
    assert (tmp_path / "rollout.stderr").read_text() == "in a thread\n"
    assert capsys.readouterr() == ("the run's own\n", "")


def test_an_answer_of_which_a_client_read_a_part_is_sampled_once() -> None:
    request = {"messages": ASK, "tools": TOOLS, "stream": True}
    bodies = []

    async def half(agent: AgentTask) -> None:
        """Ask on a socket, read ten bytes of the answer, close it."""
        url = httpx.URL(agent.url)
        body = json.dumps(request).encode()
        head = (
            f"POST {url.path}/v1/chat/completions HTTP/1.1\r\nhost: {url.host}\r\n"
            f"authorization: Bearer {agent.api_key}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        opened = socket.create_connection((url.host, url.port))
        opened.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(opened, head.encode() + body)
        while b"[DONE]" not in await loop.run_in_executor(None, peeked, opened):
            await asyncio.sleep(0.01)
        await loop.sock_recv(opened, 10)
        opened.close()

    def peeked(opened: socket.socket) -> bytes:
        try:
            return opened.recv(2**16, socket.MSG_PEEK)
        except BlockingIOError:
            return b""

    async def drive(agent: AgentTask) -> None:
        await half(agent)
        async with client(agent) as http:
            for _ in range(2):
                response = await http.post("/v1/chat/completions", content=json.dumps(request))
                bodies.append(response.text)

    with pytest.warns(RuntimeWarning, match="agent/restarts/dropped"):  # of another sample
        done = rollout(drive, ADD, SEVEN)
    assert done.counts["agent/requests"] == 2  # the first answer, sent again; another sample
    assert "add" in bodies[0] and "It is 7." in bodies[1]


def test_a_large_request_does_not_hold_up_another_rollout(tmp_path) -> None:
    began, ended = asyncio.Event(), []

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            if agent.rollout_id == "small":
                await began.wait()
                await asyncio.sleep(0.05)  # the large one has arrived
                await ask(http, ASK)
            else:
                began.set()
                large = [{"role": "user", "content": "7 and 8, " * 15_000}]
                assert (await post(http, large)).status_code == 400
            ended.append(agent.rollout_id)

    async def both() -> None:
        config = AgentConfig(name="endpoint", _target_="agent_kit.driven")
        agents = Agents(config, agent_kit.shared_chat(), tmp_path)
        engine = agent_kit.engine_of(SEVEN)
        attempts = [
            RolloutRequest(task=parts.TASK, sampling=Sampling(), rollout_id=name)
            for name in ("large", "small")
        ]
        agent_kit._drives.append(drive)
        try:
            await asyncio.gather(
                *(agents.attempt(attempt, engine, parts.LIMITS) for attempt in attempts)
            )
        finally:
            agent_kit._drives.pop()
            await agents.aclose()

    asyncio.run(both())
    assert ended == ["small", "large"]


def test_checks_of_forms_are_remembered_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that invents tools for each request must not fill the memory."""
    monkeypatch.setattr(runner, "MOST_FORMS", 2)
    checked = []
    monkeypatch.setattr(
        runner, "form_problem", lambda chat, question, structured: checked.append(question)
    )
    agents = Agents(AgentConfig(name="endpoint"), agent_kit.shared_chat(), tmp_path)

    async def check(number: int) -> None:
        question = Question(messages=[], schemas=[{"number": number}])
        assert await agents._form_error(question, structured=False) is None

    async def ask_all() -> None:
        for number in (0, 1, 0, 2, 0, 1):
            await check(number)

    asyncio.run(ask_all())
    assert len(agents._form_problems) == 2
    assert [question.schemas[0]["number"] for question in checked] == [0, 1, 2, 1]
