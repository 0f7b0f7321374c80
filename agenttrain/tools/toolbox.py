"""The tools of a run: their schemas, and their calls run at once, bounded, answered in order."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from agenttrain.config.schema import ToolLimits
from agenttrain.config.suggest import did_you_mean
from agenttrain.threads import DaemonThreads
from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.tools.base import FunctionTool, Tool, call_optional
from agenttrain.tools.reply import Reply, failure, reply_of
from agenttrain.types import ToolCall, ToolContext, ToolError, ToolResult

MAX_RESULT_CHARS = 2_000_000
"""Where a result is cut before anybody counts its tokens: far above any token limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    tool: Tool
    arguments: ArgumentSchema
    limits: ToolLimits


class Toolbox:
    """Runs calls of tools; whatever a tool does, each call gets one result that a model can read.

    Blocking functions run in daemon threads. A call that takes longer than its tool's limit is
    abandoned: the model reads an error, a late result is discarded, `stuck` names it meanwhile.

    Example::

        toolbox = Toolbox({"add": FunctionTool(add)})
        call = ToolCall(id="call_0_0", name="add", arguments={"a": "1", "b": 2})
        (result,) = await toolbox.execute([call], context_of)   # result.content == "3"
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        *,
        limits: Mapping[str, ToolLimits] | None = None,
        stop_tools: Sequence[str] = (),
        threads: int = 512,
        max_result_chars: int = MAX_RESULT_CHARS,
    ) -> None:
        """At most `threads` blocking calls run at once, abandoned ones not counted.

        Raises ValueError for a tool under another's name, a schema that is none, and for limits
        or stop tools of a tool that is not there.
        """
        limits = limits or {}
        self.names = tuple(tools)
        for key, names in (("limits", limits), ("stop_tools", stop_tools)):
            for name in names:
                self._check_known(name, key)
        self.stop_tools = frozenset(stop_tools)
        self._entries = {
            name: _entry(name, tool, limits.get(name, ToolLimits())) for name, tool in tools.items()
        }
        self._threads = DaemonThreads()
        self._thread_limit = threads
        self._max_chars = max_result_chars
        self._abandoned: dict[asyncio.Task[Reply], str] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: dict[str | None, asyncio.Semaphore] = {}

    @property
    def stuck(self) -> tuple[str, ...]:
        """Names of the tools of abandoned calls that still run, one per call."""
        return (*self._threads.stuck, *self._abandoned.values())

    def limits(self, name: str) -> ToolLimits:
        """The limits of a tool; those of a tool that is not there limit nothing but its time."""
        entry = self._entries.get(name)
        return ToolLimits() if entry is None else entry.limits

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """The schemas of these tools, or of all; raises ValueError for an unknown name."""
        for name in names or ():
            self._check_known(name, "tools")
        return [
            self._entries[name].tool.schema for name in (self.names if names is None else names)
        ]

    async def execute(
        self,
        calls: Sequence[ToolCall],
        context_of: Callable[[ToolCall], ToolContext],
        *,
        allowed: Sequence[str] | None = None,
    ) -> list[ToolResult]:
        """Run calls at once: one result per call, in call order, faults as error results.

        Tools that are not in `allowed` (None: all are) do not exist for these calls. Cancelling
        the caller cancels the calls.
        """
        known = self.names if allowed is None else [n for n in self.names if n in allowed]
        return await asyncio.gather(*(self._answer(call, context_of, known) for call in calls))

    async def release(self, rollout_id: str) -> None:
        """The rollout is over: let every tool free what it holds for it."""
        for entry in self._entries.values():
            await call_optional(entry.tool, "release", rollout_id)

    async def aclose(self) -> None:
        """Cancel what still runs, end idle threads, close tools that can be closed."""
        for task in list(self._abandoned):
            task.cancel()
        self._threads.close()
        for entry in self._entries.values():
            await call_optional(entry.tool, "close")

    def _check_known(self, name: str, key: str) -> None:
        if name not in self.names:
            raise ValueError(
                f"{key}: there is no tool {name!r}{did_you_mean(name, self.names)}; "
                f"the tools are: {', '.join(self.names) or 'none'}"
            )

    async def _answer(
        self,
        call: ToolCall,
        context_of: Callable[[ToolCall], ToolContext],
        known: Sequence[str],
    ) -> ToolResult:
        if call.malformed is not None:
            return _refuse(call, ToolError.malformed, f"malformed call: {call.malformed}")
        if call.name not in known:
            text = f"unknown tool {call.name!r}{did_you_mean(call.name, known)}; tools: "
            return _refuse(call, ToolError.unknown_tool, text + (", ".join(known) or "none"))
        entry = self._entries[call.name]
        try:
            arguments = entry.arguments.read(call.arguments)
        except InvalidArguments as error:
            return _refuse(call, ToolError.invalid_arguments, str(error))
        async with self._slot(call.name, entry.limits.concurrency), self._thread_slot(entry):
            # Only now: waiting for others is not the tool's time.
            started = time.perf_counter()
            reply = await self._run(entry, arguments, context_of(call))
            seconds = time.perf_counter() - started
        return ToolResult(
            call=call, content=reply.content, error=reply.error, done=reply.done, seconds=seconds
        )

    def _thread_slot(self, entry: _Entry) -> AbstractAsyncContextManager[None]:
        if _blocks(entry.tool) is None:
            return nullcontext()
        return self._slot(None, self._thread_limit)

    def _slot(self, name: str | None, limit: int) -> AbstractAsyncContextManager[None]:
        """A place among the calls of a tool, or (None) of all blocking tools."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # semaphores belong to one event loop
            self._loop, self._slots = loop, {}
        return self._slots.setdefault(name, asyncio.Semaphore(limit))

    async def _run(self, entry: _Entry, arguments: dict[str, Any], context: ToolContext) -> Reply:
        """Run one call for at most its time limit; then leave it to itself."""
        task = asyncio.create_task(self._reply(entry.tool, arguments, context))
        try:
            # Not asyncio.timeout, which would wait for a tool that ignores its cancellation.
            await asyncio.wait({task}, timeout=entry.limits.timeout_s)
        finally:
            if expired := not task.done():
                self._abandoned[task] = entry.tool.name
                task.add_done_callback(self._abandoned.pop)
                task.cancel()
        if expired:
            text = f"Error: timed out after {entry.limits.timeout_s:g} s"
            return Reply(content=text, error=ToolError.timeout)
        if task.cancelled():  # by the tool itself
            return failure(asyncio.CancelledError(), max_chars=self._max_chars)
        return task.result()

    async def _reply(self, tool: Tool, arguments: dict[str, Any], context: ToolContext) -> Reply:
        try:
            function = _blocks(tool)
            if function is None:
                value = await tool(arguments, context)
            else:
                value = await self._in_thread(function, arguments, context)
            return value if isinstance(value, Reply) else reply_of(value, max_chars=self._max_chars)
        except (asyncio.CancelledError, KeyboardInterrupt):
            # On the event loop's own thread a KeyboardInterrupt is the user's.
            raise
        except BaseException as error:
            return failure(error, max_chars=self._max_chars)

    async def _in_thread(
        self, tool: FunctionTool, arguments: dict[str, Any], context: ToolContext
    ) -> object:
        def work() -> object:
            value = tool.call(arguments, context)
            # The text of a large result is made here and not on the event loop.
            waits = inspect.isawaitable(value)
            return value if waits else reply_of(value, max_chars=self._max_chars)

        outcome = await self._threads.run(work, label=tool.name)
        if outcome.error is not None:
            return failure(outcome.error, max_chars=self._max_chars)
        return await outcome.value if inspect.isawaitable(outcome.value) else outcome.value


def _entry(name: str, tool: Tool, limits: ToolLimits) -> _Entry:
    function = tool.schema.get("function", {})
    if not name == tool.name == function.get("name"):
        raise ValueError(
            f"tools.{name}: the tool calls itself {tool.name!r} and its schema "
            f"{function.get('name')!r}; all three must be the same name"
        )
    try:
        arguments = ArgumentSchema(function.get("parameters", {}))
    except ValueError as error:
        raise ValueError(f"tools.{name}: its parameters are {error}") from error
    return _Entry(tool=tool, arguments=arguments, limits=limits)


def _blocks(tool: Tool) -> FunctionTool | None:
    """The tool, if it needs a thread."""
    return tool if isinstance(tool, FunctionTool) and tool.blocking else None


def _refuse(call: ToolCall, error: ToolError, message: str) -> ToolResult:
    return ToolResult(call=call, content=f"Error: {message}", error=error)
