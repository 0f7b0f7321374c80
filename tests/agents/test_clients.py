"""What real clients do to a conversation: respelled calls, titles, stop texts, late system texts.

Each case is a request that a program was seen to send.
"""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import agent_kit
import parts
import pytest
import tiny
from agent_kit import ADD, ASK, TOOLS, ask, client, post, reply, rollout

from agenttrain.agents.task import AgentTask
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.engines.config import Sampling
from agenttrain.rollout.ledger import verify
from agenttrain.tracking.metrics import agent_metrics
from agenttrain.tracking.rollouts import read_rollout, rollout_record
from agenttrain.types import Finish, Rollout, StopReason

SEVEN = "It is 7.<|im_end|>"
EDIT = {
    "type": "function",
    "function": {
        "name": "edit",
        "description": "Edit a file.",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "all": {"type": "boolean", "default": False},
                "where": {"$ref": "#/$defs/where"},
            },
            "required": ["path"],
            "$defs": {
                "where": {"type": "object", "properties": {"line": {"default": 1}}},
            },
        },
    },
}


def sent_back(written: str, **changes: Any) -> Rollout:
    """A rollout of two turns; the client sends the first call back with changes."""

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK, tools=[EDIT])
            history = copy.deepcopy(reply(message, "ok"))
            history[0]["tool_calls"][0]["function"].update(changes)
            for _ in range(2):  # the change is in each later request too
                answer = await ask(http, [*ASK, *history], tools=[EDIT])
                history += [answer, {"role": "user", "content": "and now?"}]

    return rollout(drive, written, SEVEN)


PLAIN = parts.call("edit", '{"path": "n", "where": {}}')


@pytest.mark.parametrize(
    "arguments",
    [
        {"path": "n", "where": {}, "all": False},
        {"all": False, "where": {"line": 1.0}, "path": "n"},
    ],
)
def test_defaults_of_the_schema_may_be_written_into_a_call(arguments: dict[str, Any]) -> None:
    """Claude Code does so (`replace_all: false`)."""
    done = sent_back(PLAIN, arguments=json.dumps(arguments))
    assert (len(done.trajectories), done.turns) == (1, 3)
    assert done.counts["agent/respelled_calls"] == 1
    plain = sent_back(PLAIN)
    assert done.trajectories[0].spans == plain.trajectories[0].spans
    assert done.trajectories[0].messages == plain.trajectories[0].messages
    assert "agent/respelled_calls" not in plain.counts


def test_defaults_may_be_left_out() -> None:
    full = parts.call("edit", '{"path": "n", "all": false}')
    assert len(sent_back(full, arguments='{"path": "n"}').trajectories) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": '{"path": "n", "where": {}, "all": true}'},
        {"arguments": '{"path": "m", "where": {}}'},
        {"arguments": '{"path": "n", "where": {"line": 2}}'},
        {"arguments": '{"path": "n", "where": {}, "more": null}'},
        {"arguments": "no JSON"},
        {"name": "edits"},
    ],
)
def test_another_value_or_name_is_an_edit(changes: dict[str, Any]) -> None:
    with pytest.warns(RuntimeWarning, match="agent/restarts/edited"):
        done = sent_back(PLAIN, **changes)
    assert done.counts["agent/restarts/edited"] == 1
    assert "agent/respelled_calls" not in done.counts


MALFORMED = (
    '<tool_call>\n{"name": "edit", "arguments": {"path": "n", "all"}}\n</tool_call><|im_end|>'
)


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": "{}"},  # the AI SDK, strands, qwen-code
        {"arguments": '{"INVALID_JSON": "<tool_call>…"}'},  # pydantic-ai
        {"name": "invalid", "arguments": '{"tool": "edit", "error": "…"}'},  # opencode
    ],
    ids=["empty", "INVALID_JSON", "invalid"],
)
def test_anything_may_stand_for_a_malformed_call(changes: dict[str, Any]) -> None:
    done = sent_back(MALFORMED, **changes)
    assert (len(done.trajectories), done.turns) == (1, 3)
    assert done.counts["agent/respelled_calls"] == 1
    assert done.trajectories[0].spans == sent_back(MALFORMED).trajectories[0].spans


