"""Output of agents: bounded files, and the prints of coroutines in the run's own process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any, TextIO

LOG_BYTES = 4 << 20
"""Bytes of an agent's output that a file keeps, from its beginning."""
TAIL_BYTES = 1 << 16
"""Bytes that it keeps of the end."""
PAUSE_S = 0.005
"""Pause after each 64 KiB of an agent that prints more: a flood leaves time for other rollouts."""


class BoundedLog:
    """Writes the beginning and the end of an output to a file, which the first write creates.

    Call `write` for each piece of output, and `close` at last, which writes the end. Example: of 4
    MiB + 64 KiB + 100 bytes, ``… [100 bytes left out] …`` replaces the 100 between.
    """

    def __init__(self, path: Path, *, limit: int = LOG_BYTES, append: bool = False) -> None:
        """Replace the file of an earlier attempt, or `append` to it."""
        self._path, self._mode = path, "ab" if append else "wb"
        self._beginning_bytes_left = limit
        """Bytes of the beginning that are still to be written."""
        self._file: IO[Any] | None = None
        self._tail = bytearray()
        """The last TAIL_BYTES of the output."""
        self._bytes_past_beginning = 0
        """Bytes of output after the `limit`. `close` writes the end of them, from `_tail`."""
        self._stopped = False
        """True: nothing more is written to the file, because it was closed or a write failed."""
        if not append:
            with suppress(OSError):
                path.unlink()

    @property
    def full(self) -> bool:
        """True once the beginning is complete: further output goes to the end, or is left out."""
        return self._bytes_past_beginning > 0

    def write(self, data: bytes) -> None:
        """Write output to the file up to the `limit`. Keep the end of all output in memory.

        Does not raise if the disk is full: then only the end is kept.
        """
        self._tail += data
        del self._tail[:-TAIL_BYTES]
        beginning = data[: self._beginning_bytes_left]
        self._beginning_bytes_left -= len(beginning)
        self._bytes_past_beginning += len(data) - len(beginning)
        if beginning:
            self._append(beginning)

    def last_words(self, characters: int) -> str:
        """Return the end of the output."""
        return self._tail.decode("utf-8", "replace").strip()[-characters:]

    def last_line(self) -> str:
        """Return the last line of the output, or what is kept of its end."""
        return self._tail.decode("utf-8", "replace").strip().rpartition("\n")[2]

    @property
    def cut_line(self) -> bool:
        """True if the beginning of the last line is not kept."""
        return len(self._tail) == TAIL_BYTES and b"\n" not in self._tail.strip()

    def close(self) -> None:
        """Write the end of the output, and close the file."""
        if self._bytes_past_beginning:
            end = self._tail[-self._bytes_past_beginning :]
            if gap := self._bytes_past_beginning - len(end):
                self._append(f"\n… [{gap} bytes left out] …\n".encode())
            self._append(end)
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._stopped = True

    def _append(self, data: bytes | bytearray) -> None:
        """Write to the file, unless it was closed or an earlier write failed."""
        if self._stopped:
            return
        try:
            if self._file is None:
                self._file = self._path.open(self._mode, buffering=0)
            self._file.write(data)
        except OSError:  # a full disk, or the agent has removed the folder
            self._stopped = True


async def copy_output(stream: asyncio.StreamReader, log: BoundedLog) -> None:
    """Write a stream to a log until its end."""
    while piece := await stream.read(65536):
        log.write(piece)
        if log.full:
            await asyncio.sleep(PAUSE_S)


_current: ContextVar[RolloutOutput | None] = ContextVar("output", default=None)
"""Output of the agent that runs in the current task. None: the run itself."""


class RolloutOutput:
    """Files of a rollout's output, made when something is printed.

    `DividedOutput.redirect` makes it for a rollout, and closes it.
    """

    def __init__(self, log: Path) -> None:
        """`log` is their path without a suffix."""
        self._files = {
            name: BoundedLog(log.with_suffix(f".{name}")) for name in ("stdout", "stderr")
        }
        self._closed = False

    def write(self, name: str, text: str) -> None:
        if self._closed:  # by a thread that the agent left behind
            return
        self._files[name].write(text.encode("utf-8", "replace"))

    def close(self) -> None:
        """Close the files. Later output is lost."""
        self._closed = True
        for file in self._files.values():
            file.close()


class _DividedStream:
    """A standard stream that sends the output of agents to the files of their rollouts.

    It stands in place of sys.stdout or sys.stderr, which is its `stream`.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self._name = stream, name

    def write(self, text: str) -> int:
        """Write to the files of the current task's rollout, or to `stream` outside a rollout."""
        output = _current.get()
        if output is None:
            return self.stream.write(text)
        output.write(self._name, text)
        return len(text)

    def isatty(self) -> bool:
        return _current.get() is None and self.stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class DividedOutput:
    """Standard output and error, divided among the run and its agents until `restore`.

    `FunctionAgent` has one, and calls `redirect` for each rollout.

    A task that asyncio starts, and a thread of `asyncio.to_thread`, belongs to the agent that
    started it. A logger's handler keeps the stream that it was made with.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _DividedStream] = {}

    @contextmanager
    def redirect(self, log: Path) -> Iterator[None]:
        """Send the prints of the current task to the files of a rollout, for the block."""
        for name in ("stdout", "stderr"):
            if name not in self._streams:
                self._streams[name] = _DividedStream(getattr(sys, name), name)
                setattr(sys, name, self._streams[name])
        output = RolloutOutput(log)
        token = _current.set(output)
        try:
            yield
        finally:
            _current.reset(token)
            output.close()

    def restore(self) -> None:
        """Put the streams back, unless other code has replaced them."""
        for name, stream in self._streams.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, stream.stream)
        self._streams.clear()
