"""The event loop while rollouts are in flight: what each waits for, and what blocks the loop.

`InFlight` lists the rollouts, `LoopMonitor` measures how long the loop is blocked, `Throttle` and
`light_gc` keep it from being blocked.
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

from agenttrain.engines.base import Engine, Placed
from agenttrain.engines.config import Sampling
from agenttrain.tools.toolbox import RunningCall
from agenttrain.tracking.timeline import Call, Timeline, Turn
from agenttrain.types import Completion, PlacedImage

if TYPE_CHECKING:
    from torch import Tensor

ENGINE, TOOL, OTHER = "engine", "tool", "other"
"""Kinds of things that a rollout waits for; `other` is its environment, or our own code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A rollout in flight and the thing that it waits for.

    Example: ``Waiting(rollout_id="train-3-0-1", turn=2, kind="tool", what="tool sql (call_1_0)",
    seconds=120.4)``
    """

    rollout_id: str
    turn: int
    """Turn that is sampled or whose calls run, from 1; 0 before the first."""
    kind: str
    """`engine`, `tool` or `other`."""
    what: str
    """Name of the thing, for people."""
    seconds: float
    """Duration of the wait so far."""

    def __str__(self) -> str:
        return f"{self.rollout_id}  turn {self.turn}  {self.seconds:8.1f} s  {self.what}"


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """State of one rollout in flight."""

    rollout_id: str
    task: asyncio.Task | None = field(default_factory=asyncio.current_task)
    """The asyncio task that drives the rollout."""
    turn: int = 0
    """Number of requests that the engine got."""
    in_engine: bool = False
    """True while the engine has a request of this rollout."""
    since: float = field(default_factory=time.monotonic)
    """Time at which the last request began or ended; before the first, start of the rollout."""
    turns: list[Turn] = field(default_factory=list)
    """Times of the requests that have ended, for the timeline."""
    calls: list[Call] = field(default_factory=list)
    """Times of the tools' calls that have ended, for the timeline."""


@dataclass(slots=True, eq=False)
class InFlight:
    """The rollouts in flight, and what each waits for.

    `Collector` has one and lists its rollouts by `tracked`, in the thread of the event loop. Any
    thread may read it: the watchdog does so in one of its own.
    """

    progress: int = 0
    """Counter of engine requests sent and answered, and of rollouts that ended."""
    timeline: Timeline = field(default_factory=Timeline)
    """Gets the times of each rollout when it ends."""
    _flights: dict[str, Flight] = field(default_factory=dict)
    _requests: int = 0
    """Requests that the engine has."""
    _idle_since: float = field(default_factory=time.monotonic)
    """Time of the last answer, from which on the engine has no request if `_requests` is 0."""
    _idle_s: float = 0.0
    """Seconds without any request that were over since the last `take_idle_s`."""

    def enter_engine(self) -> None:
        """Count a request that the engine gets."""
        if not self._requests:
            self._idle_s += time.monotonic() - self._idle_since
        self._requests += 1
        self.progress += 1

    def leave_engine(self) -> None:
        """Count a request that the engine has answered."""
        self._requests -= 1
        self._idle_since = time.monotonic()
        self.progress += 1

    def take_idle_s(self) -> float:
        """Return the seconds without any request since the last call."""
        now = time.monotonic()
        idle_s = self._idle_s + (0.0 if self._requests else now - self._idle_since)
        self._idle_s, self._idle_since = 0.0, now
        return idle_s

    @contextmanager
    def tracked(self, rollout_id: str, engine: Engine) -> Iterator[Engine]:
        """List the rollout as in flight for the block; yield the engine that it has to use.

        The yielded engine records the rollout's requests.
        """
        flight = self._flights[rollout_id] = Flight(rollout_id=rollout_id)
        began = flight.since
        try:
            yield TrackedEngine(engine, self, flight)
        finally:
            del self._flights[rollout_id]
            self.progress += 1
            self.timeline.rollout(rollout_id, began, flight.turns, flight.calls)

    def answered(self, call: RunningCall) -> None:
        """Record the end of a tool's call; one that outlives its rollout is left out."""
        if (flight := self._flights.get(call.rollout_id)) is not None:
            flight.calls.append((call.tool, call.since, time.monotonic()))

    def waiting(self, calls: Iterable[RunningCall]) -> list[Waiting]:
        """Return what each rollout in flight waits for, the longest wait first.

        `calls` are the running calls of all toolboxes.
        """
        now = time.monotonic()
        running: dict[str, list[RunningCall]] = {}
        for call in calls:
            running.setdefault(call.rollout_id, []).append(call)
        waiting = []
        for flight in tuple(self._flights.values()):  # a copy: the event loop changes the table
            kind, what, since = OTHER, "its environment, or agenttrain's own code", flight.since
            if flight.in_engine:
                kind, what = ENGINE, "the engine"
            elif rollout_calls := running.get(flight.rollout_id):
                kind, since = TOOL, min(call.since for call in rollout_calls)
                what = ", ".join(f"tool {call.tool} ({call.call_id})" for call in rollout_calls)
            waiting.append(
                Waiting(
                    rollout_id=flight.rollout_id,
                    turn=flight.turn,
                    kind=kind,
                    what=what,
                    seconds=now - since,
                )
            )
        return sorted(waiting, key=lambda entry: -entry.seconds)

    def tasks(self) -> list[tuple[str, asyncio.Task]]:
        """Return each rollout's id with the asyncio task that drives it."""
        flights = tuple(self._flights.values())
        return [(flight.rollout_id, flight.task) for flight in flights if flight.task is not None]


