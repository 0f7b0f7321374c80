"""Served conversations: a request that continues one goes on from the ids that were sampled.

A client sends the messages of a conversation anew each time. Rendering them again would tokenise
the model's own text again, perhaps to other ids than it sampled. The model would see a context that
it never saw in training, and the engine's cache would be lost.
"""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.chat.wire.issued_turns import (
    IssuedTurn,
    IssuedTurns,
    in_call_order,
    render_prompt,
    tools_digest,
)
from agenttrain.types import AssistantTurn, Finish, Message

if TYPE_CHECKING:
    from _hashlib import HASH

MAX_TOKENS = 4_000_000
"""Most ids of all remembered conversations together. The oldest conversations are forgotten."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedTurn(IssuedTurn):
    """A turn that `serve` has sent to a client, with the ids of its conversation."""

    token_ids: array[int]
    """The prompt's ids and the sampled ones."""
    session: str | None
    """The engine's session with these ids in its cache. None: another request took it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Ids to continue for a request."""

    messages: list[Message]
    """The request's, in the order of the calls."""
    tools: bytes
    """Digest of the request's tools."""
    request_hash: HASH
    """SHA-256 of its messages, as `Match.request_hash`."""
    token_ids: array[int]
    session: str
    """Name of the engine's session to sample in: the earlier answer's, or a new one."""
    reused: int = 0
    """Ids at the beginning that come from an earlier answer. 0: all were rendered."""


@dataclass(slots=True)
class Conversations:
    """The turns that a server issued, and the engine's sessions that hold their ids.

    Call `prompt` for each request, and `record` with its answer. Requests are read in threads too,
    and several may continue one turn: only the first gets its session.
    """

    chat: Chat
    max_tokens: int = MAX_TOKENS
    """Ids that all turns may hold together; beyond it the oldest turns are forgotten."""
    _issued: IssuedTurns[ServedTurn] = field(default_factory=IssuedTurns)
    _tokens: int = 0
    """Ids that all turns hold now."""
    _session_lock: Lock = field(default_factory=Lock)

    def prompt(self, messages: Sequence[Message], schemas: Sequence[dict[str, Any]]) -> Prompt:
        """Return the prompt of a request's messages. Raises RequestError and ChatError.

        Messages that continue an issued turn get the turn's ids and the template's suffix. Others
        are rendered.
        """
        messages, _respelled = self._issued.restore_calls(in_call_order(messages), schemas)
        tools = tools_digest(json.dumps(schemas))
        match = self._issued.match(messages, tools)
        if (turn := match.turn) is not None:
            # If the template refuses a role after an answer, all messages are rendered below.
            with suppress(ChatError):
                _replies, suffix = turn.continuation(
                    self.chat, match.new_messages, generation_prompt=True
                )
                return Prompt(
                    messages=messages,
                    tools=tools,
                    request_hash=match.request_hash,
                    token_ids=turn.token_ids + array("q", [i for _, ids in suffix for i in ids]),
                    session=self._take_session(turn) or secrets.token_hex(8),
                    reused=len(turn.token_ids),
                )
        _shown, ids = render_prompt(self.chat, messages, schemas)
        return Prompt(
            messages=messages,
            tools=tools,
            request_hash=match.request_hash,
            token_ids=array("q", ids),
            session=secrets.token_hex(8),
        )

    def record(
        self,
        prompt: Prompt,
        completion_ids: tuple[int, ...],
        finish: Finish,
        turn: AssistantTurn,
        message: Message,
        call_ids: tuple[str, ...],
    ) -> list[str]:
        """Remember an answer as the client will send it. Return the sessions to release."""
        issued = ServedTurn(
            turn=turn,
            completion_ids=completion_ids,
            finish=finish,
            call_ids=call_ids,
            conversation=(*prompt.messages, message),
            tools=prompt.tools,
            request_hash=prompt.request_hash,
            token_ids=prompt.token_ids + array("q", completion_ids),
            session=prompt.session,
        )
        # Of answers that a client cannot tell apart, the newest is kept.
        sessions = [self._forget(twin) for twin in self._issued.twins(issued)]
        self._issued.add(issued)
        self._tokens += len(issued.token_ids)
        while self._tokens > self.max_tokens and len(self._issued.turns) > 1:
            sessions.append(self._forget(self._issued.turns[0]))
        return [session for session in sessions if session is not None]

    def find_issued(self, key: str) -> Message | None:
        """Return the answer that was issued with a handle or the id of a call, or None."""
        return self._issued.find_message(key)

    def _forget(self, turn: ServedTurn) -> str | None:
        """Forget a turn, and return its session."""
        self._issued.forget(turn)
        self._tokens -= len(turn.token_ids)
        return self._take_session(turn)

    def _take_session(self, turn: ServedTurn) -> str | None:
        """Return a turn's session and take it from the turn: one request alone goes on with it."""
        with self._session_lock:  # large requests are read in threads
            session, turn.session = turn.session, None
        return session
