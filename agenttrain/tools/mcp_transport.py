"""Transports to an MCP server: a process of ours, or an address."""

from __future__ import annotations

import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

KEPT_BYTES = 2000
"""Bytes kept of the end of a server's stderr, for error messages."""
CONNECT_S = 10.0


class StderrTail:
    """The end of what a process writes to stderr; everything before it is read and dropped."""

    def __init__(self) -> None:
        self._kept = b""
        self._thread: threading.Thread | None = None

    def open(self) -> Any:
        """A file to give to a process; close it when the process has it."""
        read, write = os.pipe()

        def drain() -> None:
            with os.fdopen(read, "rb", buffering=0) as stream, suppress(OSError):
                while chunk := stream.read(65536):
                    self._kept = (self._kept + chunk)[-KEPT_BYTES:]

        self._thread = threading.Thread(target=drain, daemon=True)
        self._thread.start()
        return os.fdopen(write, "w")

    def last_line(self) -> str:
        """The last line that is not empty, once it is there or a moment has passed."""
        if self._thread is not None:
            self._thread.join(timeout=0.5)
        lines = self._kept.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else ""


@asynccontextmanager
async def process_transport(
    command: Sequence[str], env: Mapping[str, str], stderr: StderrTail
) -> AsyncIterator[Any]:
    """The streams of a server that is started, and ended on leaving, with its children."""
    from mcp.client.stdio import StdioServerParameters, stdio_client

    parameters = StdioServerParameters(command=command[0], args=[*command[1:]], env=dict(env))
    with stderr.open() as errlog:
        async with stdio_client(parameters, errlog=errlog) as streams:
            errlog.close()
            yield streams


@asynccontextmanager
async def http_transport(
    url: str, headers: Mapping[str, str], refused: list[int]
) -> AsyncIterator[Any]:
    """The streams of a server that speaks streamable HTTP; `refused` gets the last error status."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    async def record_status(response: httpx2.Response) -> None:
        if response.status_code >= 400:
            refused[:] = [response.status_code]

    # The toolbox bounds how long a call may read, and how many calls there are at once.
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
