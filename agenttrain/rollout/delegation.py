"""Sub-agents: tools that run the policy in a context of its own (`ToolContext.delegate`).

The trajectory of a sub-agent belongs to the rollout and is trained like the others. Sub-agents of a
rollout run one at a time, in the order of their calls: so their trajectories have the same indices,
and their turns the same seeds, in every run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from agenttrain.environments.environment import Episode
from agenttrain.rollout.config import RolloutConfig
from agenttrain.rollout.request import RolloutContext
from agenttrain.rollout.row_tools import RowTools
from agenttrain.types import (
    MAIN,
    ConfigError,
    Delegated,
    Delegation,
    Message,
    Origin,
    PlacedImage,
    Rollout,
    RowTool,
    StopReason,
    ToolContext,
    ToolFailure,
    ToolResult,
    ToolUnavailable,
    Trajectory,
)

CANCEL_S = 5.0
"""Seconds that sub-agents get to end when they are cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """The agent whose turns a loop samples: the rollout's own, or a sub-agent."""

    session: str
    """Name of the agent's session in the engine."""
    parent: str | None = None
    """Session of the agent that waits for this one."""
    role: str = MAIN
    """Role of the agent's trajectories."""
    depth: int = 0
    """Number of agents that wait for this one."""
    delegation: Delegation | None = None
    """The call that asked for the sub-agent; None for the rollout's own agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubAgentRequest:
    """Arguments of a tool's `ToolContext.delegate`."""

    caller: ToolContext
    messages: list[Message]
    """Messages of the sub-agent's prompt."""
    tools: Sequence[str]
    """Names of the sub-agent's tools."""
    role: str
    """Role of the sub-agent's trajectory."""
    max_turns: int | None
    """None: as the rollout's, like `max_tokens`."""
    max_tokens: int | None

    def tighten(self, limits: RolloutConfig) -> RolloutConfig:
        """Return the sub-agent's limits. Raises ConfigError if the tool asks for too much."""
        changes: dict[str, Any] = {}
        for argument, key, value in (
            ("max_turns", "max_turns", self.max_turns),
            ("max_tokens", "max_completion_tokens", self.max_tokens),
        ):
            if value is None:
                continue
            maximum = getattr(limits, key)
            if not 1 <= value <= maximum:
                raise ConfigError(
                    f"tool {self.caller.tool}: delegate({argument}={value}): from 1 to "
                    f"rollout.{key}={maximum} are allowed; ask for less, or raise rollout.{key}"
                )
            changes[key] = value
        return replace(limits, **changes)

    def make_tools(self, context: RolloutContext, episode: Episode | None) -> RowTools:
        """Return the sub-agent's tools. Raises ConfigError for one that does not exist.

        A name in `tools` is that of a tool which the caller's row brings, else one of the run.
        """
        caller_task = self.caller.task
        brought_by_row = {t.name: t for t in caller_task.tools or () if isinstance(t, RowTool)}
        tools = tuple(brought_by_row.get(name, name) for name in self.tools)
        # As for a rollout of the same row, if the row listed only these tools.
        task = replace(caller_task, tools=tools)
        try:
            return RowTools(task, context.toolbox, context.environments, episode)
        except ValueError as error:
            # It begins with the argument of `delegate`: "tools: there is no tool 'serch' …".
            raise ConfigError(f"tool {self.caller.tool}: delegate({error})") from error


class CallOrder:
    """Lets the tool calls of a turn run sub-agents one after the other, the same way in every run.

    A call may delegate (run a sub-agent) once all calls before it are answered. The loop makes one
    object for each turn: tools enter `turn` to delegate, and `answered` is called as their results
    come.
    """

    def __init__(self, call_ids: Sequence[str]) -> None:
        self._answered = {call_id: asyncio.Event() for call_id in call_ids}
        """An event for each call, in call order; `answered` sets it."""
        self._lock = asyncio.Lock()
        """Held while a sub-agent runs: one call may ask for several at once."""
        self.delegating_call: str | None = None
        """Id of the call whose sub-agent runs; None between two sub-agents."""

    def answered(self, call_id: str) -> None:
        """Record that a call has its result."""
        self._answered[call_id].set()

    @asynccontextmanager
    async def turn(self, call_id: str) -> AsyncIterator[None]:
        """Wait until this call may delegate; only one sub-agent runs in the block.

        Raises ToolUnavailable if the call was answered meanwhile.
        """
        # All earlier calls first. A sub-agent's trajectory has the next free index, and its seeds
        # derive from that: in the order of the clock they would differ from run to run.
        for earlier, answered in self._answered.items():
            if earlier == call_id:
                break
            await answered.wait()
        async with self._lock:  # this call itself may delegate several times at once
            if self._answered[call_id].is_set():
                raise ToolUnavailable(
                    f"call {call_id} was answered before it delegated; await context.delegate(…) "
                    "before the tool returns"
                )
            self.delegating_call = call_id
            try:
                yield
            finally:
                self.delegating_call = None


