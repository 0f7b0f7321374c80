"""`Connections`: HTTP/1.1 to one server, with as many connections as there are requests in flight.

httpx takes 2.5 ms of CPU for a request among 64 at once, most of it for its pool, whose work for a
request grows with the number of connections; this takes a tenth. It knows what servers of a run
send: answers with a length, or in chunks; no redirects, no cookies, no compression, no proxy.
"""

from __future__ import annotations

import asyncio
import select
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

LONGEST_LINE = 1 << 20
"""Bytes of an answer's head, and of a line in a chunked one."""
WITHOUT_BODY = (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED)


class BadAnswer(OSError):
    """The other side did not speak HTTP, or ended in the middle of an answer."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """Status and body of an answer."""

    status: int
    content: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.content.decode("utf-8", "replace")


@dataclass(slots=True, eq=False)
class HttpConnection:
    """One connection, which carries one request at a time."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def usable(self) -> bool:
        """False once the server has closed it, also if the event loop has not noticed yet.

        A loop that was blocked for longer than the server keeps a connection would send into it.
        """
        if self.reader.at_eof() or self.writer.is_closing():
            return False
        unread = select.poll()
        unread.register(self.writer.get_extra_info("socket").fileno(), select.POLLIN)
        return not unread.poll(0)

    def abort(self) -> None:
        """Close it at once; the server gives up a request in flight."""
        self.writer.transport.abort()


class Connections:
    """Connections to one server, kept for the next requests.

    Example: ``Connections("http://127.0.0.1:8000", {}, timeout_s=5).request("GET", "/health")`` ->
    ``HttpAnswer(200, b"")``
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, timeout_s: float) -> None:
        """`headers` go with every request, which may take `timeout_s` seconds."""
        place = urlsplit(url)
        self._tls = ssl.create_default_context() if place.scheme == "https" else None
        self._host = place.hostname or ""
        self._port = place.port or (443 if self._tls else 80)
        self._path = place.path.rstrip("/")
        self._head = _lines({"Host": place.netloc, **headers})
        self._timeout_s = timeout_s
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._closed = False

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send a request and return its answer; raises OSError, of which TimeoutError is one.

        Cancelling it closes the connection.
        """
        length = {"Content-Length": str(len(body))}
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{_lines(length)}"
        message = f"{head}{_lines(headers or {})}\r\n".encode("ascii") + body
        async with asyncio.timeout(self._timeout_s):
            connection = await self._connection()
            self._busy.add(connection)
            try:
                connection.writer.write(message)
                await connection.writer.drain()
                answer, stays_open = await _answer(connection.reader)
            except BaseException:
                connection.abort()
                raise
            finally:
                self._busy.remove(connection)
        # A server that failed may be about to close the connection.
        if stays_open and answer.status < HTTPStatus.INTERNAL_SERVER_ERROR and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    async def _connection(self) -> HttpConnection:
        """Return a connection that nobody uses: the one used last, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.abort()
        if self._closed:
            raise BadAnswer("the client was closed")
        opened = asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=LONGEST_LINE)
        return HttpConnection(*await opened)

    async def aclose(self) -> None:
        """Close all connections; requests in flight fail."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.abort()
        self._idle.clear()


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


async def _answer(reader: asyncio.StreamReader) -> tuple[HttpAnswer, bool]:
    """Read an answer; also return False if the server closes the connection after it."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ", 2)
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.lower(): value.strip().lower() for name, _, value in pairs}
        stays_open = version == "HTTP/1.1" and headers.get("connection") != "close"
        if int(status) in WITHOUT_BODY:
            content = b""
        elif headers.get("transfer-encoding") == "chunked":
            content = await _chunks(reader)
        elif "content-length" in headers:
            content = await reader.readexactly(int(headers["content-length"]))
        else:
            content, stays_open = await reader.read(), False
    except asyncio.IncompleteReadError as error:
        raise BadAnswer("the server closed the connection before it had answered") from error
    except (ValueError, asyncio.LimitOverrunError) as error:
        raise BadAnswer(f"the answer is no HTTP: {error}") from error
    return HttpAnswer(int(status), content), stays_open


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    parts = []
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
        pass
    return b"".join(parts)
