"""The endpoint's HTTP front: the routes of OpenAI and Anthropic for each rollout in flight.

``/{rollout}/v1/chat/completions``, ``/{rollout}/v1/responses``, ``/{rollout}/v1/messages``,
``/{rollout}/v1/models``, all of them without ``/v1`` too, because clients disagree on what a base
URL is; and ``/{rollout}/reward`` and ``/{rollout}/finish``. Each rollout has a name and a key that
cannot be guessed, so that none reaches another.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from agenttrain.agents.attempt import EndpointRollout
from agenttrain.agents.replays import Delivery, Replays
from agenttrain.chat.wire.dialects import DIALECTS, WireDialect
from agenttrain.chat.wire.events import to_json
from agenttrain.chat.wire.fields import quote
from agenttrain.chat.wire.http import (
    ANSWERED_ERRORS,
    KEEP_ALIVE,
    KEPT_ALIVE_S,
    call_in_thread_if_large,
    read_body,
    request_error,
    send_text,
    start_response,
    unknown_route,
    wait_until_disconnected,
)
from agenttrain.chat.wire.normal import Answer, AnswerHead, Question, find_none
from agenttrain.chat.wire.openai import RequestError, read_object
from agenttrain.rewards.function import MAX_REWARD
from agenttrain.types import Message

ON_RESET = "agenttrain.on_reset"
"""Key of a request's scope. `AnswerResponse` puts a function there, which `EndpointProtocol` calls
if the client resets the connection after the answer was written."""
LOST_S = 10.0
"""Seconds after which a client that went away before its answer, and did not ask again, is gone."""


@dataclass(slots=True, eq=False, kw_only=True)
class OpenRollout:
    """A rollout in flight, with its address and key.

    `Agents` makes it. Each request to it calls `on_request`, and one for a completion
    `start_timer_if_lost` once its connection is done.
    """

    rollout: EndpointRollout
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    name: str = field(default_factory=lambda: secrets.token_hex(12))
    """Part of its address."""
    replays: Replays = field(default_factory=Replays)
    """Its answers, for requests that are sent again."""
    on_lost: Callable[[], None] | None = None
    """Called when a client went away for good. None: the run sees the end of its process."""
    _lost_timer: asyncio.TimerHandle | None = None
    """Calls `on_lost`, unless the client sends another request before."""

    @property
    def roles(self) -> Mapping[str, str]:
        """The setting `chat_template.roles`: roles of requests -> roles of the template."""
        return self.rollout.policy.chat.roles

    def on_request(self) -> None:
        """Note that a client that went away has come back."""
        self._cancel_lost_timer()

    def _cancel_lost_timer(self) -> None:
        if self._lost_timer is not None:
            self._lost_timer.cancel()
            self._lost_timer = None

    def start_timer_if_lost(self) -> None:
        """Give a client that left before it got its answer LOST_S seconds to come back."""
        if self.on_lost is not None and self.replays.lost:
            self._cancel_lost_timer()  # of an earlier leave
            self._lost_timer = asyncio.get_running_loop().call_later(LOST_S, self.on_lost)


class AnswerResponse(Response):
    """Writes an answer once it is sampled. The sampling goes on if the client disconnects.

    Each request for a completion has one, which Starlette calls once, in the event loop. It keeps
    count in its `Delivery`: the readers that wait, and the clients that were sent all of the
    answer. A request that is sent again can then get the answer that was lost.
    """

    def __init__(
        self, entry: OpenRollout, delivery: Delivery, dialect: WireDialect, question: Question
    ) -> None:
        super().__init__()
        self.entry, self.delivery = entry, delivery
        self.dialect, self.question = dialect, question
        self._counted_as_written = False
        """True while `delivery.written` counts this client."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait for the answer and write it, unless the client disconnects before."""
        delivery = self.delivery
        delivery.readers += 1
        scope[ON_RESET] = self._take_back  # called by `EndpointProtocol`, perhaps after the end
        disconnect = asyncio.ensure_future(wait_until_disconnected(receive))
        try:
            self._counted_as_written = await self._write(send, disconnect)
            if self._counted_as_written:
                delivery.written += 1
        finally:
            delivery.readers -= 1
            disconnect.cancel()
            self.entry.start_timer_if_lost()

    def _take_back(self) -> None:
        """Count the answer as not written: the client reset its connection.

        A written answer waits in the socket's buffer, and is lost if the client closes its end
        without reading it.
        """
        if self._counted_as_written:
            self._counted_as_written = False
            self.delivery.written -= 1
            self.entry.start_timer_if_lost()

    async def _write(self, send: Send, disconnect: asyncio.Future[None]) -> bool:
        """Wait for the answer and write it, or its error. Return False if the client has left.

        A stream begins before its answer is there, so that the connection is kept alive meanwhile.
        """
        task, streams = self.delivery.task, self.question.stream
        stream_has_begun = False
        while not task.done():
            await asyncio.wait(
                (task, disconnect),
                timeout=KEPT_ALIVE_S if streams else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if disconnect.done():
                return False
            if streams and not task.done():
                if not stream_has_begun:
                    await start_response(send, 200, "text/event-stream")
                    stream_has_begun = True
                await send_text(send, KEEP_ALIVE, more=True)
        try:
            answer = task.result()
        except asyncio.CancelledError:  # by `Replays.aclose`, when the rollout is closed
            error = RequestError("the rollout has ended", status=403)
            await self._write_error(send, error, stream_has_begun)
        except Exception as problem:
            await self._write_error(send, request_error(problem), stream_has_begun)
        else:
            await self._write_answer(send, answer, stream_has_begun)
        return not disconnect.done()

    async def _write_answer(self, send: Send, answer: Answer, stream_has_begun: bool) -> None:
        """Write all of an answer, as the events of a stream or as one JSON body."""
        if not self.question.stream:
            await start_response(send, 200, "application/json")
            text = to_json(self.dialect.body(answer))
        else:
            if not stream_has_begun:
                await start_response(send, 200, "text/event-stream")
            text = "".join(self.dialect.events(answer, self.question.include_usage))
        await send_text(send, text, more=False)

    async def _write_error(self, send: Send, error: RequestError, stream_has_begun: bool) -> None:
        """Write an error with its status, or as an event of a stream, which has sent status 200."""
        if not stream_has_begun:
            await start_response(send, error.status, "application/json")
            text = to_json(self.dialect.error(error))
        else:
            head = AnswerHead(model=self.question.model or "policy")
            include_usage = False  # an error has none
            text = "".join(self.dialect.writer(head, include_usage).fail(error))
        await send_text(send, text, more=False)


def build_app(find_open: Callable[[str], OpenRollout | None]) -> Starlette:
    """Return the application. `find_open` returns the open rollout of a name, or None.

    Each handler but `refuse` finds its `OpenRollout`, the `entry`, by the name in the address:
    `entry.rollout` answers requests, and `entry.replays` keeps the answers for repeated requests.
    """

    async def complete(request: Request, dialect: WireDialect) -> Response:
        """Answer a request for a completion, in the form of the API that `dialect` speaks."""
        entry = _authorize(request, find_open)
        try:
            body = await read_body(request, entry.rollout.max_context)
            question = await _parse_question(body, dialect, entry)
        except (RequestError, RecursionError) as error:
            entry.rollout.refuse(request_error(error))
            raise
        # A client that lost its connection sends its request again, and gets the answer that was
        # sampled the first time. `sample` is called only for a request that is new.
        delivery = entry.replays.deliver(
            request.scope["path"],  # `request.url` would be put together for each request
            body,
            key=request.headers.get("idempotency-key"),
            retry=_is_retry(request),
            sample=lambda: entry.rollout.answer(question, text_arguments=dialect.text_arguments),
        )
        return AnswerResponse(entry, delivery, dialect, question)

    async def count_tokens(request: Request) -> Response:
        """Return the length in tokens of the prompt of an Anthropic request, without sampling."""
        entry = _authorize(request, find_open)
        body = await read_body(request, entry.rollout.max_context)
        question = await _parse_question(body, DIALECTS["messages"], entry)
        count = await asyncio.to_thread(entry.rollout.count_tokens, question)
        return JSONResponse({"input_tokens": count})

    async def models(request: Request) -> Response:
        """List the models of `agent.models`, in which "*" stands for any other name."""
        entry = _authorize(request, find_open)
        names = [name for name in entry.rollout.settings.models if name != "*"] or ["policy"]
        data = [
            {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "agenttrain"}
            for name in names
        ]
        return JSONResponse({"object": "list", "data": data, "has_more": False})

    async def reward(request: Request) -> Response:
        """Set the rollout's reward to the one in the body."""
        entry = _authorize(request, find_open)
        body = await read_body(request, entry.rollout.max_context)
        data = await call_in_thread_if_large(len(body), read_object, body)
        entry.rollout.reward = read_reward(data.get("reward"))
        return JSONResponse({"reward": entry.rollout.reward})

    async def finish(request: Request) -> Response:
        """End the rollout, with the last messages and the reward in the body, if any."""
        entry = _authorize(request, find_open)
        body = await read_body(request, entry.rollout.max_context)
        data = await call_in_thread_if_large(len(body), read_object, body) if body.strip() else {}
        # The reward too is read before the end: a rollout goes on if its request is refused.
        reward = None if data.get("reward") is None else read_reward(data["reward"])
        messages = await call_in_thread_if_large(len(body), _read_conversation, data, entry.roles)
        await entry.rollout.finish(messages, size=len(body))
        if reward is not None:
            entry.rollout.reward = reward
        return JSONResponse({"finished": True})

    async def refuse(request: Request, error: Exception) -> Response:
        """Return the response to an error, in the form of the API that was asked."""
        problem = request_error(error)
        if problem.status in (404, 405) and isinstance(error, HTTPException):
            problem = unknown_route(request, problem.status)
        # OpenAI's two APIs have errors of the same form.
        is_anthropic = "/messages" in request.url.path
        dialect = DIALECTS["messages" if is_anthropic else "chat/completions"]
        return JSONResponse(dialect.error(problem), status_code=problem.status)

    # Also without /v1: a client may have the rollout's address itself as its base URL.
    def post(path: str, handler: Callable[..., Any]) -> list[Route]:
        return [Route(f"/{{rollout}}{v1}/{path}", handler, methods=["POST"]) for v1 in ("/v1", "")]

    completions = [
        post(path, partial(complete, dialect=dialect)) for path, dialect in DIALECTS.items()
    ]
    return Starlette(
        routes=[
            *(route for routes in completions for route in routes),
            *post("messages/count_tokens", count_tokens),
            *(Route(f"/{{rollout}}{v1}/models", models) for v1 in ("/v1", "")),
            Route("/{rollout}/reward", reward, methods=["POST"]),
            Route("/{rollout}/finish", finish, methods=["POST"]),
        ],
        exception_handlers=dict.fromkeys(ANSWERED_ERRORS, refuse),
    )


def _is_retry(request: Request) -> bool:
    """Return True if a client of OpenAI or Anthropic says that it has sent the request before.

    They count from 0 in a header. `int` does not read it here: any client may send the header, with
    text or with so many digits that `int` fails.
    """
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and count.strip("0") != ""


async def _parse_question(body: bytes, dialect: WireDialect, entry: OpenRollout) -> Question:
    """Parse the body of a request: its messages, tools and options. Raises RequestError.

    A request may hold an earlier answer's id in place of the answer: `find_issued` looks it up.
    """
    return await call_in_thread_if_large(
        len(body), dialect.question, body, entry.roles, entry.rollout.find_issued
    )


def _read_conversation(data: Mapping[str, Any], roles: Mapping[str, str]) -> list[Message]:
    """Return the messages in the body of `/finish`, if any. Raises RequestError."""
    messages = data.get("messages")
    if not messages:
        return []
    if not isinstance(messages, list):
        raise RequestError("messages: needs a list of messages", param="messages")
    dialect = DIALECTS["messages" if data.get("api") == "anthropic" else "chat/completions"]
    # A request must end with a message of the user, and this conversation may end with an answer.
    question_messages = [*messages, {"role": "user", "content": ""}]
    return dialect.read({"messages": question_messages}, roles, find_none).messages[:-1]


def read_reward(value: object) -> float:
    """Return an agent's reward. Raises RequestError for anything but a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"reward={quote(value)}: needs a number", param="reward")
    if not abs(value) <= MAX_REWARD:
        raise RequestError(f"reward={quote(value)}: must be at most {MAX_REWARD:g}", param="reward")
    return float(value)


def _authorize(request: Request, find_open: Callable[[str], OpenRollout | None]) -> OpenRollout:
    """Return the rollout that a request's address names. Raises RequestError for a wrong key."""
    key = request.headers.get("x-api-key")
    if key is None:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
    entry = find_open(request.path_params["rollout"])
    if entry is None or not hmac.compare_digest(key.encode(), entry.key.encode()):
        raise RequestError(
            "no rollout in flight has this address and key; send the key that came with the base "
            "URL, as `Authorization: Bearer …` or `x-api-key`",
            code="invalid_api_key",
            status=401,
        )
    entry.on_request()
    return entry
