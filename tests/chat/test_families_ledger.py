"""The ledger of every family over random conversations, with small and with real tokenizers."""

from __future__ import annotations

import pytest
from family_chats import QWEN, Conversation, conversations, real_qwen, small, texts
from hypothesis import given, settings
from qwen_tokenizer import qwen

from agenttrain.chat.certificate import as_parsed, certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.fixes import families
from agenttrain.commands.templates import EXAMPLE_TOOLS
from agenttrain.types import (
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    Task,
)


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
