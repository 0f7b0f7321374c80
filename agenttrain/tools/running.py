"""The calls of tools that run this moment, for reports of what rollouts wait for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from agenttrain.types import ToolContext


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A call that has no answer yet, from the moment that it waits for its turn."""

    rollout_id: str
    tool: str
    call_id: str
    since: float
    """On the clock of time.monotonic."""


class Running:
    """The calls of a toolbox; the event loop writes, any thread may read."""

    def __init__(self) -> None:
        self._calls: dict[int, RunningCall] = {}

    @property
    def calls(self) -> tuple[RunningCall, ...]:
        """Calls that have no answer yet, the oldest first."""
        return tuple(self._calls.values())

    @contextmanager
    def noted(self, context: ToolContext) -> Iterator[None]:
        """Count a call as running within the context."""
        call = RunningCall(
            rollout_id=context.rollout_id,
            tool=context.tool,
            call_id=context.call_id,
            since=time.monotonic(),
        )
        self._calls[id(call)] = call
        try:
            yield
        finally:
            del self._calls[id(call)]