def test_a_call_of_another_conversation_is_not_restored() -> None:
    """Its id is ours, but the messages before it are others."""

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK)
            other = [{"role": "user", "content": "what is 5 + 6?"}]
            await ask(http, [*other, *reply(message, "7")])

    with pytest.warns(RuntimeWarning, match="agent/restarts/edited"):
        assert len(rollout(drive, ADD, SEVEN).trajectories) == 2


TITLE = [{"role": "system", "content": "You write titles"}, *ASK]


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("train", ["agents", "main", "all"])
def test_the_main_conversation_has_the_tools_whatever_comes_first(
    train: str, at_once: bool
) -> None:
    """opencode and Claude Code ask for a title of the session first."""

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            if at_once:
                _, message = await asyncio.gather(
                    ask(http, TITLE, tools=[], model="t"), ask(http, ASK)
                )
            else:
                await ask(http, TITLE, tools=[], model="t")
                message = await ask(http, ASK)
            await ask(http, [*ASK, *reply(message, "7")])

    def answer(ids: Any, session: str, turn: int) -> Any:
        text = tiny.tokenizer().decode(ids)
        return parts.ids("Sums<|im_end|>" if "titles" in text else SEVEN if turn else ADD)

    engine = agent_kit.ScriptedEngine(answer, max_context=4096)
    done = rollout(drive, engine=engine, train=train)
    roles = {trajectory.role: trajectory.turns for trajectory in done.trajectories}
    assert roles == {"main": 2, **({"agent": 1} if train == "all" else {})}
    assert [(r.call.name, r.content) for r in done.tool_results] == [("add", "7")]
    if train != "all":
        (side,) = done.untrained
        assert (side.model, side.frozen, side.turns) == ("t", False, 1)
        assert side.sampled_length == len(parts.ids("Sums<|im_end|>"))
        assert side.messages[-1]["content"] == "Sums"
        share = side.sampled_length / (side.sampled_length + done.sampled_length)
        metrics = agent_metrics([done])
        assert metrics["agent/untrained_share"] == pytest.approx(share)
        assert metrics["agent/merged_share"] == 1.0
    again = read_rollout(json.loads(json.dumps(rollout_record(done))), parts.TASK)
    verify(again, agent_kit.shared_chat(), [])
    assert (again.untrained, again.trajectories[0].spans) == (
        done.untrained,
        done.trajectories[0].spans,
    )


def test_a_kept_conversation_begins_with_what_it_shared_with_a_removed_one() -> None:
    """Both have the same system message, so that the second branches from the first."""
    system = {"role": "system", "content": "Be brief, be kind, and always be exact."}

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            title = [system, {"role": "user", "content": "A title?"}]
            await ask(http, title, tools=TOOLS)
            message = await ask(http, [system, *ASK], tools=TOOLS)
            await ask(http, [system, *ASK, *reply(message, "7")], tools=TOOLS)

    task = replace(parts.TASK, messages=tuple(ASK))
    assert task.messages == parts.TASK.messages
    done = rollout(drive, "Sums<|im_end|>", ADD, SEVEN, train="main")
    (kept,) = done.trajectories
    assert (kept.role, kept.index, kept.parent, kept.turns) == ("main", 0, None, 2)
    prompt = agent_kit.shared_chat().prompt_ids([system, *ASK], TOOLS)
    assert list(kept.token_ids[: len(prompt)]) == prompt
    assert kept.prompt_length == len(prompt)
    record = json.loads(json.dumps(rollout_record(done)))
    verify(read_rollout(record, parts.TASK), agent_kit.shared_chat(), [])


