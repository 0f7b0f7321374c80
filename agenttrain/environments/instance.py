"""One live object of a user's environment class: made, called one at a time, closed once."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from agenttrain.threads import DaemonThreads, attempt, attempt_async

IDLE_S = 3600.0
"""An object's thread waits this long for its next call: models may sample for minutes."""
_ABANDONED: set[asyncio.Future[Any]] = set()
"""Calls that were given up and still run; the event loop itself keeps no strong reference."""


class TookTooLong(TimeoutError):
    """A time limit of ours passed; user code raises TimeoutError for reasons of its own."""


async def bounded(work: Awaitable[Any], seconds: float) -> Any:
    """Await `work` for at most `seconds`; then leave it to itself and raise TookTooLong.

    Unlike asyncio.timeout it does not wait for what ignores its cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            _ABANDONED.add(task)
            task.add_done_callback(_discard)
            task.cancel()
    if not task.done():
        raise TookTooLong(f"it took longer than {seconds:g} s")
    return task.result()


def _discard(task: asyncio.Future[Any]) -> None:
    _ABANDONED.discard(task)
    if not task.cancelled():
        task.exception()  # read, or asyncio complains that nobody did


class Instance:
    """Blocking methods run off the event loop, one after the other, in one and the same thread.

    So an object may hold what belongs to a thread (an SQLite connection, a browser). Only where a
    call was given up while it ran does the next one get another thread, and waits for it there.
    """

    def __init__(self, label: str, limit_s: float) -> None:
        """`limit_s` is what a call may take: one that was given up counts as overdue after it."""
        self._limit_s = limit_s
        self.made: Any = None
        self._given_up = False
        self._running = 0
        self._label = label
        self._threads = DaemonThreads(idle_s=IDLE_S)
        self._busy = threading.Lock()
        self._lock = threading.Lock()
        self._closing = False

    @property
    def fit(self) -> bool:
        """True while it may be used again: no call runs, and none was given up half-way."""
        return not (self._running or self._given_up)

    @property
    def stuck(self) -> tuple[str, ...]:
        """The label, once for each call that was given up and still runs."""
        return self._threads.stuck

    @property
    def overdue(self) -> tuple[str, ...]:
        """The label, once for each of those that had all the time that a call may take."""
        return self._threads.overdue

    async def make(self, make: Callable[[], object]) -> None:
        """Construct the object; one that comes into being after `close` is closed at once."""

        def work() -> None:
            made = make()
            with self._lock:
                self.made, late = made, self._closing
            if late:
                attempt(lambda: _close_in_thread(made))

        await self._in_thread(work)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the object, sync or async; raises what it raises."""
        self._running += 1
        try:
            if inspect.iscoroutinefunction(function):
                return await self._on_loop(function(*args, **kwargs))
            value = await self._in_thread(lambda: function(*args, **kwargs))
            return await self._on_loop(value) if inspect.isawaitable(value) else value
        except asyncio.CancelledError:
            self._given_up = True
            raise
        finally:
            self._running -= 1

    async def close(self, seconds: float) -> None:
        """Close the object, the first time this is called; raises what its `close` raises.

        Does not wait for a call that was given up: closing may be what ends it.
        """
        with self._lock:
            if self._closing:
                return
            self._closing, made = True, self.made
        close = getattr(made, "close", None)
        try:
            if close is not None:
                # Shielded, so that a second Ctrl-C does not take it back.
                await asyncio.shield(asyncio.ensure_future(bounded(self._close(close), seconds)))
        finally:
            self._threads.close()

    async def _close(self, close: Callable[[], Any]) -> None:
        if inspect.iscoroutinefunction(close):
            await self._on_loop(close())
            return
        value = _value(await self._threads.run(close, label=self._label))
        if inspect.isawaitable(value):
            await self._on_loop(value)

    async def _on_loop(self, awaitable: Awaitable[Any]) -> Any:
        deadline = time.monotonic() + 0.9 * self._limit_s
        return _value(
            await attempt_async(
                awaitable, threads=self._threads, label=self._label, deadline=deadline
            )
        )

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        given_up = threading.Event()
        # A little early, so that it has passed when the limit's timer says so.
        deadline = time.monotonic() + 0.9 * self._limit_s

        def work() -> Any:
            with self._busy:
                return None if given_up.is_set() else function()

        try:
            return _value(await self._threads.run(work, label=self._label, deadline=deadline))
        except asyncio.CancelledError:
            given_up.set()
            raise


def _value(outcome: Any) -> Any:
    if outcome.error is None:
        return outcome.value
    if isinstance(outcome.error, Exception):
        raise outcome.error
    # SystemExit or KeyboardInterrupt of the user's code, which must not end the run.
    error = outcome.error
    raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _close_in_thread(made: Any) -> None:
    """Close an object in a thread that has no event loop."""
    close = getattr(made, "close", None)
    value = close() if close is not None else None
    if inspect.isawaitable(value):

        async def wait() -> None:  # asyncio.run takes a coroutine, not every awaitable
            await value

        asyncio.run(wait())
