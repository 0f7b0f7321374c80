"""The rollouts that are on their way, and what each waits for: written on the event loop, read by
any thread, also when the loop stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agenttrain.engine.base import Engine
from agenttrain.tools.running import RunningCall
from agenttrain.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

ENGINE, TOOL, OTHER = "engine", "tool", "other"
"""What a rollout can wait for; `other` is its environment, or our own code."""


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
    """The rollouts of a collector."""

    progress: int = 0
    """Rises with every completion that is asked for or had, and every rollout that ends."""
    _flights: dict[str, Flight] = field(default_factory=dict)

    @contextmanager
    def noted(self, rollout_id: str, engine: Engine) -> Iterator[Engine]:
        """Within, the rollout is in flight; it must use the engine that this gives."""
        flight = self._flights[rollout_id] = Flight(rollout_id=rollout_id)
        try:
            yield NotedEngine(engine, self, flight)
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


class NotedEngine:
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
        """As the engine's."""
        self._in_flight.asks(self._flight, asks=True)
        try:
            return await self._engine.generate(
                token_ids, sampling, session=session, parent=parent, images=images
            )
        finally:
            self._in_flight.asks(self._flight, asks=False)

    async def release(self, session: str) -> None:
        """As the engine's."""
        await self._engine.release(session)

    async def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """As the engine's."""
        await self._engine.update(weights, version)

    async def aclose(self) -> None:
        """As the engine's."""
        await self._engine.aclose()
