"""Mistral's later revisions against mistral_common's own ids: v11, v13, and v13 with thinking.

No tokenizer of theirs is in the package: the one that is, v3, is given their control tokens, and
cut to a vocabulary that loads in a second. Both sides read the same file.
"""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mistral_common.protocol.instruct.chunk import TextChunk, ThinkChunk
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.normalize import get_normalizer
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, Tool
from mistral_common.tokens.tokenizers.base import TokenizerVersion
from mistral_common.tokens.tokenizers.instruct import InstructTokenizerV11, InstructTokenizerV13
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from test_families_mistral import ARGUMENTS, IDS, REPLIES, SCHEMA, prompt, tekken, theirs
from transformers.integrations.mistral import convert_tekken_tokenizer

from agenttrain.chat.certificate import certify
from agenttrain.chat.chat import Chat
from agenttrain.chat.config import ChatTemplateConfig, ResponseSchemaConfig
from agenttrain.chat.loading import load_chat
from agenttrain.commands.templates import original
from agenttrain.types import Finish, Message

REVISIONS = ("v11", "v13", "v13:thinking")
ENCODERS = {"v11": InstructTokenizerV11, "v13": InstructTokenizerV13}
ADDED = {32: "[ARGS]", 33: "[CALL_ID]", 34: "[THINK]", 35: "[/THINK]"}
SPECIAL, WORDS = 1000, 20_000


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tokenizer's file by version."""
    known = Tekkenizer.from_file(tekken())
    names = [ADDED.get(rank, known.id_to_piece(rank)) for rank in range(SPECIAL)]
    found = json.loads(tekken().read_text(encoding="utf-8"))
    found["vocab"] = found["vocab"][:WORDS]
    found["config"] |= {"num_vocab_tokens": WORDS, "default_vocab_size": WORDS + SPECIAL}
    found["special_tokens"] = [
        {"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)
    ]
    folder = tmp_path_factory.mktemp("tekken")
    for version in ENCODERS:
        found["config"]["version"] = version
        (folder / f"{version}.json").write_text(json.dumps(found), encoding="utf-8")
    return {version: folder / f"{version}.json" for version in ENCODERS}


@cache
def converted(path: Path) -> Any:
    return convert_tekken_tokenizer(str(path))


def chat(files: dict[str, Path], revision: str) -> Chat:
    tokenizer = copy.copy(converted(files["v13"]))
    tokenizer.chat_template = original(f"mistral_common:{revision}")
    return load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig())


def reference(files: dict[str, Path], revision: str, messages: list[Any]) -> list[int]:
    """mistral_common's ids."""
    version = revision.partition(":")[0]
    normalizer = get_normalizer(TokenizerVersion(version))
    tool = Tool(function=Function(**SCHEMA["function"]))
    request = ChatCompletionRequest(messages=messages, tools=[tool])
    encoder = ENCODERS[version](Tekkenizer.from_file(files[version]))
    return encoder.encode_instruct(normalizer.from_chat_completion_request(request)).tokens


def written(revision: str) -> str:
    """Two calls as the model writes them."""
    ids = [f"[CALL_ID]{i}" if revision == "v11" else "" for i in IDS]
    calls = zip(ids, ARGUMENTS, strict=True)
    return "".join(f"[TOOL_CALLS]add{i}[ARGS]{json.dumps(a)}" for i, a in calls) + "</s>"


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("revision", REVISIONS)
def test_the_prompt_is_mistral_commons(files: dict[str, Path], revision: str, system: bool) -> None:
    ours = chat(files, revision).prompt_ids(prompt(system), [SCHEMA])
    assert ours == reference(files, revision, theirs(replied=False, system=system))


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_turn_with_two_calls_is_mistral_commons(files: dict[str, Path], revision: str) -> None:
    subject = chat(files, revision)
    sampled = subject.encoder.encode(written(revision))
    turn = subject.parse(sampled, [SCHEMA], turn=0)
    assert [(call.name, call.arguments) for call in turn.calls] == [("add", a) for a in ARGUMENTS]
    if revision == "v11":
        assert [call.id for call in turn.calls] == list(IDS)
    replies: list[Message] = [
        {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        for call, text in zip(turn.calls, REPLIES, strict=True)
    ]
    spans = subject.suffix(
        turn, replies, completion_ids=sampled, finish=Finish.stop, generation_prompt=True
    )
    ledger = [*subject.prompt_ids(prompt(False), [SCHEMA]), *sampled]
    ledger += [token for _, ids in spans for token in ids]
    assert ledger == reference(files, revision, theirs(replied=True, system=False))


def test_thinking_is_mistral_commons(files: dict[str, Path]) -> None:
    subject = chat(files, "v13:thinking")
    sampled = subject.encoder.encode("[THINK]3 and 4[/THINK]It is 7.</s>")
    turn = subject.parse(sampled, [SCHEMA], turn=0)
    assert (turn.reasoning, turn.content) == ("3 and 4", "It is 7.")
    question: Message = {"role": "user", "content": "And 5 + 6?"}
    spans = subject.suffix(
        turn, [question], completion_ids=sampled, finish=Finish.stop, generation_prompt=True
    )
    ledger = [*subject.prompt_ids(prompt(False), [SCHEMA]), *sampled]
    ledger += [token for _, ids in spans for token in ids]
    chunks = [ThinkChunk(thinking="3 and 4"), TextChunk(text="It is 7.")]
    said = [AssistantMessage(content=chunks), UserMessage(content="And 5 + 6?")]
    expected = reference(files, "v13:thinking", [*theirs(replied=False, system=False), *said])
    assert ledger == expected
    rendered = subject.prompt_ids([*prompt(False), turn.message(), question], [SCHEMA])
    assert rendered == expected


@pytest.mark.parametrize("revision", REVISIONS)
def test_the_certificate(files: dict[str, Path], revision: str) -> None:
    certify(chat(files, revision), [SCHEMA]).raise_if_refused()