class TrackedEngine:
    """An engine as one rollout uses it; its requests are recorded in `InFlight`."""

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
        images: Sequence[PlacedImage] = (),
    ) -> Completion:
        """Sample from the engine; until it answers, the rollout counts as waiting for it."""
        flight, began = self._flight, time.monotonic()
        flight.in_engine, flight.since = True, began
        flight.turn += 1
        self._in_flight.enter_engine()
        try:
            return await self._engine.generate(
                token_ids, sampling, session=session, parent=parent, images=images
            )
        finally:
            flight.in_engine, flight.since = False, time.monotonic()
            self._in_flight.leave_engine()
            engine = self._engine
            server = engine.server_of(session) if isinstance(engine, Placed) else None
            flight.turns.append((began, flight.since, server))

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
"""Seconds between two heartbeats of the event loop."""


class LoopMonitor:
    """Measures how long the event loop is blocked, and warns of the tool that blocks it.

    An async tool that blocks stalls every rollout at once. A thread watches the loop, so that a
    tool that never returns is reported too. Example::

        async with LoopMonitor(1.0, toolbox.blocking) as monitor:
            …
        monitor.max_lag_s   # e.g. 0.003
    """

    def __init__(self, limit_s: float, blocking: Callable[[float], str | None]) -> None:
        """`blocking(seconds)` returns the tool that has held the loop for that long, or None.

        Lag without such a tool gives no warning: many rollouts that become ready together cause it
        too.
        """
        self.max_lag_s = 0.0
        self._limit_s = limit_s
        self._blocking = blocking
        self._ended = threading.Event()

    async def __aenter__(self) -> LoopMonitor:
        """Measure the lag in a task of this loop, and watch for a blocking tool in a thread."""
        self._last_beat = time.monotonic()
        self._loop_thread = threading.get_ident()

        async def beat() -> None:
            """Wake up every BEAT_S; a late one tells how long the loop was blocked."""
            while True:
                await asyncio.sleep(BEAT_S)
                self._measure()

        self._beating = asyncio.create_task(beat())
        threading.Thread(target=self._warn_of_blocking, daemon=True).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()  # ends the thread of `_warn_of_blocking`
        self._measure()  # the loop may have been blocked since the last beat
        self._beating.cancel()

    def take_max_lag_s(self) -> float:
        """Return the longest time since the last call for which the loop was blocked."""
        self._measure()
        longest, self.max_lag_s = self.max_lag_s, 0.0
        return longest

    def _measure(self) -> None:
        now = time.monotonic()
        self.max_lag_s = max(self.max_lag_s, now - self._last_beat - BEAT_S)
        self._last_beat = now

    def _warn_of_blocking(self) -> None:
        """Warn of the first tool that blocks the loop; runs in the monitor's thread."""
        while not self._ended.wait(self._limit_s / 4):
            name = self._blocking(self._limit_s)
            if name is None:
                continue
            frame = sys._current_frames().get(self._loop_thread)  # the code that blocks the loop
            where = "" if frame is None else f" ({frame.f_code.co_filename}:{frame.f_lineno})"
            warnings.warn(
                f"tool {name}: it is async and has held the event loop for over "
                f"{self._limit_s:g} s, and all rollouts with it{where}; make it a plain `def`, "
                "which gets a thread of its own (limit: "
                f"rollout.max_loop_lag_s={self._limit_s:g})",
                RuntimeWarning,
                stacklevel=1,
            )
            return


