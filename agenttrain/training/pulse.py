"""Heartbeats: a process that waits without a deadline notices when the process it waits for has
died.

Each process counts up in the store from a thread of its own, which stands still with the process:
when it is stopped, its machine hangs, or C code keeps the interpreter to itself.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

LONGEST_LOOK_S = 2.0
"""Longest time between two checks that counts as waiting: in a longer one this process itself had
been stopped."""
LEAVE_S = 5.0
"""Seconds for the thread to end; only a store that hangs keeps it longer."""


class Pulse:
    """This process's counter, and a view of the others'."""

    def __init__(self, store: Any, rank: int, limit_s: float) -> None:
        """A process whose counter stands still for `limit_s` is silent. The store (of torch's)
        is reached by a connection of its own, which nobody's wait occupies."""
        self._store = store.clone()
        self._rank, self._limit_s = rank, limit_s
        self._every_s = min(limit_s / 8, 5.0)
        self._seen: dict[int, _Seen] = {}
        self._before = time.monotonic()
        self._over = threading.Event()

    def start(self) -> None:
        """Count from now on, until the process ends or the store is gone."""

        def count() -> None:
            number = 0
            with suppress(dist.DistError):  # nobody waits in the store for a process that lost it
                while not self._over.wait(self._every_s if number else 0):
                    number += 1
                    self._store.set(_key(self._rank), str(number))

        thread = threading.Thread(target=count, name="pulse", daemon=True)
        thread.start()

        def end() -> None:
            self._over.set()
            thread.join(LEAVE_S)

        # A thread that is in C++ while the interpreter ends would abort the process.
        atexit.register(end)

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that have shown life once, and none for long; call it often."""
        now = time.monotonic()
        passed = min(now - self._before, LONGEST_LOOK_S)
        self._before = now
        silent = []
        for rank in ranks:
            seen = self._seen.setdefault(rank, _Seen())
            count = self._counter(rank)
            seen.idle_s = seen.idle_s + passed if count is not None and count == seen.count else 0.0
            seen.count = count
            if seen.idle_s > self._limit_s:
                silent.append(rank)
        return silent

    def still(self, ranks: Iterable[int]) -> list[int]:
        """Watch the counters for some seconds and return the ranks whose counter did not move."""
        before = {rank: self._counter(rank) for rank in ranks}
        time.sleep(3 * self._every_s)
        return [rank for rank, count in before.items() if self._counter(rank) == count]

    def _counter(self, rank: int) -> bytes | None:
        return self._store.get(_key(rank)) if self._store.check([_key(rank)]) else None


@dataclass(slots=True)
class _Seen:
    """A counter's last value, and how long it has been seen standing still."""

    count: bytes | None = None
    idle_s: float = 0.0


def _key(rank: int) -> str:
    return f"alive/{rank}"
