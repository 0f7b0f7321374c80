"""One job in a process of its own, which gets the signals that this one gets."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import IO

from agenttrain.signals import leave_terminal

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_S = 60.0
"""Of a job whose sweep ends with an exception, between SIGTERM and SIGKILL."""
PIPE_S = 5.0
"""Longest wait for what is left in the pipe; a process that the job left behind may hold it."""
TOLD = 4096
"""Bytes of the end of a job's messages that are looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job's process ended."""

    code: int
    """As shells have it: 130 after Ctrl-C, 128 + n after signal n."""
    signalled: bool
    """Whether this process was told to stop meanwhile, and told the job."""
    last_words: str
    """The last line of its messages."""


@dataclass(slots=True)
class _Forward:
    """Passes signals on, those that come before there is a process too."""

    process: subprocess.Popen[bytes] | None = None
    seen: list[int] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)
        leave_terminal()
        self._send(number)

    def started(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        for number in list(self.seen):
            self._send(number)

    def _send(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


def run(arguments: Sequence[str], output: Path | None) -> Ended:
    """`agenttrain <arguments>` in a fresh interpreter, to its end.

    `output`: a file for all that it says; None: it says it here.
    """
    command = [sys.executable, "-m", "agenttrain.cli", *arguments]
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(output.open("ab"))
        forward = stack.enter_context(_forwarding())
        # A group of its own: Ctrl-C reaches it once, through this process, and not twice.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE if file is None else file,
            process_group=0,
        )
        stack.callback(_stop, process)
        forward.started(process)
        words = _Words(process.stderr)
        code = process.wait()
        said = words.last() if output is None else output.read_bytes()[-TOLD:]
    code = 128 - code if code < 0 else code
    return Ended(code=code, signalled=bool(forward.seen), last_words=_last_line(said))


@contextmanager
def _forwarding() -> Iterator[_Forward]:
    forward = _Forward()
    if current_thread() is not main_thread():  # signals are the main thread's
        yield forward
        return
    # A job inherits that nohup ignores SIGHUP; to forward it would end the sweep with its terminal.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in FORWARDED if number != signal.SIGHUP or not ignored]
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield forward
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Leave no process behind, whatever ended the wait for it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _Words:
    """Passes a job's messages on and keeps their end."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        self._end = b""
        self._thread = Thread(target=self._pass_on, args=(pipe,), daemon=True)
        if pipe is not None:
            self._thread.start()

    def _pass_on(self, pipe: IO[bytes]) -> None:
        with pipe:
            while chunk := pipe.read1():  # type: ignore[attr-defined]
                self._end = (self._end + chunk)[-TOLD:]
                with suppress(OSError, ValueError):
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()

    def last(self) -> bytes:
        """The end of what was said."""
        if self._thread.ident is not None:
            self._thread.join(PIPE_S)
        return self._end


def _last_line(said: bytes) -> str:
    lines = [line.strip() for line in said.decode(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "")
