"""One job in a process of its own, which gets the signals that this one gets."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread, current_thread, main_thread
from types import FrameType
from typing import IO

from agenttrain.signals import leave_terminal

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_S = 60.0
"""Seconds between SIGTERM and SIGKILL for a job whose sweep ends with an exception."""
PIPE_S = 5.0
"""Longest wait for what is left in the pipe; a process that the job left behind may hold it."""
PARENT = "AGENTTRAIN_SWEEP_PROCESS"
"""Environment of a job: the process that started it."""
WATCH_S = 1.0
"""Seconds between two checks that the sweep lives, where the kernel does not say."""
TOLD = 4096
"""Bytes of the end of a job's messages that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a job's process ended."""

    code: int
    """Exit code as shells have it: 130 after Ctrl-C, 128 + n after signal n."""
    signalled: bool
    """True if this process was told to stop meanwhile, and told the job."""
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


def end_with_sweep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Kill this process, a job, as soon as the one that started it is gone, however.

    On Linux the kernel does it, without delay; elsewhere a thread checks every `WATCH_S`.
    """
    number = environment.pop(PARENT, None)
    if number is None:
        return
    parent = int(number)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os.kill(os.getpid(), signal.SIGKILL)

    if sys.platform == "linux":
        from agenttrain.tools.sandbox import system

        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        Thread(target=watch, daemon=True).start()
    if os.getppid() != parent:  # it was gone before the kernel was asked
        os.kill(os.getpid(), signal.SIGKILL)


def run(arguments: Sequence[str], output: Path | None, *, sweep: int | None = None) -> Ended:
    """Run `agenttrain <arguments>` in a fresh interpreter; it is killed if this process ends first.

    `output`: a file for all that it prints; None: it prints to the terminal. `sweep`: the process
    of the whole sweep. Where this is a child of that (joblib's workers), the job is killed with it.
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
            env={**os.environ, PARENT: str(os.getpid())},
        )
        stack.callback(_stop, process)
        forward.started(process)
        words = _Words(process.stderr)
        code = _wait(process, sweep)
        end = words.last() if output is None else output.read_bytes()[-TOLD:]
    lines = [line.strip() for line in end.decode(errors="replace").splitlines()]
    return Ended(
        code=128 - code if code < 0 else code,
        signalled=bool(forward.seen),
        last_words=next((line for line in reversed(lines) if line), ""),
    )


def _wait(process: subprocess.Popen[bytes], sweep: int | None) -> int:
    """Wait for a job; it is killed when `sweep`, this process's parent, is gone."""
    if os.getppid() != sweep:
        return process.wait()
    while True:
        try:
            return process.wait(WATCH_S)
        except subprocess.TimeoutExpired:
            if os.getppid() != sweep:
                process.kill()


@contextmanager
def _forwarding() -> Iterator[_Forward]:
    """Pass this process's signals on to a job."""
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

        def pass_on() -> None:
            assert pipe is not None
            with pipe:
                while chunk := pipe.read1():  # type: ignore[attr-defined]
                    self._end = (self._end + chunk)[-TOLD:]
                    with suppress(OSError, ValueError):
                        sys.stderr.buffer.write(chunk)
                        sys.stderr.buffer.flush()

        self._thread = Thread(target=pass_on, daemon=True)
        if pipe is not None:
            self._thread.start()

    def last(self) -> bytes:
        """Return the end of the messages."""
        if self._thread.ident is not None:
            self._thread.join(PIPE_S)
        return self._end
