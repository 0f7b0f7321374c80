"""The end of a run that makes no progress: evidence is written, then the process ends.

Runs in a thread of the watchdog's, whatever the others do: nothing here waits for the event loop,
takes a lock of ours, or trusts the disk to answer.
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
from agenttrain.utils.exit_codes import STALLED

WRITE_S = 20.0
"""Longest that the evidence may take to write: the disk may be what stalls."""
SHOWN = 200
"""Rollouts of the table, and stacks of the event loop's tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The evidence of a stall."""

    message: str
    """One line: phase, step, seconds, setting."""
    waiting: Sequence[Waiting]
    tasks: Sequence[tuple[str, asyncio.Task]]
    """By rollout: the task that drives it."""

    def lines(self) -> Iterator[str]:
        """Yield all of the evidence."""
        yield self.message
        yield f"\nrollouts in flight: {len(self.waiting)}"
        yield from map(str, self.waiting[:SHOWN])
        if self.tasks:
            yield "\nwhere their coroutines wait, the innermost call last:"
        for name, task in self.tasks[:SHOWN]:
            calls, waits = [], task.get_coro()
            while waits is not None:  # a task's own stack ends at its first await
                frame: FrameType | None = _first(waits, "cr_frame", "gi_frame", "ag_frame")
                if frame is not None:
                    code = frame.f_code
                    calls.append(f"{code.co_name} ({Path(code.co_filename).name}:{frame.f_lineno})")
                waits = _first(waits, "cr_await", "gi_yieldfrom", "ag_await")
            yield f"{name}: {' > '.join(calls) or 'at its end'}"
        yield "\nstacks of all threads, the innermost call first:"
        yield from stacks()


def end(stall: Stall, path: Path, record: Callable[[], None]) -> None:
    """Write the evidence to `path` and to stderr, `record` it, end all children and this process.

    Does not return; the exit code is STALLED.
    """
    try:
        _write_evidence(stall, path, record)
        end_children()
        if sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # a live display hides the cursor
    finally:
        os._exit(STALLED)


def _write_evidence(stall: Stall, path: Path, record: Callable[[], None]) -> None:
    """Write to file, summary and stderr, each in a thread of its own: a full pipe must not delay
    the file, nor a slow disk the pipe."""

    def run(work: Callable[[], object]) -> None:
        with suppress(Exception):
            work()

    def write_to_stderr() -> None:
        # Past Python's buffer, whose lock another thread may hold.
        left = text.encode(errors="replace")
        while left:
            left = left[os.write(2, left) :]

    try:
        text = "\n".join(stall.lines()) + "\n"
    except Exception as error:  # the table changes while it is read
        text = "\n".join([stall.message, f"(no table of rollouts: {error!r})", *stacks()]) + "\n"
    until = time.monotonic() + WRITE_S
    works: tuple[Callable[[], object], ...] = (
        lambda: path.write_text(text, encoding="utf-8", errors="replace"),
        record,
        write_to_stderr,
    )
    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))


def stacks() -> Iterator[str]:
    """Yield the stack of every thread, from code alone: nothing is read from disk."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, top in sys._current_frames().items():
        yield f"\nthread {names.get(number, number)}:"
        frame: FrameType | None = top
        while frame is not None:
            code = frame.f_code
            yield f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}'
            frame = frame.f_back


def _first(thing: Any, *names: str) -> Any:
    return next((v for name in names if (v := getattr(thing, name, None)) is not None), None)


def end_children() -> None:
    """Kill every process that descends from this one: engines, tools, the dashboard's."""
    with suppress(psutil.Error):
        children = psutil.Process().children(recursive=True)
        for child in children:
            with suppress(psutil.Error):
                child.send_signal(signal.SIGKILL)
        psutil.wait_procs(children, timeout=5)
