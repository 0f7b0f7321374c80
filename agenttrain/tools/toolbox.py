"""The tools of a run: their schemas, and their calls, which run concurrently within limits.

`Cleanup` calls the tools' hooks at the end of a rollout or the run. `StepTracker` knows which tool
runs on the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
import types
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from agenttrain.tools.arguments import ArgumentSchema, InvalidArguments
from agenttrain.tools.call_slots import CallSlots
from agenttrain.tools.config import Isolation, ToolLimits
from agenttrain.tools.isolation import ProcessTool
from agenttrain.tools.isolation_worker import fault_types
from agenttrain.tools.reply import Reply, error_reply, make_reply
from agenttrain.tools.tool import FunctionTool, Tool
from agenttrain.types import (
    AgenttrainError,
    Done,
    ToolCall,
    ToolContext,
    ToolError,
    ToolResult,
    ToolUnavailable,
)
from agenttrain.utils.alarms import warn_of_alarm
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.threads import DaemonThreads, Outcome, attempt_async, blocks

ALL_BLOCKING = None
"""Stands for all blocking tools together where a tool's name could stand."""
CANCEL_S = 0.05
"""Seconds within which a cancelled call must end; after that it counts as stuck."""


class StuckTools(AgenttrainError):
    """Too many calls still run after their time limit; the message names their tools."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A tool with what the toolbox needs to run its calls."""

    tool: Tool
    function: FunctionTool | None
    """The tool again, if its calls block a thread; else None."""
    arguments: ArgumentSchema
    limits: ToolLimits
    faults: tuple[type[BaseException], ...]
    """Types of errors for which the infrastructure is to blame, not the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One attempt of a call."""

    entry: _Entry
    tool: Tool
    """The entry's tool, or the worker process that is lent to it for this call."""
    arguments: dict[str, Any]
    context: ToolContext


