"""Whose turn is it on the event loop? An async tool that blocks stalls every rollout."""

from __future__ import annotations

import time
import types
from collections.abc import Awaitable, Generator
from typing import Any


class Steps:
    """Runs awaitables of tools and knows, from any thread, which of them runs this moment."""

    def __init__(self) -> None:
        self._now: tuple[str, float] | None = None

    def blocking(self, limit_s: float) -> str | None:
        """Return the tool that has held the event loop for longer than `limit_s`, if one has."""
        now = self._now
        return now[0] if now is not None and time.monotonic() - now[1] > limit_s else None

    async def run(self, name: str, awaitable: Awaitable[object]) -> object:
        """Await `awaitable`, with every uninterrupted step under the tool's name."""

        async def waited() -> object:  # not every awaitable can be driven, a coroutine can
            return await awaitable

        return await self._drive(name, waited().__await__())

    @types.coroutine
    def _drive(self, name: str, steps: Generator[Any, Any, object]) -> Generator[Any, Any, object]:
        value: Any = None
        error: BaseException | None = None
        while True:
            self._now = (name, time.monotonic())
            try:
                waits_for = steps.send(value) if error is None else steps.throw(error)
            except StopIteration as over:
                return over.value
            finally:
                self._now = None
            try:
                value, error = (yield waits_for), None
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as thrown:
                error = thrown
