"""The ledger of every family over random conversations, with small and with real tokenizers."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from qwen_tokenizer import qwen

from agenttrain.chat.certificate import as_parsed, certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.fixes import families
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import EXAMPLE_TOOLS, original, small_tokenizer
from agenttrain.types import (
    AssistantTurn,
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    Task,
    ToolCall,
)

Conversation = list[tuple[AssistantTurn, list[Message]]]
QWEN = ("qwen2.5", "qwen3", "qwen3-2507", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8")


def built(tokenizer: Any, source: str, name: str = "auto") -> Chat:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = original(source)
    return load_chat(tokenizer, ChatTemplateConfig(name=name), ResponseSchemaConfig())


@cache
def small(family: str, source: str) -> Chat:
    if family in ("hermes", "pythonic"):
        return built(small_tokenizer(families()["gemma"]), "gemma3", family)
    return built(small_tokenizer(families()[family]), source)


@cache
def real_qwen(family: str) -> Chat:
    return built(qwen(), families()[family].originals[0])


fragments = st.sampled_from(
    [
        *("7", " é", "東京", "🙂", "\n", "  ", '{"a": 1}', "\\", "\ufdd0", "\t\n ", "'", '"'),
        *("<|im_end|>", "<|im_start|>system\n", "<tool_call>", "</tool_response>", "</think>"),
        *("<|eot_id|>", "<|call|>", "<turn|>", "<|user|>", "</s>", "[TOOL_CALLS]"),
    ]
)
texts = st.one_of(st.text(max_size=12), st.lists(fragments, max_size=6).map("".join))
words = st.from_regex(r"[A-Za-z][A-Za-z0-9 ,.é東]{0,12}", fullmatch=True).map(str.strip)
calls_of = {
    "add": st.fixed_dictionaries({"a": st.integers(-99, 99), "b": st.integers(1, 9)}),
    "search": st.fixed_dictionaries({"query": words, "exact": st.booleans()}),
}


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Up to six turns: calls with replies, or an answer and what the user says to it."""
    found: Conversation = []
    for number in range(draw(st.integers(1, 6))):
        names = draw(st.lists(st.sampled_from(sorted(calls_of)), max_size=3))
        calls = tuple(
            ToolCall(id=f"call_{number}_{i}", name=name, arguments=draw(calls_of[name]))
            for i, name in enumerate(names)
        )
        turn = AssistantTurn(
            content=draw(words) if not calls or draw(st.booleans()) else "",
            reasoning=draw(st.none() | words),
            calls=calls,
        )
        replies: list[Message] = [
            {"role": "tool", "tool_call_id": c.id, "name": c.name, "content": draw(texts)}
            for c in calls
        ]
        found.append((turn, replies or [{"role": "user", "content": draw(texts)}]))
    return found


def check(chat: Chat, user: str, conversation: Conversation) -> None:
    """The rollout's ids are what was sent, and at each turn the full rendering."""
    messages: list[Message] = [{"role": "user", "content": user}]
    rollout = Rollout(task=Task(task_id="t", messages=()), rollout_id="r")
    rollout.trajectories[0].append_context(chat.prompt_ids(messages, EXAMPLE_TOOLS), Origin.prompt)
    for number, (said, answered) in enumerate(conversation):
        after = messages[-1]["role"]
        whole = as_parsed(chat, said, after)
        turn, replies = chat.as_rendered(whole, answered)
        messages += [turn.message(), *replies]
        full = chat.rendered_ids(messages, EXAMPLE_TOOLS)
        sent = list(rollout.trajectories[0].token_ids)
        assert full[: len(sent)] == sent
        end = chat.end_ids(whole, answered, generation_prompt=True)
        spans = chat.suffix(
            whole, answered, completion_ids=end, finish=Finish.stop, generation_prompt=True
        )
        length = sum(len(ids) for _, ids in spans)
        sampled = tuple(full[len(sent) : len(full) - length])
        assert sampled[-len(end) :] == end
        assert sampled[-1] in chat.stop_token_ids or chat.fix.family == "gpt-oss"
        parsed = chat.parse(sampled, EXAMPLE_TOOLS, turn=number, after=after)
        assert [(c.name, c.arguments, c.malformed) for c in parsed.calls] == [
            (c.name, c.arguments, None) for c in turn.calls
        ]
        rollout.trajectories[0].append_sampled(
            Completion(
                token_ids=sampled,
                logprobs=(-1.0,) * len(sampled),
                finish=Finish.stop,
                versions=((0, len(sampled)),),
            ),
            sent,
        )
        for origin, ids in spans:
            rollout.trajectories[0].append_context(ids, origin)
        assert list(rollout.trajectories[0].token_ids) == full
    sampled_total = len(rollout.trajectories[0].token_ids) - sum(
        len(s.token_ids) for s in rollout.trajectories[0].spans if s.origin is not Origin.sampled
    )
    assert sum(rollout.trajectories[0].loss_mask) == sampled_total


WITH_TOOLS = [
    (name, source)
    for name, family in families().items()
    if family.tools
    for source in family.originals or ("gemma3",)
]


@pytest.mark.parametrize(("family", "source"), WITH_TOOLS)
@given(user=texts, conversation=conversations())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_ledger_is_the_full_rendering(
    family: str, source: str, user: str, conversation: Conversation
) -> None:
    check(small(family, source), user, conversation)


@pytest.mark.long
@pytest.mark.parametrize(("family", "source"), WITH_TOOLS)
@given(user=texts, conversation=conversations())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_ledger_of_more_conversations(
    family: str, source: str, user: str, conversation: Conversation
) -> None:
    check(small(family, source), user, conversation)


@pytest.mark.parametrize("family", QWEN)
@given(user=texts, conversation=conversations())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_the_ledger_with_the_real_qwen_tokenizer(
    family: str, user: str, conversation: Conversation
) -> None:
    check(real_qwen(family), user, conversation)


def test_the_real_qwen_tokenizer_is_the_real_one() -> None:
    #                                                The  quick  brown  fox
    assert qwen()("The quick brown fox")["input_ids"] == [785, 3974, 13876, 38835]
    assert qwen().convert_tokens_to_ids("<|im_end|>") == 151645


def test_the_certificate_with_the_real_qwen_tokenizer() -> None:
    certify(real_qwen("qwen3"), EXAMPLE_TOOLS).raise_if_refused()
