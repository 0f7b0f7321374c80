"""Blocking functions off the event loop, in daemon threads that never keep the process alive.

`asyncio.to_thread` shares a handful of threads, so that one blocking function delays the others,
and the interpreter waits for every one of them at exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

Inbox = queue.SimpleQueue["_Job | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a function returned, or what it raised."""

    value: object = None
    error: BaseException | None = None


def attempt(function: Callable[[], object]) -> Outcome:
    """Call `function` and keep whatever it raises, SystemExit and KeyboardInterrupt included."""
    try:
        return Outcome(value=function())
    except BaseException as error:
        return Outcome(error=error)


def blocks(function: Callable[..., object]) -> bool:
    """Whether a call occupies its thread: neither the function nor its `__call__` is async."""
    routines = (function, getattr(function, "__call__", None))  # noqa: B004
    return not any(inspect.iscoroutinefunction(routine) for routine in routines)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    function: Callable[[], object]
    label: str
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Outcome]
    deadline: float
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    finished: bool = False

    def deliver(self, outcome: Outcome) -> None:
        # RuntimeError: the loop is closed, nobody waits any more.
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(_resolve, self.future, outcome)


def _resolve(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)


class DaemonThreads:
    """As many daemon threads as calls at once; the caller bounds how many that are.

    A thread whose caller gave up is left alone and replaced; when its function returns after all,
    the result is discarded and the thread is free again.

    Example: ``(await DaemonThreads().run(lambda: 2 + 2)).value == 4``
    """

    def __init__(self, *, idle_s: float = 30.0) -> None:
        """An idle thread ends after `idle_s` seconds."""
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[Inbox] = []
        self._stuck: list[_Job] = []

    @property
    def stuck(self) -> tuple[str, ...]:
        """Labels of the functions that still run although their caller gave up."""
        with self._lock:
            return tuple(job.label for job in self._stuck)

    @property
    def overdue(self) -> tuple[str, ...]:
        """Labels of those whose deadline has passed too: they are not about to end."""
        now = time.monotonic()
        with self._lock:
            return tuple(job.label for job in self._stuck if job.deadline <= now)

    async def run(
        self, function: Callable[[], object], *, label: str = "", deadline: float = 0.0
    ) -> Outcome:
        """Run `function` in a thread of its own; cancelling the caller abandons it there.

        `deadline`, on the clock of time.monotonic, is when it should have ended.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        job = _Job(function=function, label=label, loop=loop, future=future, deadline=deadline)
        self._hand_over(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def close(self) -> None:
        """End the idle threads."""
        with self._lock:
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _hand_over(self, job: _Job) -> None:
        with self._lock:
            inbox: Inbox | None = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), daemon=True).start()
        inbox.put(job)

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            if not job.finished:
                self._stuck.append(job)

    def _work(self, inbox: Inbox) -> None:
        """A thread's life: jobs from its inbox, until it is told to end or long idle."""
        while True:
            try:
                job = inbox.get(timeout=self._idle_s)
            except queue.Empty:
                if self._retire(inbox):
                    return
                continue
            if job is None:
                return
            outcome = job.context.run(attempt, job.function)
            self._finish(job, inbox)
            job.deliver(outcome)
            del job, outcome  # an idle thread must not keep a result alive

    def _retire(self, inbox: Inbox) -> bool:
        """Leave the idle threads; False when a job is on its way."""
        with self._lock:
            if inbox not in self._idle:
                return False
            self._idle.remove(inbox)
            return True

    def _finish(self, job: _Job, inbox: Inbox) -> None:
        """The thread is idle before the result is out, so that the next call finds it."""
        with self._lock:
            job.finished = True
            if job in self._stuck:
                self._stuck.remove(job)
            self._idle.append(inbox)
