"""A connection to an MCP server that all calls share; it reconnects after a failure.

It has an event loop of its own in a daemon thread: a run may use several event loops, one after
the other, and the connection must outlive them. The transport is a child process or HTTP.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any

from agenttrain.types import AgenttrainError, ToolUnavailable
from agenttrain.utils.redaction import hide_secrets

OpenClient = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes a new `mcp.Client`; entering it connects."""

ATTEMPTS = 3
"""Number of times that a call is sent if the connection breaks each time."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
"""Pauses between attempts to connect, or to send a call: each is twice the one before."""
CLOSE_S = 10.0
"""Seconds to wait for the end; the SDK takes less to end a server that ignores signals."""
HTTP_REFUSED = "Server returned an error response"
"""The SDK's message for an HTTP status without a message of its own, such as 502 or 429."""


class CannotConnect(AgenttrainError):
    """The server does not start, does not answer, or does not use MCP."""


class _Link:
    """One session of a `Connection` with its server. Wait for `ready`, then use `client`.

    A task of its own holds the session open: anyio has the same task enter and leave a transport.
    """

    def __init__(self, open_client: OpenClient) -> None:
        self.client: Any = None
        """The SDK's client; None until the session is established, and if that failed."""
        self.stop = asyncio.Event()
        """Set to end the session's task."""
        self.ready = asyncio.Event()
        """Set when the session is established, or has failed with `error`."""
        self.error: BaseException | None = None
        self.task = asyncio.create_task(self._run_session(open_client))

    @property
    def alive(self) -> bool:
        """True while the session can take calls."""
        return self.client is not None and not self.stop.is_set() and not self.task.done()

    async def end(self) -> None:
        """End the session and wait until its task has ended."""
        self.stop.set()
        await asyncio.wait({self.task})

    async def _run_session(self, open_client: OpenClient) -> None:
        """Hold the session open until `stop` is set."""
        try:
            async with open_client() as client:
                self.client = client
                self.ready.set()
                await self.stop.wait()
        except BaseException as error:  # anyio raises groups of errors and cancellations
            self.error = error
        finally:
            self.ready.set()


