"""The event loop while rollouts are in flight: what each waits for, and what holds the loop up.

`InFlight` reports the rollouts, `LoopMonitor` measures how long the loop stands still, `Throttle` and
`light_gc` keep it from standing still.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from agenttrain.engines.base import Engine
from agenttrain.tools.toolbox import RunningCall
from agenttrain.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

ENGINE, TOOL, OTHER = "engine", "tool", "other"
"""Things that a rollout can wait for; `other` is its environment, or our own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A rollout, and what it waits for.

    Example: ``Waiting(rollout_id="train-3-0-1", turn=2, kind="tool", what="tool sql (call_1_0)",
    seconds=120.4)``
    """

    rollout_id: str
    turn: int
    """From 1: the one that is sampled, or whose calls run; 0 before the first."""
    kind: str
    what: str
    seconds: float
    """How long it has waited for that."""

    def __str__(self) -> str:
        return f"{self.rollout_id}  turn {self.turn}  {self.seconds:8.1f} s  {self.what}"


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One rollout."""

    rollout_id: str
    task: asyncio.Task | None = field(default_factory=asyncio.current_task)
    turn: int = 0
    asks: bool = False
    """The engine has a request of it."""
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class InFlight:
    """The rollouts of a collector that are on their way, and what each waits for.

    Written on the event loop, read by any thread, also when the loop stands still.
    """

    progress: int = 0
    """Rises with every completion that is asked for or had, and every rollout that ends."""
    _flights: dict[str, Flight] = field(default_factory=dict)

    @contextmanager
    def tracked(self, rollout_id: str, engine: Engine) -> Iterator[Engine]:
        """Within, the rollout is in flight; it must use the engine that this gives."""
        flight = self._flights[rollout_id] = Flight(rollout_id=rollout_id)
        try:
            yield TrackedEngine(engine, self, flight)
        finally:
            del self._flights[rollout_id]
            self.progress += 1

    def asks(self, flight: Flight, *, asks: bool) -> None:
        """The rollout asks the engine for its next turn, or has been answered."""
        flight.asks, flight.since = asks, time.monotonic()
        flight.turn += asks
        self.progress += 1

    def waiting(self, calls: Iterable[RunningCall]) -> list[Waiting]:
        """A row per rollout, the longest wait first; `calls` are those of all toolboxes."""
        now = time.monotonic()
        running: dict[str, list[RunningCall]] = {}
        for call in calls:
            running.setdefault(call.rollout_id, []).append(call)
        rows = [_row(f, running.get(f.rollout_id, ()), now) for f in tuple(self._flights.values())]
        return sorted(rows, key=lambda row: -row.seconds)

    def tasks(self) -> list[tuple[str, asyncio.Task]]:
        """Each rollout with the task that drives it."""
        flights = tuple(self._flights.values())
        return [(flight.rollout_id, flight.task) for flight in flights if flight.task is not None]


def _row(flight: Flight, calls: Sequence[RunningCall], now: float) -> Waiting:
    kind, what, since = OTHER, "its environment, or agenttrain's own code", flight.since
    if flight.asks:
        kind, what = ENGINE, "the engine"
    elif calls:
        kind, since = TOOL, min(call.since for call in calls)
        what = ", ".join(f"tool {call.tool} ({call.call_id})" for call in calls)
    return Waiting(
        rollout_id=flight.rollout_id, turn=flight.turn, kind=kind, what=what, seconds=now - since
    )


