"""Answered requests: a request that continues one goes on from the ids that were sampled.

A client sends the messages of a conversation anew each time. Rendering them again would tokenise
the model's own text again, perhaps to other ids than it sampled. The model would see a context that
it never saw in training, and the engine's cache would be lost.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.wire.openai import RequestError, well_formed
from agenttrain.types import AssistantTurn, Finish, Message

MOST_TOKENS = 4_000_000
"""Ids of all remembered conversations together. The oldest conversations are forgotten."""


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One answered request."""

    token_ids: array[int]
    """The prompt's ids and the sampled ones."""
    completion_ids: tuple[int, ...]
    turn: AssistantTurn
    finish: Finish
    call_ids: tuple[str, ...]
    """Ids that the client was given for the well-formed calls."""
    session: str | None
    """The engine's session with these ids in its cache. None: another request took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Ids to continue for a request."""

    token_ids: array[int]
    session: str
    reused: int = 0
    """Ids at the beginning that come from an earlier answer. 0: all were rendered."""


@dataclass(slots=True)
class Conversations:
    """The exchanges of a server, by a digest of tools and messages up to the answer."""

    chat: Chat
    most_tokens: int = MOST_TOKENS
    _exchanges: OrderedDict[str, Exchange] = field(default_factory=OrderedDict)
    _tokens: int = 0
    _taking: Lock = field(default_factory=Lock)

    def prompt(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Prompt:
        """Return the ids for a request's messages.

        If they continue an answered request, these are its ids and the template's suffix. Otherwise
        the messages are rendered. Raises RequestError, and ChatError for messages that the template
        refuses.
        """
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if answers:
            end = answers[-1] + 1
            exchange = self._exchanges.get(_key(messages[:end], schemas))
            reasoning = messages[end - 1].get("reasoning_content")
            if exchange is not None and reasoning in (None, exchange.turn.reasoning):
                # If the template refuses a role behind an answer, all messages are rendered below.
                with suppress(ChatError):
                    suffix = self._suffix(exchange, messages[end:])
                    with self._taking:  # large requests are read in threads
                        session, exchange.session = exchange.session, None
                    return Prompt(
                        token_ids=exchange.token_ids + array("q", suffix),
                        session=session or secrets.token_hex(8),
                        reused=len(exchange.token_ids),
                    )
        ids = self.chat.prompt_ids(messages, schemas, may_omit=("assistant",))
        return Prompt(token_ids=array("q", ids), session=secrets.token_hex(8))

    def record(
        self,
        messages: Sequence[Message],
        schemas: Sequence[dict[str, Any]],
        prompt: Prompt,
        completion_ids: tuple[int, ...],
        finish: Finish,
        turn: AssistantTurn,
        answer: Mapping[str, Any],
        call_ids: Sequence[str],
    ) -> list[str]:
        """Remember an answer as the client will send it. Return the sessions to release."""
        exchange = Exchange(
            token_ids=prompt.token_ids + array("q", completion_ids),
            completion_ids=completion_ids,
            turn=turn,
            finish=finish,
            call_ids=tuple(call_ids),
            session=prompt.session,
        )
        key = _key([*messages, answer], schemas)
        forgotten = [self._exchanges.pop(key)] if key in self._exchanges else []
        self._exchanges[key] = exchange
        self._tokens += len(exchange.token_ids)
        self._tokens -= sum(len(exchange.token_ids) for exchange in forgotten)
        while self._tokens > self.most_tokens and len(self._exchanges) > 1:
            _, oldest = self._exchanges.popitem(last=False)
            self._tokens -= len(oldest.token_ids)
            forgotten.append(oldest)
        return [exchange.session for exchange in forgotten if exchange.session is not None]

    def _suffix(self, exchange: Exchange, messages: Sequence[Message]) -> list[int]:
        """Return the ids that follow an answer: the replies to its calls, then other messages."""
        calls = well_formed(exchange.turn)
        tool_messages = [message for message in messages if message["role"] == "tool"]
        by_id = {message["tool_call_id"]: message for message in tool_messages}
        if set(by_id) != set(exchange.call_ids) or len(tool_messages) != len(by_id):
            raise RequestError(
                f"messages: the assistant made the calls {', '.join(exchange.call_ids) or 'none'}, "
                "and each needs exactly one tool message behind it",
                param="messages",
            )
        contents = {
            call.id: by_id[call_id]["content"]
            for call, call_id in zip(calls, exchange.call_ids, strict=True)
        }
        replies: list[Message] = [
            {
                "role": "tool",
                "tool_call_id": call.id,
                "name": call.name,
                # The client never saw a malformed call as one, and the template shows a reply each.
                "content": contents.get(call.id, call.malformed_reply),
            }
            for call in exchange.turn.calls
        ]
        replies += [dict(message) for message in messages if message["role"] != "tool"]
        suffix = self.chat.suffix(
            exchange.turn,
            replies,
            completion_ids=exchange.completion_ids,
            finish=exchange.finish,
            generation_prompt=True,
        )
        return [token_id for _, ids in suffix for token_id in ids]


def _key(messages: Sequence[Mapping[str, Any]], schemas: Sequence[dict[str, Any]]) -> str:
    """Return a digest of tools and messages that is the same for all spellings of a conversation.

    Reasoning is left out, because most clients do not send it back.
    """
    tools = sorted(json.dumps(schema, sort_keys=True) for schema in schemas)
    parts = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            calls.append([call["id"], call["function"]["name"], arguments])
        content = (message.get("content") or "").strip()
        parts.append([message["role"], content, calls, message.get("tool_call_id")])
    text = json.dumps([tools, parts], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()
