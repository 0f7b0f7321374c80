"""A proxy on 127.0.0.1 of a container, through which it reaches the hosts of a list.

The container has no network: the proxy's socket lies inside (`network.py`), and the run connects
for it. It speaks HTTP's CONNECT, which all clients use for https, and forwards plain requests.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from urllib.parse import urlsplit

PORT = 3128
"""Port in the container, which has no other."""
HEAD_BYTES = 1 << 14
HEAD_S = 30.0
CONNECT_S = 30.0
CHUNK = 1 << 16
VARIABLES = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
PER_REQUEST = ("connection", "proxy-connection", "keep-alive", "proxy-authorization")
"""Headers that are for the proxy alone."""


def environment() -> dict[str, str]:
    """Return the variables that tell programs of the proxy."""
    address = f"http://127.0.0.1:{PORT}"
    return {**dict.fromkeys(VARIABLES, address), "no_proxy": "127.0.0.1,localhost"}


def is_allowed(host: str, hosts: Sequence[str]) -> bool:
    """Return True for a listed host; ``*.example.org`` stands for all names below example.org."""
    name = host.lower().rstrip(".")
    return any(name.endswith(h[1:]) if h.startswith("*.") else name == h for h in hosts)


def common_hosts(first: Sequence[str], second: Sequence[str]) -> tuple[str, ...]:
    """Return the hosts that both lists allow.

    Example: ``["*.org", "a.com"]`` and ``["*.b.org", "example.org", "*.a.com"]`` have ``("*.b.org",
    "example.org")``.
    """
    common = [host for host in first if _covers(second, host)]
    common += [host for host in second if _covers(first, host)]
    return tuple(dict.fromkeys(common))


def _covers(hosts: Sequence[str], entry: str) -> bool:
    """Return True if a list allows all that an entry of another list does, a pattern or a host.

    The host ``a.com`` does not cover the pattern ``*.a.com``.
    """
    patterns = [host for host in hosts if host.startswith("*.")]
    return entry in hosts or any(entry.endswith(pattern[1:]) for pattern in patterns)


async def serve(listener: socket.socket, hosts: Sequence[str]) -> asyncio.Server:
    """Serve the proxy on a listening socket, until the server is closed."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _handle(reader, writer, hosts)
        except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError):
            pass  # a broken connection or request is the client's own trouble
        finally:
            writer.close()

    return await asyncio.start_server(handle, sock=listener, limit=HEAD_BYTES)


async def _handle(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, hosts: Sequence[str]
) -> None:
    """Read one request, and connect the client with the host that it names if that is allowed."""
    async with asyncio.timeout(HEAD_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    line, *headers = head.split("\r\n")[:-2]  # without the empty line at its end
    method, target, version = line.split(" ")
    connects = method == "CONNECT"
    url = urlsplit(f"//{target}" if connects else target)
    host, port = url.hostname or "", url.port or (443 if connects else 80)
    if not is_allowed(host, hosts):
        await _answer(writer, f"403 Forbidden: {host} is not in runtime.hosts")
        return
    try:
        async with asyncio.timeout(CONNECT_S):
            far_reader, far_writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        await _answer(writer, f"502 Bad Gateway: {host}:{port} does not answer")
        return
    try:
        if connects:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        else:
            # One request a connection: the next one could be for another host.
            forwarded = [h for h in headers if h.partition(":")[0].lower() not in PER_REQUEST]
            path = f"{url.path or '/'}?{url.query}" if url.query else url.path or "/"
            lines = [f"{method} {path} {version}", *forwarded, "Connection: close", "", ""]
            far_writer.write("\r\n".join(lines).encode("latin-1"))
        await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
    finally:
        far_writer.close()


async def _answer(writer: asyncio.StreamWriter, status: str) -> None:
    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until their end, and say that there are no more."""
    with suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
