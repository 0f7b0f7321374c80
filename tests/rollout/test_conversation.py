"""Conversations: later user turns that come from outside, in one rollout."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import parts
import tiny

from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.conversation import Conversation
from agenttrain.rollout.ledger import verify
from agenttrain.rollout.request import RolloutContext
from agenttrain.types import Message, Rollout, StopReason

ANSWERS = (
    parts.call("add", '{"a": 3, "b": 4}'),
    "The answer is 7.<|im_end|>",
    "You are welcome.<|im_end|>",
)


def context(**changes: object) -> RolloutContext:
    engine = ScriptedEngine(parts.script(*ANSWERS), max_context=600)
    base = RolloutContext(
        engine=engine, chat=parts.chat(), toolbox=parts.toolbox(), limits=parts.LIMITS
    )
    return replace(base, **changes)


async def talk(conversation: Conversation, *texts: str | None) -> Rollout:
    for text in texts:
        await conversation.send(text)
    await conversation.aclose()
    assert conversation.rollout is not None
    return conversation.rollout


def test_a_later_message_continues_the_sampled_ids() -> None:
    engine_context = context()
    engine = engine_context.engine
    assert isinstance(engine, ScriptedEngine)
    conversation = Conversation(engine_context, RolloutRequest(task=parts.TASK))
    rollout = asyncio.run(talk(conversation, None, "thank you"))
    (trajectory,) = rollout.trajectories
    roles = [message["role"] for message in trajectory.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    # Each request is what was sent before, what was sampled, and a suffix.
    for before, after, answer in zip(engine.sent, engine.sent[1:], ANSWERS, strict=False):
        history = (*before.token_ids, *parts.ids(answer))
        assert after.token_ids[: len(history)] == history
    text = tiny.tokenizer().decode(engine.sent[2].token_ids)
    assert text.endswith(
        "The answer is 7.<|im_end|>\n<|im_start|>user\nthank you<|im_end|>\n<|im_start|>assistant\n"
    )
    verify(rollout, parts.chat(), parts.toolbox().schemas())


def test_messages_are_reported_as_they_come() -> None:
    events: list[tuple[str, str]] = []

    def record(rollout: Rollout, messages: list[Message]) -> None:
        events.extend((m["role"], m["content"]) for m in messages)

    conversation = Conversation(context(on_messages=record), RolloutRequest(task=parts.TASK))
    asyncio.run(talk(conversation, None))
    assert events == [("assistant", ""), ("tool", "7"), ("assistant", "The answer is 7.")]


def test_a_limit_ends_the_conversation() -> None:
    limits = replace(parts.LIMITS, max_turns=2)
    conversation = Conversation(context(limits=limits), RolloutRequest(task=parts.TASK))
    asyncio.run(talk(conversation, None, "thank you"))
    assert conversation.stop_reason is StopReason.max_turns


def test_no_message_is_asked_for_that_the_last_turn_leaves_unanswered() -> None:
    limits = replace(parts.LIMITS, max_turns=2)
    conversation = Conversation(context(limits=limits), RolloutRequest(task=parts.TASK))
    asyncio.run(talk(conversation, None))  # a call, and the answer
    assert conversation.stop_reason is StopReason.max_turns


def test_a_time_limit_before_the_first_turn_is_a_stop_reason() -> None:
    engine = ScriptedEngine(parts.script(*ANSWERS), delay=0.5)
    limits = replace(parts.LIMITS, timeout_s=0.05)
    conversation = Conversation(
        context(engine=engine, limits=limits), RolloutRequest(task=parts.TASK)
    )
    asyncio.run(talk(conversation, None))
    assert conversation.stop_reason is StopReason.timeout


def test_thinking_does_not_use_up_the_time_limit() -> None:
    async def slow() -> StopReason | None:
        limits = replace(parts.LIMITS, timeout_s=0.3)
        conversation = Conversation(context(limits=limits), RolloutRequest(task=parts.TASK))
        await conversation.send()
        await asyncio.sleep(0.5)
        await conversation.send("thank you")
        reason = conversation.stop_reason
        await conversation.aclose()
        return reason

    assert asyncio.run(slow()) is None


def test_the_time_limit_ends_a_slow_answer() -> None:
    engine = ScriptedEngine(parts.script(*ANSWERS), delay=0.2)
    limits = replace(parts.LIMITS, timeout_s=0.3)
    conversation = Conversation(
        context(engine=engine, limits=limits), RolloutRequest(task=parts.TASK)
    )
    asyncio.run(talk(conversation, None))
    assert conversation.stop_reason is StopReason.timeout
    assert engine.released == ["rollout"]
