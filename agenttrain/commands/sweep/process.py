"""A job's process: `agenttrain` in a fresh interpreter, which no job shares with another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import IO

from agenttrain.utils.signals import hear_interrupts, leave_terminal

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_S = 60.0
"""Seconds between SIGTERM and SIGKILL for a job whose sweep ends with an exception."""
PIPE_S = 5.0
"""Longest wait for the end of the pipe, which a process that the job left behind may keep open."""
PARENT = "AGENTTRAIN_SWEEP_PROCESS"
"""Environment of a job: the process that started it."""
WATCH_S = 1.0
"""Seconds between two checks that the sweep is alive, on systems other than Linux."""
TAIL = 4096
"""Bytes of the end of a job's messages that are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnd:
    """How a job's process ended."""

    code: int
    """Exit code as in a shell: 130 after Ctrl-C, 128 + n after signal n."""
    last_words: str
    """The last line of its messages."""


class JobProcess:
    """The running process of a job. It is killed if this process ends first."""

    def __init__(
        self,
        arguments: Sequence[str],
        output: Path | None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `agenttrain <arguments>`, from the main thread: see `end_with_sweep`.

        `output` is a file for its output; None: the terminal. `environment` is added to this
        process's.
        """
        self._output = output
        file = None if output is None else output.open("ab")
        # A group of its own: Ctrl-C reaches it once, through this process, and not twice.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agenttrain.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.PIPE if file is None else file,
            process_group=0,
            env={**os.environ, **(environment or {}), PARENT: str(os.getpid())},
        )
        if file is not None:
            file.close()
        self._tail = b""
        self._reader = Thread(target=self._pass_on, args=[self._process.stderr], daemon=True)
        if output is None:
            self._reader.start()

    def ended(self) -> JobEnd | None:
        """Return how the process ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        if self._output is None:
            self._reader.join(PIPE_S)
            tail = self._tail
        else:
            tail = self._output.read_bytes()[-TAIL:]
        lines = [line.strip() for line in tail.decode(errors="replace").splitlines()]
        last_words = next((line for line in reversed(lines) if line), "")
        return JobEnd(code=128 - code if code < 0 else code, last_words=last_words)

    def send(self, number: int) -> None:
        """Send the process a signal, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def stop(self) -> None:
        """End the process, if it still runs."""
        if self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _pass_on(self, pipe: IO[bytes]) -> None:
        """Print the messages of the job and store their end."""
        with pipe:
            while chunk := pipe.read1():  # type: ignore[attr-defined]
                self._tail = (self._tail + chunk)[-TAIL:]
                with suppress(OSError, ValueError):
                    sys.stderr.buffer.write(chunk)
                    sys.stderr.buffer.flush()


@dataclass(slots=True)
class Forwarder:
    """Signal handler that passes signals on to the jobs."""

    jobs: list[JobProcess] = field(default_factory=list)
    received: list[int] = field(default_factory=list)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        leave_terminal()
        for job in self.jobs:
            job.send(number)

    def add(self, job: JobProcess) -> None:
        """Add a job, and send it the signals that came while it was being started."""
        self.jobs = [*self.jobs, job]
        for number in list(self.received):
            job.send(number)


@contextmanager
def forward_signals() -> Iterator[Forwarder]:
    """Forward this process's signals to the jobs, which are stopped at the end of the context."""
    forwarder = Forwarder()
    # Under nohup SIGHUP is ignored, by the jobs too: it must not end the sweep with its terminal.
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = [number for number in FORWARDED if number != signal.SIGHUP or not ignored]
    before = {number: signal.signal(number, forwarder) for number in numbers}
    try:
        yield forwarder
    finally:
        for job in forwarder.jobs:
            job.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def end_with_sweep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Kill this process, if it is a job, as soon as the process that started it has ended.

    On Linux the kernel does so at once when the thread that started the job ends. On other systems
    a thread checks every `WATCH_S`. A job hears the SIGINT that its sweep passes on.
    """
    number = environment.pop(PARENT, None)
    if number is None:
        return
    hear_interrupts()
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
    if os.getppid() != parent:  # it had ended before the call above
        os.kill(os.getpid(), signal.SIGKILL)
