"""Slots and time of a call, which it does not use while it waits for a sub-agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any


class CallSlots:
    """Holds one slot of each semaphore for a call, but not while the call waits for a sub-agent.

    Otherwise a sub-agent that calls the same tool would wait for the call that waits for it.
    Example::

        async with CallSlots([semaphore]) as held:
            delegate = held.lent_while(context.run_policy)
    """

    def __init__(self, slots: Sequence[asyncio.Semaphore]) -> None:
        self._slots = slots
        self._held = self._ended = False
        self._waits = 0
        """Sub-agents that the call waits for."""
        self._started = self._since = time.monotonic()
        self._away_s = 0.0

    async def __aenter__(self) -> CallSlots:
        await self._acquire()
        self._started = time.monotonic()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended = True
        self._release()

    def seconds(self) -> float:
        """Return the seconds since the slots were taken, without those spent on sub-agents."""
        now = time.monotonic()
        away_s = self._away_s + (now - self._since if self._waits else 0.0)
        return now - self._started - away_s

    def lent_while(self, run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return `run`, as it is called without the slots and outside of the call's time."""

        @wraps(run)
        async def lent(*args: Any, **kwargs: Any) -> Any:
            if not self._waits:
                self._since = time.monotonic()
                self._release()
            self._waits += 1
            try:
                return await run(*args, **kwargs)
            finally:
                self._waits -= 1
                if not self._waits and not self._ended:
                    await self._acquire()
                    self._away_s += time.monotonic() - self._since
                    if self._waits or self._ended:
                        self._release()

        return lent

    async def _acquire(self) -> None:
        taken: list[asyncio.Semaphore] = []
        try:
            for slot in self._slots:
                await slot.acquire()
                taken.append(slot)
        except BaseException:
            for slot in taken:
                slot.release()
            raise
        self._held = True

    def _release(self) -> None:
        if self._held:
            self._held = False
            for slot in self._slots:
                slot.release()
