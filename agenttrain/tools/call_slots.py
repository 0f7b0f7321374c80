"""Slots of a tool call and its time, both suspended while the call waits for a sub-agent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any


class CallSlots:
    """Holds a slot of each semaphore for a call, except while the call waits for a sub-agent.

    Otherwise a sub-agent that calls the same tool would wait for the call that waits for it. A call
    may run several sub-agents at once: the first to begin gives the slots back, and after the last
    one has ended they are taken again.

    Example::

        async with CallSlots([semaphore]) as held:
            delegate = held.without_slots(context.run_policy)
    """

    def __init__(self, slots: Sequence[asyncio.Semaphore]) -> None:
        self._slots = slots
        self._held = False
        """True while the call has its slots."""
        self._ended = False
        """True once the call is over."""
        self._sub_agents = 0
        """Number of sub-agents that run for the call."""
        self._retake_lock = asyncio.Lock()
        """Held while the slots are taken again, so that only one of several sub-agents does it."""
        self._started = 0.0
        """The time.monotonic at which the slots were first acquired."""
        self._lent_since: float | None = None
        """The time.monotonic at which the call gave its slots back; None while it has them."""
        self._waited_s = 0.0
        """Seconds that sub-agents took, until the last one ended and the slots were taken again."""

    async def __aenter__(self) -> CallSlots:
        await self._acquire()
        self._started = time.monotonic()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._ended = True
        self._release()

    def seconds(self) -> float:
        """Return the seconds since the slots were acquired, without those spent on sub-agents."""
        now = time.monotonic()
        waiting_s = 0.0 if self._lent_since is None else now - self._lent_since
        return now - self._started - self._waited_s - waiting_s

    def without_slots(self, run: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return a function that runs a sub-agent by `run` without the call's slots.

        `seconds` does not count its time.
        """

        @wraps(run)
        async def run_without_slots(*args: Any, **kwargs: Any) -> Any:
            if self._lent_since is None:  # the first of several at once
                self._lent_since = time.monotonic()
                self._release()
            self._sub_agents += 1
            try:
                return await run(*args, **kwargs)
            finally:
                self._sub_agents -= 1
                await self._retake()

        return run_without_slots

    async def _retake(self) -> None:
        """Take the slots again that were given back, once no sub-agent of the call runs."""
        async with self._retake_lock:
            if self._sub_agents or self._ended or self._held:
                return
            await self._acquire()  # may wait for other calls, so the state is checked again
            if self._sub_agents or self._ended:
                self._release()
                return
            assert self._lent_since is not None  # the slots were given back at that time
            self._waited_s += time.monotonic() - self._lent_since
            self._lent_since = None

    async def _acquire(self) -> None:
        """Take a slot of every semaphore, or of none if that is cancelled."""
        acquired: list[asyncio.Semaphore] = []
        try:
            for slot in self._slots:
                await slot.acquire()
                acquired.append(slot)
        except BaseException:
            for slot in acquired:
                slot.release()
            raise
        self._held = True

    def _release(self) -> None:
        if self._held:
            self._held = False
            for slot in self._slots:
                slot.release()