def test_sub_agents_are_trained_and_counted_as_merged() -> None:
    """A helper with tools of its own: a conversation, and no restart."""

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK)
            helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "3"}]
            await ask(http, helper, tools=TOOLS[:1])
            await ask(http, [*ASK, *reply(message, "7")])

    done = rollout(drive, ADD, SEVEN)
    assert [(t.role, t.turns) for t in done.trajectories] == [("main", 2), ("agent", 1)]
    assert agent_metrics([done])["agent/merged_share"] == 1.0


def test_nothing_left_to_train_is_said_with_the_names_that_came() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await ask(http, ASK, model="claude-opus-4-8")

    done = rollout(drive, SEVEN, models={"policy": "policy", "*": "frozen"})
    assert done.stop_reason is StopReason.error
    assert "1 requests, all for models that are frozen: claude-opus-4-8" in str(done.error)


def test_a_frozen_model_samples_at_the_temperature_of_its_request() -> None:
    """Side calls of Claude Code ask for 0; what is trained keeps the run's."""

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await ask(http, ASK, tools=[], model="small", temperature=0, top_k=-1)
            assert (await post(http, ASK, model="small", temperature=3)).status_code == 400
            assert (await post(http, ASK, temperature=0)).status_code == 400
            await ask(http, ASK)

    engine = agent_kit.engine_of(SEVEN)
    rollout(drive, engine=engine, models={"small": "frozen", "*": "policy"})
    assert [sent.sampling.temperature for sent in engine.sent] == [0, 1]


def test_a_frozen_model_keeps_what_its_request_leaves_open_and_gets_numbers() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            await ask(http, ASK, tools=[], model="small", temperature="0.5")
            title = [{"role": "user", "content": "a title?"}]
            await ask(http, title, tools=[], model="small", top_k="5")
            await ask(http, ASK)

    engine = agent_kit.engine_of(SEVEN)
    models = {"small": "frozen", "*": "policy"}
    rollout(drive, engine=engine, models=models, sampling=Sampling(top_k=7))
    assert [(sent.sampling.temperature, sent.sampling.top_k) for sent in engine.sent] == [
        (0.5, 7),
        (1.0, 5),
        (1.0, 7),
    ]


def test_a_frozen_model_s_request_in_flight_takes_no_turn_of_the_rollout() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            title = asyncio.create_task(ask(http, ASK, tools=[], model="small"))
            await asyncio.sleep(0.1)
            await ask(http, ASK)
            await title

    engine = agent_kit.engine_of(SEVEN)
    engine.delay = 0.3
    models = {"small": "frozen", "*": "policy"}
    done = rollout(drive, engine=engine, models=models, limits={"max_turns": 1})
    assert (done.stop_reason, done.turns) == (StopReason.completed, 1)


def test_two_first_requests_at_once_are_one_conversation() -> None:
    async def drive(agent: AgentTask) -> None:
        engine.delay = 0.1
        async with client(agent) as http:
            await asyncio.gather(ask(http, ASK), ask(http, ASK))

    engine = agent_kit.engine_of(SEVEN)
    done = rollout(drive, engine=engine, train="main")
    assert [trajectory.role for trajectory in done.trajectories] == ["main", "main"]
    assert (done.untrained, done.counts["agent/conversations"]) == ((), 1)


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_stop_text_ends_the_turn_at_the_token_that_completes_it(path: str) -> None:
    """smolagents: the tokens stay what was sampled, and the client gets the text before."""
    written = "It is 7.\nObservation: 8<|im_end|>"

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            stop = {"stop": ["Observation:"], "stop_sequences": ["Observation:"]}
            stop.pop("stop" if path == "messages" else "stop_sequences")
            body = {"messages": ASK, "max_tokens": 100, **stop}
            answer = (await http.post(f"/v1/{path}", json=body)).json()
            if path == "messages":
                text = answer["content"][0]["text"]
            else:
                text = answer["choices"][0]["message"]["content"]
                assert answer["choices"][0]["finish_reason"] == "stop"
            assert text.strip() == "It is 7."
            later = [{"role": "assistant", "content": text}, {"role": "user", "content": "sure?"}]
            await http.post(f"/v1/{path}", json={**body, "messages": [*ASK, *later]})

    done = rollout(drive, written, SEVEN)
    (trajectory,) = done.trajectories
    first = next(trajectory.sampled_spans())
    text_of = agent_kit.shared_chat().text_of
    assert "Observation:" in text_of(first.token_ids)
    assert "Observation:" not in text_of(first.token_ids[:-1])
    assert first.finish is Finish.abort
    assert (done.stop_reason, done.turns) == (StopReason.completed, 2)
    text = tiny.tokenizer().decode(trajectory.token_ids)
    assert "Observation:<|im_end|>\n<|im_start|>user\nsure?" in text


