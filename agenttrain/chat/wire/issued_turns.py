"""Requests matched with the turns that were issued, message by message.

A client sends its conversation anew with every request. Its turns from us are recognised, so that
the ids that were sampled go on. Nothing is rendered and tokenised again::

    issued     [system, user] -> A            [system, user, A, tool 7] -> B
    sent       system, user, A, tool 7        the last turn is A, and goes on
    sent       system*, user, A, tool 7       A stands behind another system message: a restart
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any

from agenttrain.chat.wire.normal import HANDLE
from agenttrain.chat.wire.openai import RequestError
from agenttrain.types import AssistantTurn, Completion, Message

QUOTED = 60
"""Characters of a difference that are shown, from its beginning."""


class Restart(StrEnum):
    """Why a request does not continue the turns that it holds."""

    system = "system"
    """Its system message is another one."""
    tools = "tools"
    """Its tools, or the text of a tool, are others."""
    edited = "edited"
    """A message of the user or the model was changed."""
    dropped = "dropped"
    """Messages are missing, or a turn is sampled a second time."""


@dataclass(slots=True, eq=False, kw_only=True)
class IssuedTurn:
    """A turn that a client was given."""

    trajectory: int
    """Index of its trajectory in the rollout."""
    index: int
    """Its number among the turns of the trajectory."""
    end: int
    """Position behind its last sampled token in the trajectory."""
    message_count: int
    """Messages of the trajectory up to and with it."""
    turn: AssistantTurn
    completion: Completion
    call_ids: tuple[str, ...]
    """Ids that the client was given, one for each call. "" for a call that was part of the text."""
    conversation: tuple[Message, ...]
    """Messages of the request, and the answer as it was issued."""
    tools: bytes
    """Digest of the request's tools."""
    request_digest: bytes
    """Digest of the messages of the request."""

    @property
    def message(self) -> Message:
        """The answer as it was issued."""
        return self.conversation[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How a request relates to the turns that were issued."""

    turn: IssuedTurn | None = None
    """The turn that the request continues. None: it has to be rendered."""
    new_messages: tuple[Message, ...] = ()
    """Messages of the request behind that turn."""
    ambiguous: bool = False
    """Several turns match, and this is the newest."""
    restart: Restart | None = None
    """None: it continues a turn, or has none of ours."""
    difference: str = ""
    """The first difference from what was issued."""
    digest: bytes = b""
    """Digest of the request's messages."""


@dataclass(slots=True)
class IssuedTurns:
    """The turns issued in one rollout."""

    turns: list[IssuedTurn] = field(default_factory=list)
    _by_digest: dict[bytes, list[IssuedTurn]] = field(default_factory=dict)
    _by_name: dict[str, IssuedTurn] = field(default_factory=dict)
    """Id of a call, or handle -> its turn."""

    def add(self, turn: IssuedTurn) -> None:
        """Remember an issued turn."""
        self.turns.append(turn)
        digest = _extend(turn.request_digest, turn.message)
        self._by_digest.setdefault(digest, []).append(turn)
        for name in (*turn.call_ids, turn.message.get(HANDLE)):
            if name:
                self._by_name[name] = turn

    def match(self, messages: Sequence[Message], tools: bytes) -> Match:
        """Find the turn that a request continues. `messages` are `in_call_order`."""
        digests = _digests(messages)
        digest = digests[-1]
        # From the last answer of the request back to the first: which one did we issue?
        is_ambiguous, last_turn, index = False, None, -1
        for index in range(len(messages) - 1, -1, -1):
            if messages[index]["role"] != "assistant":
                continue
            candidates = [
                turn
                for turn in self._by_digest.get(digests[index], ())
                if _reasoning_agrees(messages[: index + 1], turn.conversation)
            ]
            same_tools = [turn for turn in candidates if turn.tools == tools]
            if candidates:
                last_turn, is_ambiguous = (same_tools or candidates)[-1], len(same_tools) > 1
                break
        new_messages = tuple(messages[index + 1 :])
        # An answer behind our last turn is not ours, so that the request does not continue it.
        has_foreign_answer = any(message["role"] == "assistant" for message in new_messages)
        if last_turn is not None and not has_foreign_answer:
            if last_turn.tools != tools:
                text = "the definitions of the tools"
                return Match(restart=Restart.tools, difference=text, digest=digest)
            return Match(
                turn=last_turn, new_messages=new_messages, ambiguous=is_ambiguous, digest=digest
            )
        nearest = self._nearest(messages)
        if nearest is None:
            return Match(digest=digest)
        restart, difference = first_difference(messages, nearest.conversation)
        return Match(restart=restart, difference=difference, digest=digest)

    def _nearest(self, messages: Sequence[Message]) -> IssuedTurn | None:
        """Return the turn that a request most likely goes back to. None: a new conversation.

        That is the last turn whose calls, handle or text the request holds. Otherwise it is one
        whose conversation begins with the same messages up to the first of the user.
        """
        for message in reversed(messages):
            if message["role"] != "assistant":
                continue
            names = [call["id"] for call in message.get("tool_calls", ())]
            for name in (*names, message.get(HANDLE)):
                if name in self._by_name:
                    return self._by_name[name]
            text = message["content"].strip()
            for turn in reversed(self.turns):
                if text and not turn.call_ids and turn.message["content"].strip() == text:
                    return turn
        opening = opening_of(messages)
        for turn in reversed(self.turns):
            if opening and opening_of(turn.conversation) == opening:
                return turn
        return None

    def begins_alike(self, messages: Sequence[Message]) -> bool:
        """Return True if a conversation begins like the first that was issued."""
        return not self.turns or opening_of(messages) == opening_of(self.turns[0].conversation)


def opening_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the messages up to the first of the user, or none if there is no such message."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return [_canonical(message) for message in messages[: users[0] + 1]] if users else []


def tools_digest(schemas: Sequence[Mapping[str, Any]]) -> bytes:
    """Return a digest of tools that is the same in any order of them."""
    return _tools_digest(json.dumps(schemas))


@lru_cache(maxsize=1024)
def _tools_digest(schemas: str) -> bytes:
    """Return the digest of tools, given as JSON: clients send the same ones with each request."""
    texts = sorted(_json(_without_nulls(schema)) for schema in json.loads(schemas))
    return hashlib.sha256("\n".join(texts).encode("utf-8", "surrogatepass")).digest()


def in_call_order(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with the replies to each turn's calls in the order of the calls.

    Raises RequestError unless each call of an assistant message has exactly one reply right behind
    it, and each reply has a call.
    """
    result: list[Message] = []
    index = 0
    while index < len(messages):
        message = messages[index]
        index += 1
        if message["role"] == "tool":
            raise RequestError(
                f"messages: the tool message for {message['tool_call_id']} has no place here; it "
                "follows the assistant message with its call",
                param="messages",
            )
        result.append(message)
        if message["role"] != "assistant":
            continue
        replies: dict[str, Message] = {}
        call_ids = [call["id"] for call in message.get("tool_calls", ())]
        while index < len(messages) and messages[index]["role"] == "tool":
            call_id = messages[index]["tool_call_id"]
            if call_id in replies or call_id not in call_ids:
                raise RequestError(
                    f"messages: the tool message for {call_id} is there twice, or has no call in "
                    "the assistant message before it",
                    param="messages",
                )
            replies[call_id] = messages[index]
            index += 1
        unanswered = [call_id for call_id in call_ids if call_id not in replies]
        if unanswered or len(set(call_ids)) != len(call_ids):
            raise RequestError(
                f"messages: the assistant made the calls {', '.join(call_ids)}, and each needs "
                f"exactly one tool message behind it; {', '.join(unanswered) or 'an id'} has "
                f"{'none' if unanswered else 'two calls'}",
                param="messages",
            )
        result += [replies[call_id] for call_id in call_ids]
    return result


def first_difference(sent: Sequence[Message], issued: Sequence[Message]) -> tuple[Restart, str]:
    """Return the kind and a description of the first message in which a request differs.

    Example: ``(Restart.system, "message 0 (system), character 17: sent '12:01', issued
    '12:00'")``
    """
    pairs = zip(sent, issued, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if not _is_same(a, b)), None)
    if index is None:
        if len(sent) > len(issued):
            return Restart.edited, f"message {len(issued)} was not issued"
        return Restart.dropped, f"{len(issued) - len(sent)} messages that followed are missing"
    sent_message, issued_message = sent[index], issued[index]
    roles = (sent_message["role"], issued_message["role"])
    where = f"message {index} ({issued_message['role']})"
    if "system" in roles:
        kind = Restart.system
    elif _canonical(sent_message) in map(_canonical, issued[index + 1 :]):
        return Restart.dropped, f"{where} is missing"
    elif roles == ("tool", "tool"):
        kind = Restart.tools
    else:
        kind = Restart.edited
    return kind, f"{where}{_text_difference(_as_text(sent_message), _as_text(issued_message))}"


def _is_same(sent: Message, issued: Message) -> bool:
    """Return True if a message is the one that was issued, however it is spelt."""
    return _canonical(sent) == _canonical(issued) and _reasoning_agrees((sent,), (issued,))


def _text_difference(sent: str, issued: str) -> str:
    """Return where two texts begin to differ, as the end of a sentence."""
    pairs = zip(sent, issued, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(sent), len(issued)))
    return (
        f", character {index}: sent {sent[index:][:QUOTED]!r}, issued {issued[index:][:QUOTED]!r}"
    )


def _as_text(message: Message) -> str:
    """Return a message's content, calls and reasoning as one text, for a person to read."""
    calls = [call["function"] for call in message.get("tool_calls", ())]
    text = str(message["content"]) + (_json(calls) if calls else "")
    reasoning = message.get("reasoning_content")
    return text if reasoning is None else f"{text} (reasoning: {reasoning})"


def _reasoning_agrees(sent: Sequence[Message], issued: Sequence[Message]) -> bool:
    """Return True if reasoning and handles that were sent are those that were issued."""
    return all(
        message.get(key) in (None, issued[index].get(key))  # most clients send no reasoning
        for index, message in enumerate(sent)
        if message["role"] == "assistant"
        for key in ("reasoning_content", HANDLE)
    )


def _digests(messages: Sequence[Message]) -> list[bytes]:
    """Return for each message a digest of the messages up to and with it."""
    digests, digest = [], b""
    for message in messages:
        digest = _extend(digest, message)
        digests.append(digest)
    return digests


def _extend(digest: bytes, message: Message) -> bytes:
    """Return the digest of the messages of `digest` and one more message."""
    return hashlib.sha256(digest + _canonical(message)).digest()


def _canonical(message: Message) -> bytes:
    """Return a message without reasoning, in a form that is the same for all its spellings."""
    content = str(message["content"])
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        text = function.get("text")
        arguments = _whole_numbers(function["arguments"]) if text is None else {"text": text}
        calls.append([call["id"], function["name"], text is None, arguments])
    if message["role"] == "assistant":
        content = content.strip()
    parts = [message["role"], content, calls, message.get("tool_call_id")]
    return _json(parts).encode("utf-8", "surrogatepass")


def _whole_numbers(value: Any) -> Any:
    """Return a JSON value in which 3.0 is 3, as some languages write it."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def _without_nulls(value: Any) -> Any:
    """Return a JSON value without the keys whose value is null, which some clients leave out."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(v) for key, v in value.items() if v is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


_json = json.JSONEncoder(sort_keys=True).encode


def text_ids(ids: Sequence[int]) -> str:
    """Return a digest of token ids."""
    return hashlib.sha256(array("q", ids).tobytes()).hexdigest()
