"""What transformers' parser reads in completions by the `response_template` of checkpoints."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.demonstrations import completion_ids
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.fixes import families
from agenttrain.chat.loading import load_chat
from agenttrain.chat.parsers.export import response_template
from agenttrain.chat.parsers.marked import MarkedSpec
from agenttrain.commands.templates import EXAMPLE_TOOLS, original, small_tokenizer
from agenttrain.types import AssistantTurn, Message, ToolCall

ORIGINALS = [(name, source) for name, f in families().items() for source in f.originals]
UNREADABLE = {"lfm2", "lfm2.5"}
"""Calls as Python writes them: no parser of transformers reads these."""
SEARCH = {
    "query": "a\n{b} \"c\" </x> 'd'",
    "exact": True,
    "fields": ["x", 1],
    "options": {"k": "v"},
}
ADD = {"a": 3, "b": 2.5}
USER: Message = {"role": "user", "content": "3 + 4?"}


def loaded(tokenizer: Any, name: str = "auto", schema: str = "auto") -> Chat:
    return load_chat(tokenizer, ChatTemplateConfig(name=name), ResponseSchemaConfig(name=schema))


@cache
def chat_of(family: str, source: str) -> Chat:
    tokenizer = copy.copy(small_tokenizer(families()[family]))
    tokenizer.chat_template = original(source)
    return loaded(tokenizer)


def conversations(chat: Chat) -> list[tuple[list[Message], AssistantTurn]]:
    """Prompts, and turns of every kind that the chat template renders after them."""
    add, search = (
        ToolCall(id=f"call_0_{index}", name=name, arguments=arguments)
        for index, (name, arguments) in enumerate((("add", ADD), ("search", SEARCH)))
    )
    answers = [
        ([USER], AssistantTurn(content="It is 7.\n\nBy addition.", reasoning=None, calls=())),
        ([USER], AssistantTurn(content="It is 7.", reasoning="3 and\n4", calls=())),
    ]
    if not chat.renders_calls:
        return answers
    several = ((add,), (search,), (search, add))[: 2 if chat.one_call_per_turn else 3]
    called = AssistantTurn(content="", reasoning=None, calls=(add,)).message()
    reply: Message = {"role": "tool", "tool_call_id": add.id, "name": "add", "content": "7"}
    return [
        *answers,
        *(([USER, called, reply], answer) for _, answer in answers),
        *(
            (messages, AssistantTurn(content=content, reasoning=reasoning, calls=calls))
            for calls in several
            for messages in ([USER], [USER, called, reply])
            for content, reasoning in (("", None), ("Let me see.", None), ("", "I may call"))
        ),
    ]


@pytest.mark.parametrize(("family", "source"), ORIGINALS)
def test_transformers_reads_what_our_parser_reads(family: str, source: str, tmp_path: Path) -> None:
    chat = chat_of(family, source)
    template = response_template(chat)
    if family in UNREADABLE:
        assert template is None
        assert any("parse_response" in text for text in certify(chat, EXAMPLE_TOOLS).warnings)
        return
    tokenizer = copy.copy(chat.tokenizer)
    tokenizer.response_template = template
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tools = list(EXAMPLE_TOOLS)
    read = 0
    for messages, turn in conversations(chat):
        try:
            ids = completion_ids(chat, messages, tools, turn)
        except ChatError:  # not every template writes every turn
            continue
        ours = chat.parse(ids, tools, turn=0, after=messages[-1]["role"])
        prefix = chat.prompt_ids(messages, tools)
        message = tokenizer.parse_response(ids, prefix=prefix, tools=tools)
        assert message.get("content", "") == ours.content
        assert message.get("reasoning_content") == (ours.reasoning or None)
        functions = [call["function"] for call in message.get("tool_calls", ())]
        found = [(function["name"], function["arguments"]) for function in functions]
        assert found == [(call.name, call.arguments) for call in ours.calls]
        assert [call.name for call in ours.calls] == [call.name for call in turn.calls]
        read += 1
    assert read >= (12 if families()[family].tools else 2)


@pytest.mark.parametrize("family", ["qwen3", "glm-4-moe", "mistral", "gpt-oss", "llama3.2"])
def test_a_checkpoint_is_read_by_the_format_that_it_was_trained_with(
    family: str, tmp_path: Path
) -> None:
    trained = chat_of(family, families()[family].originals[0])
    tokenizer = copy.copy(trained.tokenizer)
    tokenizer.chat_template = trained.saved_template
    tokenizer.response_template = response_template(trained)
    tokenizer.save_pretrained(tmp_path)
    again = loaded(AutoTokenizer.from_pretrained(tmp_path))
    assert again.response == trained.response
    assert response_template(again) == tokenizer.response_template


def test_what_a_model_carries_is_kept_and_what_the_user_chose_takes_its_place() -> None:
    tokenizer = copy.copy(small_tokenizer(families()["qwen3"]))
    tokenizer.chat_template = original("qwen3")
    carried = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close": "<|im_end|>"},
        },
    }
    tokenizer.response_template = carried
    assert response_template(loaded(tokenizer)) == carried
    chosen = loaded(tokenizer, schema="qwen")
    assert isinstance(chosen.response, MarkedSpec)
    assert response_template(chosen) == response_template(chat_of("qwen3", "qwen3"))