def test_a_stop_text_inside_a_call_leaves_text() -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            message = await ask(http, ASK, stop=["</tool_call>"])
            assert "tool_calls" not in message and "<tool_call>" in message["content"]
            await ask(http, [*ASK, message, {"role": "user", "content": "go on"}])

    done = rollout(drive, ADD, SEVEN)
    assert (len(done.trajectories), done.turns) == (1, 2)
    assert "the client ended the answer before this call" in tiny.tokenizer().decode(
        done.trajectories[0].token_ids
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("chat/completions", {"tool_choice": "required", "tools": TOOLS}),
        ("chat/completions", {"response_format": {"type": "json_object"}}),
        (
            "messages",
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        ),
        ("responses", {"text": {"format": {"type": "json_object"}}}),
    ],
)
def test_a_form_that_nothing_can_force_is_asked_for_and_counted(path: str, fields) -> None:
    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            body = {"messages": ASK, "input": "3 + 4?", "max_tokens": 50, **fields}
            for name in ("input",) if path != "responses" else ("messages", "max_tokens"):
                del body[name]
            statuses.append((await http.post(f"/v1/{path}", json=body)).status_code)

    statuses: list[int] = []
    done = rollout(drive, SEVEN, on_form="ask")
    assert (statuses, done.counts["agent/unforced_forms"]) == ([200], 1)
    rollout(drive, SEVEN)
    assert statuses == [200, 400]


LATE = {"role": "system", "content": "Available agent types: none"}


def strict_chat() -> Chat:
    """A chat whose template refuses a system message that is not the first."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    refusal = "{%- for m in messages[1:] if m.role == 'system' %}{{- raise_exception('no') }}"
    tokenizer.chat_template = f"{refusal}{{%- endfor %}}{tiny.TEMPLATE}"
    return load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())


@pytest.mark.parametrize("behind", ["user", "results"])
@pytest.mark.parametrize("shows", [True, False], ids=["shown", "refused"])
def test_a_system_message_may_come_late(behind: str, shows: bool) -> None:
    """Claude Code sends one behind the first message, and in sub-agents behind results."""
    tools = [
        {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS
    ]

    async def drive(agent: AgentTask) -> None:
        async with client(agent) as http:
            late = [LATE] if behind == "user" else []
            body = {"messages": [*ASK, *late], "tools": tools, "max_tokens": 90, "system": "Be."}
            answer = (await http.post("/v1/messages?beta=true", json=body)).json()
            result = {"type": "tool_result", "tool_use_id": answer["content"][0]["id"]}
            history = [
                *body["messages"],
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": [{**result, "content": "7"}]},
                *([] if late else [LATE]),
            ]
            again = await http.post("/v1/messages?beta=true", json={**body, "messages": history})
            assert again.status_code == 200, again.text

    done = rollout(drive, ADD, SEVEN, chat=agent_kit.shared_chat() if shows else strict_chat())
    (trajectory,) = done.trajectories
    assert done.turns == 2
    text = tiny.tokenizer().decode(trajectory.token_ids)
    role = "system" if shows else "user"
    shown = f"<|im_start|>{role}\n{LATE['content']}<|im_end|>"
    if behind == "user" and not shows:
        shown = f"<|im_start|>user\n{ASK[0]['content']}\n\n{LATE['content']}<|im_end|>"
    assert shown in text