PER_PASS = 64
"""Rollouts resumed in one pass of the event loop: about 20 ms of work."""


@dataclass(slots=True, eq=False)
class Throttle:
    """Resumes at most `per_pass` rollouts per pass of the event loop, first come first served.

    An engine or a tool may answer thousands of rollouts together. If all of them resumed in one
    pass, it would take so long that time limits expired although the work was done in time.
    """

    per_pass: int = PER_PASS
    _left: int = 0
    """Rollouts that may still resume in this pass."""
    _waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    _scheduled: bool = False
    """True if the next pass is scheduled."""

    async def wait(self) -> None:
        """Return in this pass of the event loop if it has room, else in a later one.

        In a pass at most `per_pass` rollouts resume, so that timers fire in time when thousands are
        ready together. The first caller of a pass schedules `_resume_next`. In the next pass it
        resumes as many of the waiting rollouts and sets `_left`, the room for callers after them.
        Passes go on until one has resumed nobody.
        """
        loop = asyncio.get_running_loop()
        if not self._scheduled:
            self._scheduled, self._left = True, self.per_pass
            loop.call_soon(self._resume_next, loop)
        if self._left > 0 and not self._waiting:  # not before those that wait
            self._left -= 1
            return
        future = loop.create_future()
        self._waiting.append(future)
        await future

    def _resume_next(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start a new pass: resume the rollouts that have waited longest."""
        self._left = self.per_pass
        while self._waiting and self._left > 0:
            future = self._waiting.popleft()
            if not future.done():  # a rollout may have been cancelled meanwhile
                future.set_result(None)
                self._left -= 1
        # After a pass that resumed nobody there is nothing left to limit.
        self._scheduled = self._left < self.per_pass
        if self._scheduled:
            loop.call_soon(self._resume_next, loop)


YOUNG = 20_000
"""New objects between two collections of the youngest generation; Python's 700 to 2,000 suit small
heaps."""


class _Heap:
    """State of this process's heap, of which there is one."""

    frozen_here = False
    """True while a `light_gc` has frozen it."""
    frozen_elsewhere = False
    """True if other code, such as vLLM's, has frozen it. It stays True: counting the frozen objects
    again takes a tenth of a second."""


@contextmanager
def light_gc() -> Iterator[None]:
    """Freeze existing objects and collect new ones less often for the block.

    A full collection visits every object of the process, which blocks the event loop for a third of
    a second with torch and transformers imported. Rollouts make so many objects that there would be
    one about every second. Does nothing while another `light_gc` goes on, of this task or of
    another, or if other code has frozen the heap.
    """
    if not _Heap.frozen_here and not _Heap.frozen_elsewhere:
        _Heap.frozen_elsewhere = gc.get_freeze_count() > 0  # slow: counts all frozen objects
    if _Heap.frozen_here or _Heap.frozen_elsewhere:
        yield
        return
    thresholds = gc.get_threshold()
    _Heap.frozen_here = True
    gc.freeze()
    if thresholds[0]:  # 0: collections are switched off
        gc.set_threshold(max(YOUNG, thresholds[0]), *thresholds[1:])
    try:
        yield
    finally:
        _Heap.frozen_here = False
        gc.unfreeze()
        gc.set_threshold(*thresholds)
