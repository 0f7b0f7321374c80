"""Wall seconds of a run by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

Within = Callable[[str], AbstractContextManager[object]]


class Clock:
    """Wall seconds by phase.

    Example: ``with clock("train"): …`` adds to ``clock.seconds["train"]``.
    """

    def __init__(self, within: Within = nullcontext) -> None:
        """Enter `within(phase)` for each phase, for others that want to know of it."""
        self.seconds: dict[str, float] = {}
        self._within = within

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self._within(phase):
                yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed
