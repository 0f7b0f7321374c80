"""Why an agent's request continues none of the turns that were issued."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from agenttrain.chat.wire.issued_turns import IssuedTurn, Match, canonical_bytes, reasoning_agrees
from agenttrain.chat.wire.normal import HANDLE
from agenttrain.types import Message

T = TypeVar("T", bound=IssuedTurn)
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


class Relation(NamedTuple):
    """How a request relates to the conversations before it."""

    position: int | None
    """Position of the issued turn that it continues, or most likely repeats. None: a new
    conversation."""
    restart: Restart | None = None
    """Why it does not continue that turn. None: it does, or is new."""
    difference: str = ""
    """The first difference from the conversation of that turn."""


def find_relation(messages: Sequence[Message], turns: Sequence[T], match: Match[T]) -> Relation:
    """Return how a request relates to the turns that were issued (`turns`, the oldest first).

    It continues the turn of `match`, begins a new conversation, or repeats an earlier conversation
    with a difference. Examples::

        Relation(2)                                       continues turn 2
        Relation(None)                                    a new conversation
        Relation(2, Restart.edited, "message 1 (user)…")  repeats turn 2's conversation otherwise
    """
    if match.turn is not None:
        return Relation(turns.index(match.turn))
    nearest = _most_likely_turn(messages, turns)
    if nearest is None:
        return Relation(None)
    position = turns.index(nearest)
    if match.other_tools:  # the messages are equal, and only the definitions of the tools differ
        return Relation(position, Restart.tools, "the definitions of the tools")
    return Relation(position, *first_difference(messages, nearest.conversation))


def _most_likely_turn(messages: Sequence[Message], turns: Sequence[T]) -> T | None:
    """Return the turn that a request most likely repeats, or None for a new conversation.

    It is the last turn whose calls, handle or text the request holds, or else the last whose
    conversation begins with the same messages, up to the user's first.
    """
    turn_of_key = {
        key: turn for turn in turns for key in (*turn.call_ids, turn.message.get(HANDLE)) if key
    }
    for message in reversed(messages):
        if message["role"] != "assistant":
            continue
        call_ids = [call["id"] for call in message.get("tool_calls", ())]
        for key in (*call_ids, message.get(HANDLE)):
            if key in turn_of_key:
                return turn_of_key[key]
        # Without calls, and from a client that sends no handle: only the text is left to compare.
        text = message["content"].strip()
        for turn in reversed(turns):
            if text and not turn.call_ids and turn.message["content"].strip() == text:
                return turn
    opening = opening_of(messages)
    for turn in reversed(turns):
        if opening and opening_of(turn.conversation) == opening:
            return turn
    return None


def opening_of(messages: Sequence[Message]) -> list[bytes]:
    """Return the messages up to the user's first, canonical; [] without a user's message."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    return [canonical_bytes(message) for message in messages[: users[0] + 1]] if users else []


def first_difference(sent: Sequence[Message], issued: Sequence[Message]) -> tuple[Restart, str]:
    """Return the kind and a description of the first difference between two conversations.

    `sent` are the messages of an agent's request. `issued` is the earlier conversation that it
    repeats: the messages of an earlier request, and the answer that we gave. They are not equal,
    because a request that repeats a conversation as it is continues it.

    Example: ``(Restart.system, "message 0 (system), character 17: sent '12:01', issued
    '12:00'")``
    """
    pairs = zip(sent, issued, strict=False)
    index = next((i for i, (a, b) in enumerate(pairs) if not _is_same(a, b)), None)
    if index is None:  # the shorter conversation is the beginning of the longer one
        if len(sent) > len(issued):
            return Restart.edited, f"message {len(issued)} was not issued"
        return Restart.dropped, f"{len(issued) - len(sent)} messages that followed are missing"
    sent_message, issued_message = sent[index], issued[index]
    roles = (sent_message["role"], issued_message["role"])
    where = f"message {index} ({issued_message['role']})"
    later_messages = [canonical_bytes(message) for message in issued[index + 1 :]]
    if "system" not in roles and canonical_bytes(sent_message) in later_messages:
        return Restart.dropped, f"{where} is missing"  # a later message stands in its place
    if "system" in roles:
        kind = Restart.system
    elif roles == ("tool", "tool"):
        kind = Restart.tools
    else:
        kind = Restart.edited
    return kind, f"{where}{_text_difference(_as_text(sent_message), _as_text(issued_message))}"


def _is_same(sent: Message, issued: Message) -> bool:
    """Return True if a message is the one that was issued, however it is spelt."""
    return canonical_bytes(sent) == canonical_bytes(issued) and reasoning_agrees((sent,), (issued,))


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
    text = str(message["content"]) + (json.dumps(calls, sort_keys=True) if calls else "")
    reasoning = message.get("reasoning_content")
    return text if reasoning is None else f"{text} (reasoning: {reasoning})"
