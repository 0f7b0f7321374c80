"""The end of a run that makes no progress: write evidence, then end the process.

Runs in a thread of the watchdog. It does not wait for the event loop, takes no lock of ours, and
does not rely on the disk to answer.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from agenttrain.rollout.monitoring import Waiting
from agenttrain.tracking.followers import tracker_processes
from agenttrain.utils.exit_codes import STALLED

WRITE_S = 20.0
"""Time limit for writing the evidence, because the disk may be the cause of the stall."""
SHOWN = 200
"""Most rollouts in the table, and most stacks of asyncio tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The evidence of a stall."""

    message: str
    """One line: phase, step, seconds, setting."""
    waiting: Sequence[Waiting]
    tasks: Sequence[tuple[str, asyncio.Task]]
    """Each rollout's id and the asyncio task that drives it."""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the evidence."""
        yield self.message
        yield f"\nrollouts in flight: {len(self.waiting)}"
        yield from map(str, self.waiting[:SHOWN])
        if self.tasks:
            yield "\nwhere their coroutines wait, the innermost call last:"
        for name, task in self.tasks[:SHOWN]:
            calls, coroutine = [], task.get_coro()
            # Follow the chain of awaits: a task's own stack ends at its first one.
            while coroutine is not None:
                frame: FrameType | None = _attribute(coroutine, "cr_frame", "gi_frame", "ag_frame")
                if frame is not None:
                    code = frame.f_code
                    calls.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
                coroutine = _attribute(coroutine, "cr_await", "gi_yieldfrom", "ag_await")
            yield f"{name}: {' > '.join(calls) or 'at its end'}"
        yield "\nstacks of all threads, the innermost call first:"
        yield from stacks()


def end_run(stall: Stall, path: Path, record: Callable[[], None]) -> None:
    """Write the evidence to `path` and stderr, call `record`, kill all children, end this process.

    `record` notes the stall in the run's summary. Does not return. The exit code is STALLED.
    """

    def write_to_stderr() -> None:
        """Write `text`, which is composed below."""
        # Not through Python's buffer, whose lock another thread may hold.
        unsent = text.encode(errors="replace")
        while unsent:
            unsent = unsent[os.write(2, unsent) :]

    def run(write: Callable[[], object]) -> None:
        with suppress(Exception):
            write()

    try:
        try:
            text = "\n".join(stall.lines()) + "\n"
        except Exception as error:  # the table changes while it is read
            problem = f"(no table of rollouts: {error!r})"
            text = "\n".join([stall.message, problem, *stacks()]) + "\n"
        # One thread each: a full pipe must not delay the file, nor a slow disk the pipe.
        writes: tuple[Callable[[], object], ...] = (
            lambda: path.write_text(text, encoding="utf-8", errors="replace"),
            record,
            write_to_stderr,
        )
        deadline = time.monotonic() + WRITE_S
        threads = [threading.Thread(target=run, args=(write,), daemon=True) for write in writes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0))
        # Kill all descendants (engines, tools) but trackers, which report the stall and end.
        with suppress(psutil.Error):
            descendants = psutil.Process().children(recursive=True)
            tracker_pids = tracker_processes(descendants)
            children = [child for child in descendants if child.pid not in tracker_pids]
            for child in children:
                with suppress(psutil.Error):
                    child.send_signal(signal.SIGKILL)
            psutil.wait_procs(children, timeout=5)
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a live display hides the cursor
    finally:
        os._exit(STALLED)


def stacks() -> Iterator[str]:
    """Yield the stack of every thread, without source lines: nothing is read from disk."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, top in sys._current_frames().items():
        yield f"\nthread {names.get(number, number)}:"
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
            frame = frame.f_back


def _attribute(awaitable: Any, *names: str) -> Any:
    """Return the first of these attributes that an awaitable has, or None.

    Coroutines, generators and asynchronous generators have other names for the same attribute.
    """
    values = (getattr(awaitable, name, None) for name in names)
    return next((value for value in values if value is not None), None)
