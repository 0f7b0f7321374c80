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
    """The request's messages, with the replies to each turn's calls in the order of the calls."""
    tools: bytes
    """Digest of the request's tools."""
    request_hash: HASH
    """hashlib's SHA-256 of the messages, to which the answer is added later."""
    token_ids: array[int]
    """Ids of the whole prompt."""
    session: str
    """Name of the engine's session to sample in: the earlier answer's, or a new one."""
    reused: int = 0
    """Ids at the beginning that come from an earlier answer. 0: all were rendered."""


@dataclass(slots=True)
class Conversations:
    """The turns that a server issued, and the engine's sessions that hold their ids.

    Call `prompt` for each request, and `record` with its answer. A request continues a turn if its
    messages begin with that turn's conversation. It gets the turn's ids, and its session: the name
    under which the engine has these ids in its cache. Several requests may continue one turn, in
    threads too. Only the first gets its session; the others get the ids and a new session, for
    which the engine computes them once more.
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
        # Calls as they were issued: clients write them a little differently.
        messages, _ = self._issued.restore_calls(in_call_order(messages), schemas)
        tools = tools_digest(json.dumps(schemas))
        match = self._issued.match(messages, tools)
        turn = match.turn
        suffix_ids = None if turn is None else self._suffix_ids(turn, match.new_messages)
        if turn is None or suffix_ids is None:
            _, ids = render_prompt(self.chat, messages, schemas)
            return Prompt(
                messages=messages,
                tools=tools,
                request_hash=match.request_hash,
                token_ids=array("q", ids),
                session=secrets.token_hex(8),
            )
        return Prompt(
            messages=messages,
            tools=tools,
            request_hash=match.request_hash,
            token_ids=turn.token_ids + array("q", suffix_ids),
            # A new session if another request has taken the turn's.
            session=self._take_session(turn) or secrets.token_hex(8),
            reused=len(turn.token_ids),
        )

    def _suffix_ids(self, turn: ServedTurn, new_messages: Sequence[Message]) -> list[int] | None:
        """Return the ids that new messages add after a turn, up to the next answer.

        None: the template refuses a role after an answer.
        """
        try:
            _, parts = turn.continuation(self.chat, new_messages, generation_prompt=True)
        except ChatError:
            return None
        return [token_id for _, ids in parts for token_id in ids]  # a part is (origin, ids)

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
