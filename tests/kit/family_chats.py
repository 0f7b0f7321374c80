"""Chats of every family, and random conversations for them."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from hypothesis import strategies as st
from qwen_tokenizer import qwen

from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.fixes import families
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import original, small_tokenizer
from agenttrain.types import AssistantTurn, Message, ToolCall

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
