"""Ends of a rollout, and of the run, for tools that hold something: bounded, and never fatal."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from agenttrain.threads import DaemonThreads, Outcome, attempt_async, blocks
from agenttrain.tools.base import FunctionTool, Tool


class Endings:
    """Calls `release` and `close` of tools, blocking ones in threads, and warns when they fail."""

    def __init__(self) -> None:
        self._threads = DaemonThreads()  # not the calls': an ending that hangs is no stuck call
        self._warned: set[tuple[str, str]] = set()

    async def release(self, tool: Tool, rollout_id: str, limit_s: float) -> None:
        """Have `tool` free what it holds for a rollout."""
        await self._end(tool, "release", limit_s, rollout_id)

    async def close(self, tool: Tool, limit_s: float) -> None:
        """Close `tool`."""
        await self._end(tool, "close", limit_s)

    async def _end(self, tool: Tool, method: str, limit_s: float, *arguments: object) -> None:
        owner = tool.owner if isinstance(tool, FunctionTool) else tool
        hook = getattr(owner, method, None)
        if hook is None:
            return
        ending = asyncio.ensure_future(self._call(hook, f"{tool.name}.{method}", arguments))
        await asyncio.wait({ending}, timeout=limit_s)
        if not ending.done():
            ending.cancel()
            self._warn(tool.name, method, f"did not end within {limit_s:g} s")
        elif ending.cancelled():
            self._warn(tool.name, method, "was cancelled")
        elif (error := ending.result().error) is not None:
            self._warn(tool.name, method, f"{type(error).__name__}: {error}")

    async def _call(
        self, method: Callable[..., Any], label: str, arguments: tuple[object, ...]
    ) -> Outcome:
        if not blocks(method):
            return await attempt_async(method(*arguments))
        outcome = await self._threads.run(lambda: method(*arguments), label=label)
        if inspect.isawaitable(outcome.value):
            return await attempt_async(outcome.value)
        return outcome

    def _warn(self, name: str, method: str, problem: str) -> None:
        if (name, method) not in self._warned:
            self._warned.add((name, method))
            warnings.warn(
                f"tool {name}: its {method}() failed, which may leak what it holds: {problem}",
                RuntimeWarning,
                stacklevel=2,
            )