class Toolbox:
    """Runs calls of tools. Each call gets one result that a model can read, whatever the tool does.

    The path of a call: `_answer` reads its arguments and retries it, `_attempt` waits for a free
    slot, `_run` limits its time, `_reply` makes its text, `_call` calls the tool.

    Blocking functions run in daemon threads. A call that exceeds its tool's time limit is
    abandoned: the model reads an error, a late result is discarded, and `stuck` lists the call
    until it ends. A tool with isolation=process runs in workers, which are killed instead. Faults
    of the infrastructure are retried. If they persist, the result has the error `unavailable`.

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
        max_stuck: int = 32,
    ) -> None:
        """At most `threads` blocking calls run at once, besides at most `max_stuck` abandoned ones.

        Raises ValueError for a tool whose names disagree, for an invalid schema, and for `limits`
        or `stop_tools` that name unknown tools.
        """
        limits = limits or {}
        # The tools.
        self.names = tuple(tools)
        for key, names in (("limits", limits), ("stop_tools", stop_tools)):
            for name in names:
                self._check_known(name, key)
        self.stop_tools = frozenset(stop_tools)
        self._entries = {
            name: _make_entry(name, tool, limits.get(name, ToolLimits()))
            for name, tool in tools.items()
        }
        # The means to run calls and hooks.
        self._threads = DaemonThreads()
        self._thread_limit = threads
        self._cleanup = Cleanup()
        self._steps = StepTracker()
        # The calls in progress.
        self.answered: Callable[[RunningCall], None] | None = None
        """Called with each call when it ends, also when it is cancelled."""
        self._running: dict[int, RunningCall] = {}
        """By `id`."""
        self._abandoned: dict[asyncio.Task[Reply], tuple[str, float]] = {}
        """Tasks of abandoned calls -> (tool, time.monotonic() from which the call is overdue)."""
        self._max_stuck = max_stuck
        self._warned: set[str] = set()
        """Tools whose stuck calls were warned of."""
        # The limits of concurrent calls, for the event loop that last ran one.
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots: dict[str | None, asyncio.Semaphore] = {}
        """By the tool's name; ALL_BLOCKING: the threads, which all blocking tools share."""

    @property
    def running_calls(self) -> tuple[RunningCall, ...]:
        """Calls that have no answer yet, oldest first; any thread may read them."""
        return tuple(self._running.values())

    @property
    def stuck(self) -> tuple[str, ...]:
        """Names of the tools of abandoned calls that still run, one per call, overdue or not."""
        return (*self._threads.stuck, *(name for name, _ in self._abandoned.values()))

    def blocking(self, limit_s: float) -> str | None:
        """Return the tool that has blocked the event loop for over `limit_s`, or None.

        Any thread may call this.
        """
        step = self._steps.now
        if step is None:
            return None
        name, since = step
        return name if time.monotonic() - since > limit_s else None

    def tool(self, name: str) -> Tool:
        """Return the tool of this name."""
        return self._entries[name].tool

    def limits(self, name: str) -> ToolLimits:
        """Return a tool's limits, or the defaults for an unknown tool."""
        entry = self._entries.get(name)
        return ToolLimits() if entry is None else entry.limits

    def schemas(self, names: Sequence[str] | None = None) -> list[dict[str, Any]]:
        """Return the schemas of these tools, or of all. Raises ValueError for an unknown name."""
        for name in names or ():
            self._check_known(name, "tools")
        return [
            self._entries[name].tool.schema for name in (self.names if names is None else names)
        ]

    async def execute(
        self, calls: Sequence[ToolCall], context_of: Callable[[ToolCall], ToolContext]
    ) -> list[ToolResult]:
        """Run calls concurrently; return one result per call, in order. Raises StuckTools."""
        self._check_stuck()
        return await asyncio.gather(*(self._answer(call, context_of) for call in calls))

    async def release(self, rollout_id: str) -> None:
        """Have every tool free its resources of a finished rollout; failures are warnings."""
        for entry in self._entries.values():
            await self._cleanup.run(entry.tool, "release", entry.limits.timeout_s, rollout_id)

    async def aclose(self) -> None:
        """Close the tools, cancel calls that still run, and end idle threads."""
        for entry in self._entries.values():
            await self._cleanup.run(entry.tool, "close", entry.limits.timeout_s)
        tasks = list(self._abandoned)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CANCEL_S)
        for task in tasks:
            # asyncio.run would wait for ever for a registered task that ignores its cancellation.
            asyncio._unregister_task(task)
        self._threads.close()

    def _check_stuck(self) -> None:
        """Warn once of each tool with overdue calls; raise StuckTools if these are too many."""
        if not self._abandoned and not self._threads.stuck:
            return
        now = time.monotonic()
        # A call that was abandoned before its time limit, at its rollout's end, is not overdue.
        on_loop = (name for name, overdue_from in self._abandoned.values() if overdue_from <= now)
        overdue = Counter((*self._threads.overdue, *on_loop))
        for name in overdue.keys() - self._warned:
            self._warned.add(name)
            warnings.warn(
                f"tool {name}: a call still runs though its {self.limits(name).timeout_s:g} s are "
                f"over; {stuck_remedy(name)}",
                RuntimeWarning,
                stacklevel=1,
            )
        if overdue.total() > self._max_stuck:
            names = ", ".join(f"{name} ({count})" for name, count in overdue.most_common())
            raise StuckTools(
                f"rollout.max_stuck_calls={self._max_stuck}: {overdue.total()} calls of tools "
                "still run past their time limit: "
                f"{names}; {stuck_remedy(overdue.most_common()[0][0])}"
            )

    def _check_known(self, name: str, key: str) -> None:
        if name not in self.names:
            raise ValueError(
                f"{key}: there is no tool {name!r}{did_you_mean(name, self.names)}; "
                f"the tools are: {', '.join(self.names) or 'none'}"
            )

    async def _answer(
        self, call: ToolCall, context_of: Callable[[ToolCall], ToolContext]
    ) -> ToolResult:
        """Return the result of one call; faults of the infrastructure are retried."""
        if call.malformed is not None:
            return ToolResult(call=call, content=call.malformed_reply, error=ToolError.malformed)
        if call.name not in self.names:
            text = f"unknown tool {call.name!r}{did_you_mean(call.name, self.names)}; tools: "
            return _refuse(call, ToolError.unknown_tool, text + (", ".join(self.names) or "none"))
        entry = self._entries[call.name]
        for attempt in range(entry.limits.retries + 1):
            if attempt:
                await asyncio.sleep(entry.limits.retry_backoff_s * 2 ** (attempt - 1))
            try:
                # Copied for each attempt: the tool may have changed its arguments.
                arguments = entry.arguments.read(call.arguments)
            except InvalidArguments as error:
                return _refuse(call, ToolError.invalid_arguments, str(error))
            context = context_of(call)
            running = RunningCall(
                rollout_id=context.rollout_id,
                tool=context.tool,
                call_id=context.call_id,
                since=time.monotonic(),
            )
            self._running[id(running)] = running
            try:
                reply, seconds = await self._attempt(entry, arguments, context)
            finally:
                del self._running[id(running)]
                if self.answered is not None:
                    self.answered(running)
            if reply.error is not ToolError.unavailable:
                break
        return ToolResult(
            call=call,
            content=reply.content,
            error=reply.error,
            seconds=seconds,
            done=reply.done,
            reward=reply.reward,
            parts=reply.parts,
        )

    async def _attempt(
        self, entry: _Entry, arguments: dict[str, Any], context: ToolContext
    ) -> tuple[Reply, float]:
        """Return (reply, seconds); the seconds do not count the wait for a slot or a worker."""
        slots = [self._slots_of(entry.tool.name, entry.limits.concurrency)]
        if entry.function is not None:  # it blocks a thread, of which all such tools share a number
            slots.append(self._slots_of(ALL_BLOCKING, self._thread_limit))
        async with CallSlots(slots) as call_slots:
            worker: AbstractAsyncContextManager[Tool] = nullcontext(entry.tool)
            if isinstance(entry.tool, ProcessTool):
                # Neither the policy nor the machine goes into a worker process.
                worker = entry.tool.worker()
                context = replace(context, run_policy=None, machine=None)
            elif context.run_policy is not None:
                # The call gives its slots back while its sub-agent runs. A sub-agent that calls the
                # same tool would otherwise wait for a slot of the call that waits for it.
                context = replace(context, run_policy=call_slots.without_slots(context.run_policy))
            try:
                async with worker as tool:
                    request = _Request(entry=entry, tool=tool, arguments=arguments, context=context)
                    started = time.perf_counter()
                    reply = await self._run(request, call_slots)
                    return reply, time.perf_counter() - started
            except ToolUnavailable as error:  # no worker could be started
                return error_reply(error), 0.0

    def _slots_of(self, name: str | None, limit: int) -> asyncio.Semaphore:
        """Return the semaphore for calls of the tool `name`, or of ALL_BLOCKING tools."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # semaphores belong to one event loop
            self._loop, self._slots = loop, {}
        semaphore = self._slots.get(name)
        if semaphore is None:
            semaphore = self._slots[name] = asyncio.Semaphore(limit)
        return semaphore

    async def _run(self, request: _Request, call_slots: CallSlots) -> Reply:
        """Run one call for at most its time limit; then abandon it.

        `call_slots` measures the call's time, which does not count while its sub-agents run.
        """
        timeout_s = request.entry.limits.timeout_s
        # A thread that still runs the call at its deadline counts as stuck. This is a little before
        # the time limit: timers are inexact, and `_check_stuck` below must find the call overdue.
        deadline = time.monotonic() + timeout_s - CANCEL_S / 5
        task = asyncio.create_task(self._reply(request, deadline))
        try:
            # Not asyncio.timeout, which would wait for a tool that ignores its cancellation.
            remaining_s = timeout_s
            while not task.done() and remaining_s > 0:
                # `call_slots.seconds()` stands still while a sub-agent runs, so the loop may wait
                # several times. 0.05 s at least, so that it never spins.
                await asyncio.wait({task}, timeout=max(remaining_s, 0.05))
                remaining_s = timeout_s - call_slots.seconds()
        finally:
            # The end of the rollout cancels this coroutine, but not the task: abandon it then too.
            is_abandoned = not task.done()
            if is_abandoned:
                # A task counts as stuck only after its time limit, also if the rollout ends before,
                # and after half of the wait below, in which it can end by its cancellation.
                overdue_from = max(deadline, time.monotonic() + CANCEL_S / 2)
                self._abandoned[task] = request.tool.name, overdue_from
                task.add_done_callback(self._discard)
                task.cancel()
        if is_abandoned:
            await asyncio.wait({task}, timeout=CANCEL_S)
            self._check_stuck()
            text = f"Error: timed out after {timeout_s:g} s"
            return Reply(content=text, error=ToolError.timeout)
        if task.cancelled():  # by the tool itself
            return error_reply(asyncio.CancelledError())
        return task.result()

    def _discard(self, task: asyncio.Task[Reply]) -> None:
        """Drop the result of an abandoned call that has ended; no one waits for it."""
        self._abandoned.pop(task, None)
        if not task.cancelled():
            task.exception()  # asyncio warns of an exception that is never read

    async def _reply(self, request: _Request, deadline: float) -> Reply:
        """Run the call and make its reply; it says `unavailable` for an error in `faults`."""
        faults = request.entry.faults
        try:
            call = await self._call(request, deadline)
            if call.error is not None:
                return error_reply(call.error, faults=faults)
            if isinstance(call.value, Reply):  # the call's thread has made it
                return call.value
            if _has_ready_text(call.value):
                return make_reply(call.value)
            # The text may be large, and made by the value's own code: not on the event loop.
            making = await self._threads.run(
                lambda: make_reply(call.value), label=request.tool.name, deadline=deadline
            )
        except RuntimeError as error:  # "can't start new thread"; the tool's own are in `call`
            unavailable = ToolUnavailable(f"tool {request.tool.name}: {error}")
            return error_reply(unavailable, faults=faults)
        if making.error is not None:
            return error_reply(making.error, faults=faults)
        assert isinstance(making.value, Reply)
        return making.value

    async def _call(self, request: _Request, deadline: float) -> Outcome:
        """Call a tool; the outcome has its reply, its value, or its error.

        A blocking function runs in a thread, which also makes the reply. Another tool runs on the
        event loop, and so does an awaitable that a function returns.
        """
        tool = request.tool
        awaitable: Any
        if request.entry.function is None:
            # A coroutine, so that an error that the tool raises at once counts as its error.
            async def call_tool() -> object:
                return await tool(request.arguments, request.context)

            awaitable = call_tool()
        else:
            outcome = await self._call_in_thread(request.entry.function, request, deadline)
            if not inspect.isawaitable(outcome.value):
                return outcome
            awaitable = outcome.value
        return await attempt_async(
            self._steps.run(tool.name, awaitable),  # shows a tool that blocks the event loop
            threads=self._threads,
            label=tool.name,
            deadline=deadline,
        )

    async def _call_in_thread(
        self, function: FunctionTool, request: _Request, deadline: float
    ) -> Outcome:
        """Call a function in a thread; the outcome has its reply, its awaitable, or its error."""

        def call_and_reply() -> object:
            value = function.call(request.arguments, request.context)
            return value if inspect.isawaitable(value) else make_reply(value)

        name = request.tool.name
        outcome = await self._threads.run(call_and_reply, label=name, deadline=deadline)
        if outcome.alarm:  # it tried to limit its time by SIGALRM, which takes a main thread
            remedy = f"tools.{name}.isolation=process gives it a main thread"
            warn_of_alarm(f"tool {name}", remedy)
        return outcome


def _has_ready_text(value: object) -> bool:
    """Return True for a reply, and for a value whose text is made without code of the user's."""
    content = value.content if type(value) is Done else value
    return isinstance(value, Reply) or content is None or type(content) in (str, int, float, bool)


