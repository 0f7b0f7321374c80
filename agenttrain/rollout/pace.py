"""So that ten thousand rollouts that can go on at once do not stop the event loop for seconds.

A turn's own work takes a fraction of a millisecond, but an engine or a tool may answer thousands of
rollouts between two looks at the clock. Were they all to go on in one pass of the event loop, time
limits would pass meanwhile although what they limit is done.
"""

from __future__ import annotations

import asyncio
from collections import deque

AT_ONCE = 64
"""Rollouts that go on in one pass of the event loop: about 20 ms of work."""


class Pace:
    """Lets rollouts go on first come, first served, so many in one pass; for one event loop."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._left = at_once
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._scheduled = False

    async def turn(self) -> None:
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
