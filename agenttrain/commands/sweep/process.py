"""A job's process: `agenttrain` in a fresh interpreter, which no job shares with another."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from agenttrain.utils.child_process import ChildProcess, end_with_parent
from agenttrain.utils.signals import handling, hear_interrupts, leave_terminal

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
GRACE_S = 60.0
"""Seconds between SIGTERM and SIGKILL for a job whose sweep ends with an exception."""
PARENT = "AGENTTRAIN_SWEEP_PROCESS"
"""Environment of a job: the process that started it."""
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
        """Start `agenttrain <arguments>`.

        `output` is a file for its output; None: the terminal. `environment` is added to this
        process's.
        """
        with nullcontext() if output is None else output.open("ab+") as file:
            self._process = ChildProcess(
                [sys.executable, "-m", "agenttrain.cli", *arguments],
                # A keeper process would kill all that a killed run leaves, but its trackers and
                # servers are to outlive it, to clean up.
                keeper=False,
                env={**os.environ, **(environment or {}), PARENT: str(os.getpid())},
                tail_bytes=TAIL,
                output=file,
                show=file is None,
            )

    def poll(self) -> JobEnd | None:
        """Return how the process ended; None while it runs."""
        code = self._process.code
        if code is None:
            return None
        self._process.kill()  # it has ended already: this closes its files
        lines = [line.strip() for line in self._process.printed().splitlines()]
        last_words = next((line for line in reversed(lines) if line), "")
        # Python's code -15 for signal 15 is 143 in a shell.
        return JobEnd(code=128 - code if code < 0 else code, last_words=last_words)

    def send(self, number: int) -> None:
        """Send the process the signal `number`, if it still runs."""
        self._process.signal(signal.Signals(number))

    def stop(self) -> None:
        """End the process, if it still runs."""
        self.send(signal.SIGTERM)
        self._process.wait_for_end(GRACE_S)
        self._process.kill()


@dataclass(slots=True)
class Forwarder:
    """Signal handler of a sweep's process, which passes signals on to the jobs."""

    jobs: list[JobProcess] = field(default_factory=list)
    """Jobs that run."""
    received: list[int] = field(default_factory=list)
    """Numbers of the signals that came, in order."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        leave_terminal()  # printing would fail if it is closed
        for job in self.jobs:
            job.send(number)

    def add(self, job: JobProcess) -> None:
        """Add a job, and send it the signals that came while it was being started."""
        self.jobs = [*self.jobs, job]  # a new list: a signal may be looping over the old one
        for number in list(self.received):
            job.send(number)


@contextmanager
def forward_signals() -> Iterator[Forwarder]:
    """Forward this process's signals to the jobs, which are stopped at the end of the context."""
    forwarder = Forwarder()
    with handling(FORWARDED, forwarder):
        try:
            yield forwarder
        finally:
            for job in forwarder.jobs:
                job.stop()


def end_with_sweep(environment: MutableMapping[str, str] = os.environ) -> None:
    """Kill this process, if it is a job of a sweep, as soon as the sweep's process has ended.

    A job also handles SIGINT, which its sweep passes on.
    """
    # Removed, so that the job's own child processes do not take themselves for jobs.
    sweep_pid = environment.pop(PARENT, None)
    if sweep_pid is not None:
        hear_interrupts()
        end_with_parent(parent=int(sweep_pid))