def _make_entry(name: str, tool: Tool, limits: ToolLimits) -> _Entry:
    """Make the entry of a tool; raises ValueError for a tool or limits that cannot work."""
    schema = tool.schema.get("function", {})
    if not name == tool.name == schema.get("name"):
        raise ValueError(
            f"tools.{name}: the tool calls itself {tool.name!r} and its schema "
            f"{schema.get('name')!r}; all three must be the same name"
        )
    try:
        arguments = ArgumentSchema(schema.get("parameters", {}))
    except ValueError as error:
        raise ValueError(f"tools.{name}: its parameters are {error}") from error
    if limits.isolation is Isolation.process and not isinstance(tool, ProcessTool):
        raise ValueError(
            f"tools.{name}.isolation=process: {tool!r} runs in this process; declare the tool by "
            "its _target_, or give a ProcessTool"
        )
    try:
        faults = fault_types(tuple(limits.retry_on))
    except ValueError as error:
        raise ValueError(f"tools.{name}.{error}") from error
    # Only a blocking function needs a thread for its calls.
    function = tool if isinstance(tool, FunctionTool) and tool.blocking else None
    return _Entry(tool=tool, function=function, arguments=arguments, limits=limits, faults=faults)


def stuck_remedy(name: str) -> str:
    """Return a remedy for a tool whose calls do not end."""
    return (
        f"its thread cannot be ended: set tools.{name}.isolation=process, whose workers are killed "
        "in time, or give the tool a time limit of its own"
    )


