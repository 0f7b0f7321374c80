"""Does something hold the event loop? An async tool that blocks stalls every rollout at once."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType

BEAT_S = 0.05
"""Seconds between two signs of life of the event loop."""


class LoopMonitor:
    """Measures, while it is entered, how long the event loop stands still, and says what holds it.

    A thread watches, so that a loop that never comes back is told too. Example::

        async with LoopMonitor(1.0, lambda: toolbox.awaited) as monitor:
            …
        monitor.max_lag_s   # e.g. 0.003
    """

    def __init__(self, limit_s: float, suspects: Callable[[], Sequence[str]]) -> None:
        """Above `limit_s` a warning, once, names the `suspects` of that moment."""
        self.max_lag_s = 0.0
        self._limit_s = limit_s
        self._suspects = suspects
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
        while not self._over.wait(self._limit_s / 2):
            if time.monotonic() - self._seen > self._limit_s + BEAT_S:
                warnings.warn(self._finding(), RuntimeWarning, stacklevel=1)
                return

    def _finding(self) -> str:
        frame = sys._current_frames().get(self._thread)
        where = ""
        if frame is not None:
            code = frame.f_code
            where = f", in {code.co_name} ({code.co_filename}:{frame.f_lineno})"
        names = self._suspects()
        running = f"async tools running: {', '.join(names)}" if names else "no async tool runs"
        return (
            f"the event loop stands still for over {self._limit_s:g} s{where}, and all rollouts "
            f"with it; {running}. A blocking function should be a plain `def`, which gets a thread "
            "of its own, or have isolation=process (limit: rollout.max_loop_lag_s)"
        )
