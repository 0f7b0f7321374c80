"""The HTTP front: OpenAI's routes over a `ChatServer`, as an ASGI application, and its server.

Nothing is authenticated: it binds to 127.0.0.1 unless it is told otherwise. So that no web page
that the user looks at can ask it, requests need a `Host` of this server, which a name that was
bound to its address (DNS rebinding) is not, and bodies the type of JSON, which browsers send to
another origin only if that allows it.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
)
from contextlib import asynccontextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from agenttrain.chat.wire.dialects import DIALECTS, StreamWriter, WireDialect
from agenttrain.chat.wire.fields import MAX_QUOTED
from agenttrain.chat.wire.http import (
    ANSWERED_ERRORS,
    BoundedHead,
    call_in_thread_if_large,
    read_body,
    request_error,
    send_text,
    start_response,
    unknown_route,
    wait_until_disconnected,
)
from agenttrain.chat.wire.openai import RequestError, read_object
from agenttrain.serving.answers import Answering, ChatServer
from agenttrain.utils.signals import handling

T = TypeVar("T")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine for itself."""
ROUTES = "POST chat/completions and responses, and GET models"
"""Routes below ``/v1``."""
GRACE_S = 30
"""Seconds that answers in flight have left once the server is asked to end."""


class Disconnected(Exception):
    """The client has gone before its answer was complete."""


class HostCheck:
    """Refuses requests whose `Host` names no server here, before they reach `app`."""

    def __init__(self, app: ASGIApp, hosts: Collection[str], any_address: bool) -> None:
        """`hosts` are names of this server, "*" for all. `any_address` allows IP addresses too."""
        self.app, self.any_address = app, any_address
        self.hosts = frozenset(host.lower().strip("[]") for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with an error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        host = Headers(scope=scope).get("host", "")
        if self._is_ours(host):
            return await self.app(scope, receive, send)
        error = RequestError(
            f"Host: {host[:MAX_QUOTED]} is no name of this server; ask for one of "
            f"{', '.join(sorted(self.hosts))}, or start it with hosts=[name]",
            code="unknown_host",
        )
        await JSONResponse(error.body(), status_code=error.status)(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        """Return True if a `Host` header names this server."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if "*" in self.hosts or name in self.hosts:
            return True
        # `any_address`: the server is for other machines, which ask for it by IP address. That is
        # safe: an attacker's page can make its own name point to this server (DNS rebinding), but
        # `Host` is then that name. It cannot make `Host` an IP address.
        return self.any_address and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. If the client disconnects, cancel it and raise Disconnected."""
    task = asyncio.create_task(work)
    disconnect = asyncio.create_task(wait_until_disconnected(receive))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Disconnected
        return task.result()
    finally:
        for pending in (task, disconnect):
            pending.cancel()
        await asyncio.wait((task, disconnect))


class EventStream(Response):
    """Sends server-sent events. A client that disconnects ends the generator.

    If the generator raises, `writer` writes the error in place of the rest.
    """

    def __init__(self, events: AsyncGenerator[str], writer: StreamWriter) -> None:
        super().__init__()
        self.events, self.writer = events, writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""

        async def send_all() -> None:
            await start_response(send, 200, "text/event-stream")
            try:
                async for event in self.events:
                    await send_text(send, event, more=True)
            except RequestError as error:  # the status was sent already
                await send_text(send, "".join(self.writer.fail(error)), more=True)
            finally:
                await self.events.aclose()
            await send_text(send, "", more=False)

        with suppress(Disconnected):
            await while_connected(receive, send_all())


def build_app(
    server: ChatServer,
    *,
    hosts: Collection[str] = LOOPBACK,
    any_address: bool = False,
    on_end: Callable[[], Awaitable[None]] | None = None,
) -> Starlette:
    """Return the application. `on_end` is awaited after its last answer.

    It has a POST route for each API that `serve` speaks (`read_served` is set), ``/v1/models`` and
    ``/health``. `hosts` are the names in `Host` that it answers to, "*" for all. With `any_address`
    it answers to every IP address too, e.g. that of the machine around a container.
    """

    async def models(_: Request) -> Response:
        model = {"id": server.model, "object": "model", "created": 0, "owned_by": "agenttrain"}
        model["max_model_len"] = server.engine.max_context
        return JSONResponse({"object": "list", "data": [model]})

    async def complete(request: Request, dialect: WireDialect) -> Response:
        """Answer a request in the dialect of its path, in one piece or as a stream."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise RequestError(
                f"Content-Type: {kind[:MAX_QUOTED]}: send application/json, which no web page can "
                "send to another server unasked",
                status=415,
            )
        body = await read_body(request, server.engine.max_context)
        # Long bodies take a while to parse and render: a thread keeps the event loop free.
        answering = await call_in_thread_if_large(len(body), begin, body, dialect)
        if answering.question.stream:
            writer = dialect.writer(answering.head, answering.question.include_usage)
            return EventStream(server.stream(answering, writer), writer)
        try:
            answer = await while_connected(request.receive, server.answer(answering))
        except Disconnected:
            return Response(status_code=499)  # for the log: the client is gone
        return JSONResponse(dialect.body(answer))

    def begin(body: bytes, dialect: WireDialect) -> Answering:
        """Read a request and make its prompt."""
        assert dialect.read_served is not None
        # Finds an answer that this server has given earlier (issued), by its id: a request may name
        # it instead of repeating it.
        roles, find_issued = server.chat.roles, server.conversations.find_issued
        return server.begin(dialect.read_served(read_object(body), roles, find_issued))

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def refuse(request: Request, error: Exception) -> Response:
        """Answer a request whose handling raised `error`."""
        problem = request_error(error)
        if problem.status in (404, 405) and isinstance(error, HTTPException):
            problem = unknown_route(request, problem.status, ROUTES)
        return JSONResponse(problem.body(), status_code=problem.status)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        if on_end is not None:
            await on_end()

    return Starlette(
        routes=[
            Route("/v1/models", models),
            *(
                Route(f"/v1/{path}", partial(complete, dialect=dialect), methods=["POST"])
                for path, dialect in DIALECTS.items()
                if dialect.read_served is not None
            ),
            Route("/health", health),
        ],
        exception_handlers=dict.fromkeys(ANSWERED_ERRORS, refuse),
        middleware=[Middleware(HostCheck, hosts=hosts, any_address=any_address)],
        lifespan=lifespan,
    )


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=128)


def run(app: Starlette, listener: socket.socket) -> None:
    """Serve until SIGTERM or Ctrl-C: answers in flight are completed first, for `GRACE_S` at most.

    A second signal ends them at once.
    """
    config = uvicorn.Config(
        app,
        http=BoundedHead,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    # uvicorn handles both signals and, once it has ended, raises them again. Then handlers that do
    # nothing take them, so that they do not end this process too.
    try:
        with handling((signal.SIGTERM, signal.SIGINT), lambda *_: None):
            uvicorn.Server(config).run(sockets=[listener])
    finally:
        sys.stdout.flush()
