"""HTTP that `serve` and the agents' endpoint share: bounded requests, and errors as answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from agenttrain.chat.wire.fields import MAX_QUOTED
from agenttrain.chat.wire.openai import RequestError

T = TypeVar("T")
BYTES_PER_TOKEN = 8
"""Bytes of a request for each token of the context: twice those of English text and its JSON."""
MAX_OVERHEAD = 2**18
"""Bytes of a request that the context does not bound: what JSON writes around its texts, and texts
whose tokens are long, such as blanks."""
MAX_HEAD = 2**16
"""Maximum bytes of a request's address and headers."""
LARGE = 2**15
"""Bytes from which a request is read in a thread, so that the event loop goes on."""
KEPT_ALIVE_S = 10.0
"""Seconds of silence after which a stream sends a comment, so that no proxy closes it."""
KEEP_ALIVE = ": keep-alive\n\n"
"""That comment."""
ROUTES = "POST chat/completions, responses, messages and messages/count_tokens, and GET models"
"""Routes below a base URL."""
ANSWERED_ERRORS = (RequestError, HTTPException, RecursionError, Exception)
"""Errors that the fronts answer with `request_error`. starlette raises again what it handles as
Exception, so that uvicorn logs it."""


def request_error(error: Exception) -> RequestError:
    """Return the error that answers a request whose handling raised `error`."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        return RequestError(f"{error.detail}", status=error.status_code)
    if isinstance(error, RecursionError):
        return RequestError("the request is nested too deeply")
    return RequestError(f"{type(error).__name__}: {error}", status=500)


def unknown_route(request: Request, status: int, routes: str = ROUTES) -> RequestError:
    """Return the error for a path or method that is not served, with those that are."""
    if request.headers.get("upgrade", "").lower() == "websocket":
        return RequestError(
            "WebSocket is not served here; send the request by POST, whose answer may be a stream",
            code="websocket_unsupported",
            status=426,
        )
    return RequestError(
        f"{request.method} {request.url.path[:MAX_QUOTED]}: is not served here; below the base URL "
        f"there are {routes}",
        code="unknown_route",
        status=status,
    )


async def start_response(send: Send, status: int, kind: str) -> None:
    """Send the status and the headers of a response."""
    headers = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_text(send: Send, text: str, *, more: bool) -> None:
    """Send a part of a response's body. Without `more` it is the last one."""
    body = text.encode("utf-8", "replace")
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def wait_until_disconnected(receive: Receive) -> None:
    """Wait until the client of a request is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def body_limit(max_context: int) -> int:
    """Return the maximum bytes of a request that can fit a context; requests hold no images."""
    return MAX_OVERHEAD + BYTES_PER_TOKEN * max_context


async def read_body(request: Request, max_context: int) -> bytes:
    """Return a request's body. Raises RequestError if it is too long for a context of this size.

    At most `body_limit` bytes are kept in memory, whatever the client sends.
    """
    limit = body_limit(max_context)
    length = request.headers.get("content-length", "").lstrip("0")
    # Digits are counted first: `int` refuses thousands of them.
    if length.isdecimal() and (len(length) > len(str(limit)) or int(length) > limit):
        raise _too_long(max_context)
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise _too_long(max_context)
            pieces.append(piece)
    except ClientDisconnect as error:
        raise RequestError("the client left in the middle of its request") from error
    return b"".join(pieces)


def _too_long(max_context: int) -> RequestError:
    return RequestError(
        f"the body has more than {body_limit(max_context):,} bytes, which a context of "
        f"{max_context} tokens cannot hold; shorten the messages",
        param="messages",
        code="context_length_exceeded",
        status=413,
    )


async def call_in_thread_if_large(size: int, function: Callable[..., T], *arguments: Any) -> T:
    """Call a function that reads a request of `size` bytes, in a thread if these are many.

    A large request takes so long to read that the event loop would stand still.
    """
    if size < LARGE:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)


class BoundedHead(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """uvicorn's HTTP, which refuses a request whose head is far too long.

    Each connection has one, in the event loop's thread. uvicorn parses with httptools or, without
    it, with h11. h11 has a bound of its own, and calls none of the hooks below (`on_…`). httptools
    calls them, and keeps whatever arrives. So two counts are bounded by `MAX_HEAD`, and a head may
    have twice as many bytes: those of finished headers, and those of one unfinished header.
    """

    _callbacks = 0
    """Number of calls of the hooks so far: data that causes none belongs to an unfinished
    header."""
    _head = 0
    """Bytes of the address and of the finished headers of this request."""
    _unfinished = 0
    """Bytes of the unfinished header: those since the last callback."""

    def on_message_begin(self) -> None:
        """Begin to count for a new request."""
        self._callbacks, self._head = self._callbacks + 1, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count a part of the address; raises ValueError, which httptools makes a bad request."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header or a trailer, as `on_url`."""
        # Without a call of `_count`: there are a dozen headers a request.
        self._callbacks += 1
        self._head += len(name) + len(value)
        if self._head > MAX_HEAD:
            self._refuse_head()
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Count the callback."""
        self._callbacks += 1
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Count the callback."""
        self._callbacks += 1
        super().on_body(body)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived, and close a connection with too long an unfinished header."""
        callbacks_before = self._callbacks
        super().data_received(data)  # httptools calls the methods above, which count their calls
        # httptools holds back a header until it is complete, and passes all else on at once, a part
        # of a body too. So data without a callback is part of an unfinished header.
        is_unfinished = self._callbacks == callbacks_before
        self._unfinished = self._unfinished + len(data) if is_unfinished else 0
        # httptools calls `on_message_begin` at the first bytes of a request; h11 calls nothing.
        is_httptools = self._callbacks > 0
        if self._unfinished > MAX_HEAD and is_httptools and not self.transport.is_closing():
            self.send_400_response("The headers are too long.")

    def _count(self, size: int) -> None:
        self._callbacks += 1
        self._head += size
        if self._head > MAX_HEAD:
            self._refuse_head()

    def _refuse_head(self) -> NoReturn:
        raise ValueError(f"more than {MAX_HEAD} bytes of headers")
