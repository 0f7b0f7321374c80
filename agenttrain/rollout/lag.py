"""Does something hold the event loop? An async tool that blocks stalls every rollout at once."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import warnings
from collections.abc import Callable
from types import TracebackType

BEAT_S = 0.05
"""Seconds between two signs of life of the event loop."""


class LoopMonitor:
    """Measures, while it is entered, how long the event loop stands still, and says what holds it.

    A thread watches, so that a loop that never comes back is told too. Example::

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