def _refuse(call: ToolCall, error: ToolError, message: str) -> ToolResult:
    return ToolResult(call=call, content=f"Error: {message}", error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningCall:
    """A call that has no result yet; it may still wait for a slot."""

    rollout_id: str
    tool: str
    call_id: str
    since: float
    """On the clock of time.monotonic."""


@dataclass(slots=True)
class StepTracker:
    """Runs awaitables of tools, and knows which one occupies the event loop.

    An async tool that blocks stalls every rollout: another thread reads `now` and can name it.
    """

    now: tuple[str, float] | None = None
    """(tool, time.monotonic()) of the step that runs, from its beginning; None between steps."""

    async def run(self, name: str, awaitable: Awaitable[object]) -> object:
        """Await `awaitable`, recording the tool's name during each uninterrupted step."""

        # `_drive` calls `send` and `throw`, which the iterators of other awaitables may lack.
        async def as_coroutine() -> object:
            return await awaitable

        return await self._drive(name, as_coroutine().__await__())

    @types.coroutine
    def _drive(self, name: str, steps: Generator[Any, Any, object]) -> Generator[Any, Any, object]:
        """Run the steps of tool `name`'s coroutine; yield to the event loop what each waits for.

        The same as `await`, but `now` is (tool, start time) while a step runs, which shows a tool
        that blocks the event loop.
        """
        result: Any = None
        error: BaseException | None = None
        while True:
            self.now = (name, time.monotonic())
            try:
                # Runs the coroutine until it waits for `awaited`, a future of the event loop.
                awaited = steps.send(result) if error is None else steps.throw(error)
            except StopIteration as stop:  # it has returned
                return stop.value
            finally:
                self.now = None
            try:
                result = yield awaited  # the event loop goes on here once `awaited` is done
                error = None
            except GeneratorExit:  # nobody waits for this call any more
                steps.close()
                raise
            except BaseException as raised:  # a cancellation, say: the coroutine gets it
                error = raised


class Cleanup:
    """Calls `release` and `close` of tools within a time limit; a failure is only a warning."""

    def __init__(self) -> None:
        # Not the toolbox's threads: there a hook that hangs would count as a stuck call.
        self._threads = DaemonThreads()
        self._warned: set[tuple[str, str]] = set()

    async def run(self, tool: Tool, method: str, limit_s: float, *arguments: object) -> None:
        """Call the method of a tool, if it has one, for at most `limit_s` seconds."""
        # The hooks of a function's tool are its object's: FunctionTool would run them in no thread.
        owner = tool.owner if isinstance(tool, FunctionTool) else tool
        hook = getattr(owner, method, None)
        if hook is None:
            return
        task = asyncio.ensure_future(self._call(hook, f"{tool.name}.{method}", arguments))
        await asyncio.wait({task}, timeout=limit_s)
        problem = ""
        if not task.done():
            task.cancel()
            problem = f"did not end within {limit_s:g} s"
        elif task.cancelled():  # by the hook itself
            problem = "was cancelled"
        elif (error := task.result().error) is not None:
            problem = hide_secrets(f"{type(error).__name__}: {error}")
        if problem and (tool.name, method) not in self._warned:
            self._warned.add((tool.name, method))
            warnings.warn(
                f"tool {tool.name}: its {method}() failed, which may leak what it holds: {problem}",
                RuntimeWarning,
                stacklevel=1,
            )

    async def _call(
        self, method: Callable[..., Any], label: str, arguments: tuple[object, ...]
    ) -> Outcome:
        """Call a hook, a blocking one in a thread; errors are in the outcome."""
        if not blocks(method):
            return await attempt_async(method(*arguments))
        outcome = await self._threads.run(lambda: method(*arguments), label=label)
        if inspect.isawaitable(outcome.value):
            return await attempt_async(outcome.value)
        return outcome
