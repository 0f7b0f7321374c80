"""Output of agents in the run's own process: what a coroutine prints, in files of its rollout."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

_current: ContextVar[RolloutOutput | None] = ContextVar("output", default=None)


class RolloutOutput:
    """Files of a rollout's output, made when something is printed."""

    def __init__(self, log: Path) -> None:
        """`log` is their path without a suffix."""
        self._log = log
        self._files: dict[str, TextIO] = {}
        self._closed = False

    def write(self, name: str, text: str) -> None:
        """Append a text to the file of `stdout` or `stderr`."""
        if self._closed:  # by a thread that the agent left behind
            return
        if name not in self._files:
            path = self._log.with_suffix(f".{name}")
            self._files[name] = path.open("w", encoding="utf-8", errors="replace", buffering=1)
        self._files[name].write(text)

    def close(self) -> None:
        """Close the files; later output is lost."""
        self._closed = True
        for file in self._files.values():
            file.close()


class _Divided:
    """A standard stream; what agents write goes to the files of their rollouts."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self._name = stream, name

    def write(self, text: str) -> int:
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

    A task that asyncio starts, and a thread of `asyncio.to_thread`, belongs to the agent that
    started it; a logger's handler keeps the stream that it was made with.
    """

    def __init__(self) -> None:
        self._streams: dict[str, _Divided] = {}

    @contextmanager
    def of(self, log: Path) -> Iterator[None]:
        """Send what the current task prints to the files of a rollout."""
        for name in ("stdout", "stderr"):
            if name not in self._streams:
                self._streams[name] = _Divided(getattr(sys, name), name)
                setattr(sys, name, self._streams[name])
        output = RolloutOutput(log)
        token = _current.set(output)
        try:
            yield
        finally:
            _current.reset(token)
            output.close()

    def restore(self) -> None:
        """Put the streams back, unless somebody else has replaced them."""
        for name, divided in self._streams.items():
            if getattr(sys, name) is divided:
                setattr(sys, name, divided.stream)
        self._streams.clear()