class Connection:
    """Sends calls to one server from any event loop. It is closed by `close`, or at exit.

    A `_Link` is one session: its `client` sends calls while it is `alive`, and `stop` ends it. If
    the server ends the session, the next call opens another.
    """

    def __init__(
        self, open_client: OpenClient, *, start_timeout_s: float, reconnect_s: float
    ) -> None:
        """The first connection may take `start_timeout_s` seconds, a later one `reconnect_s`."""
        # Without any handler, Python would print the SDK's warnings into the run's display.
        logging.getLogger("mcp").addHandler(logging.NullHandler())
        self._open, self._start_s, self._reconnect_s = open_client, start_timeout_s, reconnect_s
        self._link: _Link | None = None
        """The last session, which may have ended."""
        self._connecting: asyncio.Task[_Link] | None = None
        """The last reconnection, for which all calls wait."""
        self._closed = False
        self._close_lock = threading.Lock()
        """Held by `close`, which any thread may call."""
        # An event loop of its own, because several loops may send calls over the one session.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def start(self) -> list[Any]:
        """Connect and list the server's tools. Raises CannotConnect."""
        return asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool, again if the connection breaks. Raises ToolUnavailable, MCPError."""
        if self._closed:
            raise ToolUnavailable("the connection to the MCP server is closed")
        future = asyncio.run_coroutine_threadsafe(self._call(name, arguments), self._loop)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """End the session and the server's process, and block until they have ended."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            with suppress(TimeoutError):
                ended = asyncio.run_coroutine_threadsafe(self._close_session(), self._loop)
                ended.result(CLOSE_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=1.0)
            if not self._thread.is_alive():
                self._loop.close()

    async def _start(self) -> list[Any]:
        """Do the work of `start` in the connection's own event loop."""
        try:
            link = self._link = await self._connect(self._start_s)
            tools: list[Any] = []
            cursor = None
            async with asyncio.timeout(self._start_s):
                while True:
                    page = await link.client.list_tools(cursor=cursor)
                    tools.extend(page.tools)
                    cursor = page.next_cursor
                    if cursor is None:
                        return tools
        except CannotConnect:
            raise
        except TimeoutError:
            raise CannotConnect(f"its tools are not listed within {self._start_s:g} s") from None
        except Exception as error:
            raise CannotConnect(f"its tools cannot be listed: {_describe_error(error)}") from error

    async def _connect(self, timeout_s: float) -> _Link:
        """Return an established session. Raises CannotConnect."""
        link = _Link(self._open)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    await link.ready.wait()  # set by success and by failure
            except TimeoutError:
                link.task.cancel()
                raise CannotConnect(f"no answer within {timeout_s:g} s") from None
            if link.client is None:
                raise CannotConnect(_describe_error(link.error)) from link.error
        except BaseException:
            await link.end()
            raise
        return link

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Do the work of `call` in the connection's own event loop.

        Reconnects and sends the call again if the session has failed, up to ATTEMPTS times.
        """
        reason = ""
        for attempt in range(ATTEMPTS):
            link = self._link
            if link is None or not link.alive:
                if self._connecting is None or self._connecting.done():
                    self._connecting = asyncio.create_task(self._reconnect())
                    # asyncio warns of an exception that is never read: callers may be cancelled.
                    self._connecting.add_done_callback(lambda t: t.cancelled() or t.exception())
                link = await asyncio.shield(self._connecting)  # other calls wait for it too
            try:
                return await link.client.call_tool(name, arguments)
            except Exception as error:
                if _session_failed(error) or not link.alive:
                    link.stop.set()  # ends the session, and so the next attempt reconnects
                elif str(error) == HTTP_REFUSED:
                    # A proxy or an overloaded server refused this one request, with 502 or 429,
                    # say. The session is good: send the call again.
                    await asyncio.sleep(FIRST_PAUSE_S * 2**attempt)
                else:  # an answer of the server: the call failed
                    raise
                reason = _describe_error(error)
        raise ToolUnavailable(f"the MCP server broke {name} off {ATTEMPTS} times: {reason}")

    async def _reconnect(self) -> _Link:
        """Return a new session, after as many attempts as `reconnect_s` allows.

        Raises ToolUnavailable if none succeeds.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._reconnect_s
        pause = FIRST_PAUSE_S
        if self._link is not None:
            await self._link.end()  # never two server processes at a time
        while True:
            try:
                remaining_s = max(deadline - loop.time(), FIRST_PAUSE_S)
                self._link = await self._connect(min(remaining_s, self._start_s))
                return self._link
            except CannotConnect as error:
                if loop.time() + pause >= deadline:
                    raise ToolUnavailable(
                        f"the MCP server did not come back within {self._reconnect_s:g} s: {error}"
                    ) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _close_session(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._link is not None:
            await self._link.end()


def _session_failed(error: Exception) -> bool:
    """Return True if the session failed, not just the call."""
    import anyio
    import httpx2
    from mcp import MCPError
    from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

    if isinstance(error, MCPError):
        # A restarted server does not know the session.
        is_unknown = error.code == INVALID_REQUEST and error.message == "Session terminated"
        return is_unknown or error.code == CONNECTION_CLOSED
    closed = (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.TransportError)
    return isinstance(error, (*closed, ConnectionError))


def _describe_error(error: BaseException | None) -> str:
    """Describe an error, or the first one of a group, in one line without passwords."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = hide_secrets(str(error).partition("\n")[0])
    return text or type(error).__name__


TAIL_BYTES = 2000
"""Bytes from the end of a server's stderr, for error messages."""
CONNECT_S = 10.0


class StderrTail:
    """Reads a process's stderr, so that its pipe never fills, and stores only the end."""

    def __init__(self) -> None:
        self._tail = b""
        self._thread: threading.Thread | None = None

    def open(self) -> Any:
        """Return the file to pass to a process as its stderr; close it once the process has it."""
        read, write = os.pipe()

        def drain() -> None:
            with os.fdopen(read, "rb", buffering=0) as stream, suppress(OSError):
                while chunk := stream.read(65536):
                    self._tail = (self._tail + chunk)[-TAIL_BYTES:]

        self._thread = threading.Thread(target=drain, daemon=True)
        self._thread.start()
        return os.fdopen(write, "w")

    def last_line(self) -> str:
        """Return the last line that is not empty; waits up to 0.5 s for the process to end."""
        if self._thread is not None:
            self._thread.join(timeout=0.5)
        lines = self._tail.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


@asynccontextmanager
async def process_transport(
    command: Sequence[str], env: Mapping[str, str], stderr: StderrTail
) -> AsyncIterator[Any]:
    """Start a server and yield its streams; on leaving, end it with its children."""
    from mcp.client.stdio import StdioServerParameters, stdio_client

    parameters = StdioServerParameters(command=command[0], args=[*command[1:]], env=dict(env))
    with stderr.open() as errlog:
        async with stdio_client(parameters, errlog=errlog) as streams:
            # The server has its own copy. With ours closed, the pipe ends when the server does, and
            # so does the thread of `StderrTail` that reads it.
            errlog.close()
            yield streams


@asynccontextmanager
async def http_transport(
    url: str, headers: Mapping[str, str], refused: list[int]
) -> AsyncIterator[Any]:
    """Yield the streams of a server over streamable HTTP.

    `refused` then holds the status of the last response of 400 or more.
    """
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def record_status(response: httpx2.Response) -> None:
        if response.status_code >= 400:
            refused[:] = [response.status_code]

    # No limits here: the toolbox limits the time of a call and the number of concurrent calls.
    timeout = httpx2.Timeout(CONNECT_S, read=None, pool=None)
    limits = httpx2.Limits(max_connections=None)
    hooks = {"response": [record_status]}
    async with (
        httpx2.AsyncClient(
            headers=dict(headers), timeout=timeout, limits=limits, event_hooks=hooks
        ) as client,
        streamable_http_client(url, http_client=client) as streams,
    ):
        yield streams
