"""Mistral: the fixed templates against mistral_common's own encodings, with the real tokenizer."""

from __future__ import annotations

import copy
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from mistral_common.protocol.instruct.messages import (
    AssistantMessage,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from mistral_common.protocol.instruct.normalize import (
    InstructRequestNormalizer,
    InstructRequestNormalizerV7,
)
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool
from mistral_common.protocol.instruct.tool_calls import ToolCall as MistralCall
from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV3, InstructTokenizerV7
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from transformers.integrations.mistral import convert_tekken_tokenizer

from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import original
from agenttrain.types import Finish, Message, Origin

VERSIONS = ("v3", "v7")
SCHEMA = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}
IDS = ("abcdefgh1", "abcdefgh2")
ARGUMENTS = ({"a": 3, "b": 4}, {"a": 5, "b": 6})
REPLIES = ("seven", "é 11")


def tekken() -> Path:
    found = find_spec("mistral_common")
    assert found is not None, "pip install 'agenttrain[test]'"
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "data" / "tekken_240911.json"


@cache
def converted() -> Any:
    return convert_tekken_tokenizer(str(tekken()))


@cache
def chat(version: str) -> Chat:
    tokenizer = copy.copy(converted())
    if version != "v3":  # which is what the conversion gives, with image support
        tokenizer.chat_template = original(f"mistral_common:{version}")
    return load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())


@cache
def tekkenizer() -> Tekkenizer:
    return Tekkenizer.from_file(tekken())


def reference(version: str, messages: list[Any]) -> list[int]:
    """mistral_common's ids."""
    tokenizer = tekkenizer()
    instruct, normalizer = (
        (InstructTokenizerV3(tokenizer), InstructRequestNormalizer.normalizer())
        if version == "v3"
        else (InstructTokenizerV7(tokenizer), InstructRequestNormalizerV7.normalizer())
    )
    function = SCHEMA["function"]
    request = ChatCompletionRequest(messages=messages, tools=[Tool(function=Function(**function))])
    normal = normalizer.from_chat_completion_request(request)
    return instruct.encode_instruct(normal).tokens


def theirs(*, replied: bool, system: bool) -> list[Any]:
    messages: list[Any] = [SystemMessage(content="Be brief.")] if system else []
    messages.append(UserMessage(content="What is 3 + 4, and 5 + 6? 東京"))
    if replied:
        calls = [
            MistralCall(id=i, function=FunctionCall(name="add", arguments=json.dumps(a)))
            for i, a in zip(IDS, ARGUMENTS, strict=True)
        ]
        messages.append(AssistantMessage(content=None, tool_calls=calls))
        for call_id, text in zip(IDS, REPLIES, strict=True):
            messages.append(ToolMessage(tool_call_id=call_id, name="add", content=text))
    return messages


def prompt(system: bool) -> list[Message]:
    first: list[Message] = [{"role": "system", "content": "Be brief."}] if system else []
    return [*first, {"role": "user", "content": "What is 3 + 4, and 5 + 6? 東京"}]


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("version", VERSIONS)
def test_the_prompt_is_mistral_commons(version: str, system: bool) -> None:
    ours = chat(version).prompt_ids(prompt(system), [SCHEMA])
    assert ours == reference(version, theirs(replied=False, system=system))


@pytest.mark.parametrize("version", VERSIONS)
def test_a_turn_with_two_calls_is_mistral_commons(version: str) -> None:
    subject = chat(version)
    ours = subject.prompt_ids(prompt(False), [SCHEMA])
    calls = [{"name": "add", "arguments": a, "id": i} for i, a in zip(IDS, ARGUMENTS, strict=True)]
    # The model writes [TOOL_CALLS] and </s> as tokens.
    text = json.dumps(calls, ensure_ascii=False)
    sampled = subject.encoder.encode(f"[TOOL_CALLS]{text}</s>")
    turn = subject.parse(sampled, [SCHEMA], turn=0)
    assert [(c.id, c.name, c.arguments) for c in turn.calls] == [
        (i, "add", a) for i, a in zip(IDS, ARGUMENTS, strict=True)
    ]
    replies: list[Message] = [
        {"role": "tool", "tool_call_id": c.id, "name": c.name, "content": t}
        for c, t in zip(turn.calls, REPLIES, strict=True)
    ]
    spans = subject.suffix(
        turn, replies, completion_ids=sampled, finish=Finish.stop, generation_prompt=True
    )
    ledger = [*ours, *sampled, *(token for _, ids in spans for token in ids)]
    assert ledger == reference(version, theirs(replied=True, system=False))
    shown = [subject.decode(ids) for origin, ids in spans if origin is Origin.tool]
    assert [text.strip('"') for text in shown] == list(REPLIES)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_certificate(version: str) -> None:
    certificate = certify(chat(version), [SCHEMA])
    certificate.raise_if_refused()
    assert certificate.changes[0] == "tools stay at the first user message"


def test_ids_of_ours_become_nine_letters_and_digits() -> None:
    messages: list[Message] = [
        *prompt(False),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "call_0_0",
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": 3}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_0_0", "name": "add", "content": "7"},
    ]
    text = chat("v7").decode(chat("v7").prompt_ids(messages, [SCHEMA]))
    written, answered = text.split('"id": "')[1][:9], text.split("[TOOL_RESULTS]")[1][:9]
    assert written == answered
    assert written.isalnum()