class SubAgents:
    """State shared by the sub-agents of a rollout: budget, failure, and the tasks that run them.

    For each call of `ToolContext.delegate` the loop calls `check_may_delegate` and `run`. The
    sub-agent that is run calls `check_depth` and `begin`. The loop calls `check` when the calls of
    the turn have their results, and `aclose` at the end.

    A tool may catch the errors that it gets. So what has to end the rollout is kept too: `stop`, a
    limit, and `failure`, an error.
    """

    def __init__(self, rollout: Rollout, limits: RolloutConfig) -> None:
        self._rollout, self._limits = rollout, limits
        self._loop = asyncio.get_running_loop()
        """The rollout's event loop, in which tools have to delegate."""
        self._running: set[asyncio.Task[Delegated]] = set()
        self.used = False
        """True once a tool has asked for a sub-agent: the loop then calls `check` after each turn's
        calls."""
        self.failure: Exception | None = None
        """First error of a sub-agent that is not the policy's fault. The rollout ends with it, even
        if the tool handles it."""
        self.stop: StopReason | None = None
        """Why the rollout stops once the turn's calls are answered."""

    def tokens_left(self) -> float:
        """Return the tokens that sub-agents may still have, prompts included."""
        limit = self._limits.max_delegated_tokens
        if limit is None:
            return math.inf
        delegated = [t for t in self._rollout.trajectories if t.delegation is not None]
        # The tokens that a branch shares with its parent count once.
        return limit - sum(t.length - t.context_length for t in delegated)

    def check_depth(self, depth: int) -> None:
        """Raise ToolFailure, and stop the rollout, if agents may not delegate at this depth."""
        limit = self._limits.max_delegation_depth
        if depth > limit:
            raise self.stop_rollout(
                StopReason.max_delegation_depth, f"rollout.max_delegation_depth={limit}"
            )

    def stop_rollout(self, reason: StopReason, text: str = "") -> ToolFailure:
        """Stop the rollout after this turn's calls; return the error for the caller to raise.

        The tool gets the error. It may catch it, and the rollout stops all the same. `text` names
        the limit that is used up; empty: `rollout.max_delegated_tokens`.
        """
        self.stop = reason
        if reason is StopReason.aborted:
            return ToolFailure("the sub-agent was not run to its end: the rollout was aborted")
        text = text or f"rollout.max_delegated_tokens={self._limits.max_delegated_tokens}"
        return ToolFailure(
            f"the sub-agent was not run to its end: {text} is used up; raise it, or delegate less"
        )

    def begin(
        self,
        request: SubAgentRequest,
        prompt: Sequence[int],
        delegation: Delegation,
        images: tuple[PlacedImage, ...],
    ) -> Trajectory:
        """Begin the trajectory of a sub-agent. Raises ToolFailure if there is no token left."""
        if len(prompt) >= self.tokens_left():
            raise self.stop_rollout(StopReason.max_delegated_tokens)
        trajectory = self._rollout.begin(role=request.role, delegation=delegation)
        trajectory.messages.extend(request.messages)
        trajectory.prompt_messages = len(request.messages)
        trajectory.append_context(prompt, Origin.prompt, images)
        return trajectory

    async def run(self, sub_agent: Coroutine[Any, Any, Delegated]) -> Delegated:
        """Run a sub-agent in a task of its own, for a tool that awaits it.

        Raises ToolFailure if a limit of the rollout ended it. Any other error is raised as
        ToolUnavailable, and recorded for `check`.
        """
        self.used = True
        task = asyncio.create_task(sub_agent)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await task
        except ToolFailure:
            raise
        except Exception as error:
            self.failure = self.failure or error
            raise ToolUnavailable(f"its sub-agent failed: {error}") from error

    def check_may_delegate(self, tool: str) -> None:
        """Raise ToolUnavailable if the tool of this name must not run a sub-agent.

        That is so in another event loop than the rollout's, and once a sub-agent has failed.
        """
        # The tool may catch the error that is raised here. So it is kept in `failure`, and `used`
        # makes the loop call `check` after the turn's calls, which raises it again.
        self.used = True
        if asyncio.get_running_loop() is not self._loop:
            self.failure = self.failure or ToolUnavailable(
                f"tool {tool}: delegates from an event loop of its own; make the tool `async def` "
                "and await context.delegate(…)"
            )
        if self.failure is not None:
            raise ToolUnavailable(f"a sub-agent of this rollout failed: {self.failure}")

    async def check(self, results: Sequence[ToolResult], order: CallOrder) -> None:
        """Raise the failure of a sub-agent, once the calls of its turn have `results`.

        A sub-agent that still runs is ended. That is the tool's fault (ToolUnavailable) if it
        returned without waiting, but not if the call failed, by a timeout for example.
        """
        # All calls are answered: a call that still delegates has left its sub-agent behind.
        call_id = order.delegating_call
        if self.failure is None and call_id is not None:
            await self.aclose()
            failed = any(result.call.id == call_id and result.error for result in results)
            if not failed:
                self.failure = ToolUnavailable(
                    f"call {call_id}: the tool returned while its sub-agent was running; await "
                    "context.delegate(…) before it returns"
                )
        if self.failure is not None:
            raise self.failure

    async def aclose(self) -> None:
        """End the sub-agents that still run."""
        running = [*self._running]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CANCEL_S)