class TrackedEngine:
    """An engine as one rollout sees it; every request is noted."""

    def __init__(self, engine: Engine, in_flight: InFlight, flight: Flight) -> None:
        self._engine, self._in_flight, self._flight = engine, in_flight, flight
        self.max_context = engine.max_context

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Sampling,
        *,
        session: str,
        parent: str | None = None,
        images: Sequence[object] = (),
    ) -> Completion:
        """Sample from the engine, counted as waiting for it meanwhile."""
        self._in_flight.asks(self._flight, asks=True)
        try:
            return await self._engine.generate(
                token_ids, sampling, session=session, parent=parent, images=images
            )
        finally:
            self._in_flight.asks(self._flight, asks=False)

    async def release(self, session: str) -> None:
        """Pass on to the engine."""
        await self._engine.release(session)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Pass on to the engine."""
        await self._engine.update(weights, version)

    async def aclose(self) -> None:
        """Pass on to the engine."""
        await self._engine.aclose()


BEAT_S = 0.05
"""Seconds between two signs of life of the event loop."""


class LoopMonitor:
    """Measures, while it is entered, how long the event loop stands still, and says what holds it.

    An async tool that blocks stalls every rollout at once. A thread watches, so that a loop that
    never comes back is reported too. Example::

        async with LoopMonitor(1.0, toolbox.blocking) as monitor:
            …
        monitor.max_lag_s   # e.g. 0.003
    """

    def __init__(self, limit_s: float, blocking: Callable[[float], str | None]) -> None:
        """`blocking` says which tool holds the loop for that long: above `limit_s`, a warning.

        Many rollouts that are ready at once make a lag too, which is no tool's fault.
        """
        self.max_lag_s = 0.0
        self._limit_s = limit_s
        self._blocking = blocking
        self._over = threading.Event()

    async def __aenter__(self) -> LoopMonitor:
        self._seen = time.monotonic()
        self._thread = threading.get_ident()
        self._beating = asyncio.create_task(self._beat())
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._note()
        self._beating.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._note()

    def _note(self) -> None:
        now = time.monotonic()
        self.max_lag_s = max(self.max_lag_s, now - self._seen - BEAT_S)
        self._seen = now

    def _watch(self) -> None:
        while not self._over.wait(self._limit_s / 4):
            name = self._blocking(self._limit_s)
            if name is not None:
                warnings.warn(self._finding(name), RuntimeWarning, stacklevel=1)
                return

    def _finding(self, name: str) -> str:
        frame = sys._current_frames().get(self._thread)
        where = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
        return (
            f"tool {name}: it is async and has held the event loop for over {self._limit_s:g} s, "
            f"and all rollouts with it{where}; make it a plain `def`, which gets a thread of its "
            f"own (limit: rollout.max_loop_lag_s={self._limit_s:g})"
        )


AT_ONCE = 64
"""Rollouts that go on in one pass of the event loop: about 20 ms of work."""


class Throttle:
    """Throttle: resumes at most `at_once` rollouts per pass of its event loop, in their order.

    A turn's own work takes a fraction of a millisecond, but an engine or a tool may answer
    thousands of rollouts between two looks at the clock. Were they all to go on in one pass, time
    limits would pass meanwhile although what they limit is done.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def wait(self) -> None:
        """Return when it is the caller's turn: at once, unless many came before in this pass."""
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled, self._left = True, self._at_once
            loop.call_soon(self._next, loop)
        if self._left > 0 and not self._waiting:
            self._left -= 1
            return
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new pass: who waits longest goes on in it."""
        self._left = self._at_once
        while self._waiting and self._left > 0:
            future = self._waiting.popleft()
            if not future.done():  # a rollout may have been cancelled meanwhile
                future.set_result(None)
                self._left -= 1
        self._scheduled = self._left < self._at_once
        if self._scheduled:
            loop.call_soon(self._next, loop)


YOUNG = 20_000
"""Objects made before the youngest are looked at; Python's own 700 to 2,000 suit small heaps."""


class _Heap:
    """State of this process's heap."""

    ours = False
    """It is frozen by a `light_gc`."""
    theirs = False
    """It was found frozen by somebody else. Not asked again: the count walks the frozen heap, a
    tenth of a second beside vLLM, which freezes its own."""


@contextmanager
def light_gc() -> Iterator[None]:
    """Within, Python's cyclic garbage collector looks at new objects only, and less often.

    It stops the event loop: a full collection visits every object of the process, a third of a
    second with torch and transformers imported, and rollouts make so many objects that it comes
    every second or so. All is as before afterwards.

    Objects that existed before are set aside, at no cost and not for good. A process that has
    frozen its heap itself, and a `light_gc` inside another, are left alone.
    """
    _Heap.theirs = _Heap.theirs or (not _Heap.ours and gc.get_freeze_count() > 0)
    if _Heap.ours or _Heap.theirs:
        yield
        return
    thresholds = gc.get_threshold()
    _Heap.ours = True
    gc.freeze()
    if thresholds[0]:  # 0: collections are switched off
        gc.set_threshold(max(YOUNG, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        _Heap.ours = False
        gc.unfreeze()
        gc.set_threshold(*thresholds)
