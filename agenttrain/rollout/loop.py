"""One rollout: sample, parse, run tools, append their replies, until a reason to stop.

The model's sampled ids go into the ledger as they are and are never decoded and tokenised again.
A rollout does not raise for what the model, a tool or the engine does: it ends with a stop reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from agenttrain.chat.chat import Chat
from agenttrain.engines.base import Engine, EngineDead, EngineError
from agenttrain.environments.environment import Episode
from agenttrain.environments.environments import Environments
from agenttrain.rewards.function import own_task
from agenttrain.rollout.config import OnMalformedCall, OnParallelCalls, OnToolFailure, RolloutConfig
from agenttrain.rollout.episode import begin, end, score
from agenttrain.rollout.ledger import Readings
from agenttrain.rollout.monitoring import Pace
from agenttrain.rollout.replies import fit_replies
from agenttrain.rollout.row_tools import RowTools, turn_sampling
from agenttrain.tools.toolbox import Toolbox
from agenttrain.types import (
    AssistantTurn,
    Completion,
    Finish,
    Message,
    Origin,
    PromptTooLong,
    Rollout,
    Sampling,
    StopReason,
    Task,
    ToolCall,
    ToolContext,
    ToolError,
    ToolResult,
    ToolUnavailable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """One rollout to make: the task, its names and its seeds."""

    task: Task
    sampling: Sampling = field(default_factory=Sampling)
    """How every turn is sampled; `seed` is the rollout's own, `max_tokens` is set for each turn."""
    rollout_id: str = "rollout"
    """Unique among the rollouts in flight: engines and tools keep what is a rollout's by it."""
    group_id: str = ""
    sample: int = 0
    """Position in the group, 0 … G-1."""
    group_seed: int = 0
    """For the environment: the same in all rollouts of a group."""
    prompt_ids: Sequence[int] | None = None
    """The prompt, where the rollouts of a group share its rendering; None: it is rendered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Parts that rollouts are made with, shared by all that are in flight together."""

    engine: Engine
    chat: Chat
    toolbox: Toolbox
    limits: RolloutConfig = field(default_factory=RolloutConfig)
    environments: Environments = field(default_factory=Environments)
    pace: Pace | None = None
    """Shared by the rollouts in flight on one event loop; None: this rollout is the only one."""
    readings: Readings | None = None
    """Takes in what completions are parsed as, so that `ledger.verify` need not parse them again;
    None: it parses all."""


async def run_rollout(request: RolloutRequest, context: RolloutContext) -> Rollout:
    """Run one rollout to its end.

    Example::

        context = RolloutContext(
            engine=ScriptedEngine(["It is 7."], encode=tokenizer.encode),
            chat=load_chat(tokenizer, ChatTemplateConfig(), ResponseSchemaConfig()),
            toolbox=Toolbox({}),
        )
        task = Task(task_id="sum", messages=({"role": "user", "content": "What is 3 + 4?"},))
        rollout = await run_rollout(RolloutRequest(task=task), context)
        assert rollout.trajectories[0].messages[-1]["content"] == "It is 7."

    Raises PromptTooLong when the prompt leaves no room to sample, before anything is sampled,
    ValueError for tools or an environment that are not there, RewardError when the environment's
    reward fails; EngineDead; StuckTools; and ToolUnavailable where `limits.on_tool_failure` is
    `error`.
    """
    rollout = Rollout(
        task=request.task,
        rollout_id=request.rollout_id,
        group_id=request.group_id,
        sample=request.sample,
    )
    limits, environments = context.limits, context.environments
    started = time.perf_counter()
    episode: Episode | None = None
    try:
        episode = await begin(
            rollout, environments, seed=request.sampling.seed, group_seed=request.group_seed
        )
        tools = RowTools(request.task, context.toolbox, environments, episode)
        append_prompt(rollout, context.engine, context.chat, tools, request.prompt_ids)
        await _within(_Loop(rollout, request, context, tools, episode), limits.timeout_s)
        await score(rollout, episode)
    except EngineDead:
        raise
    except (EngineError, ToolUnavailable) as error:
        if isinstance(error, ToolUnavailable) and limits.on_tool_failure is OnToolFailure.error:
            raise
        rollout.stop_reason, rollout.error = StopReason.error, str(error)
    finally:
        rollout.seconds = time.perf_counter() - started
        # The engine first: others may wait for this row, and closing can take its time.
        try:
            await context.engine.release(request.rollout_id)
        finally:
            try:
                await context.toolbox.release(request.rollout_id)
            finally:
                await end(rollout, episode)
    return rollout


async def _within(loop: _Loop, limit_s: float | None) -> None:
    """Run the loop for at most its wall-clock limit."""
    scope = asyncio.timeout(limit_s)
    try:
        async with scope:
            await loop.run()
    except TimeoutError as error:
        if not scope.expired():  # not ours: an engine's own
            raise EngineError(f"TimeoutError: {error}") from error
        loop.rollout.stop_reason = StopReason.timeout


class _Loop:
    """The turns of one rollout, in its first trajectory."""

    def __init__(
        self,
        rollout: Rollout,
        request: RolloutRequest,
        context: RolloutContext,
        tools: RowTools,
        episode: Episode | None,
    ) -> None:
        self.rollout, self.request, self.tools, self.episode = rollout, request, tools, episode
        self.engine, self.chat, self.limits = context.engine, context.chat, context.limits
        self.pace, self.readings = context.pace or Pace(), context.readings
        self.trajectory = rollout.trajectories[0]
        self._prompt_length = self.trajectory.prompt_length
        self._calls_made: list[ToolCall] = []
        # The task as tools see it: theirs to change.
        self._task: Task | None = None

    async def run(self) -> None:
        """Turns until the rollout has a stop reason."""
        while self.rollout.stop_reason is None:
            budget = min(self.limits.max_turn_tokens, self._room())
            if budget <= 0:
                self.rollout.stop_reason = self._full()
                return
            completion = await self._sample(budget)
            turn = self._read(completion)
            self.rollout.stop_reason = _end_of(completion)
            if self.rollout.stop_reason is None:
                self.rollout.stop_reason = await self._answer(turn, completion)

    def _read(self, completion: Completion) -> AssistantTurn:
        """The completion as the assistant's next message."""
        trajectory, ids = self.trajectory, completion.token_ids
        number, after = trajectory.turns - 1, trajectory.messages[-1]["role"]
        turn = self.chat.parse(ids, self.tools.schemas, turn=number, after=after)
        message = turn.message()
        if self.readings is not None:
            self.readings.note(trajectory, ids, message, turn=number, after=after)
        trajectory.messages.append(message)
        return turn

    def _room(self) -> int:
        """Tokens that still fit after what is there."""
        length = self.trajectory.length
        return min(
            self.limits.max_completion_tokens - (length - self._prompt_length),
            self.engine.max_context - length,
        )

    def _full(self) -> StopReason:
        context_left = self.engine.max_context - self.trajectory.length
        return StopReason.context_full if context_left <= self._room() else StopReason.max_tokens

    async def _sample(self, budget: int) -> Completion:
        sent = self.trajectory.token_ids
        sampling = turn_sampling(
            self.request.sampling,
            self.trajectory,
            self.chat,
            self.tools,
            self.limits,
            budget=budget,
        )
        session = self.rollout.rollout_id
        completion = await self.engine.generate(sent, sampling, session=session)
        await self.pace.turn()
        if not completion.token_ids:
            raise EngineError(f"rollout {session}: the engine returned no token ({completion})")
        self.trajectory.append_sampled(completion, sent)
        return completion

    async def _answer(self, turn: AssistantTurn, completion: Completion) -> StopReason | None:
        """Run the turn's calls and append their replies; the reason to stop, if there is one."""
        calls = self._calls(turn)
        if not calls:
            return await self._next_question(turn, completion)
        stops = self._stops(calls)
        if not stops and (reason := self._refusal(turn, calls, completion)):
            return reason
        results = await self._execute(calls)
        await self.pace.turn()
        self._raise_if_unavailable(results)
        reason = StopReason.stop_tool if stops else self._limit_reached(results)
        self._append_replies(turn, results, completion, generation_prompt=reason is None)
        return reason

    async def _next_question(
        self, turn: AssistantTurn, completion: Completion
    ) -> StopReason | None:
        """Append what the user says next; the reason to stop when that is nothing."""
        text = await self._user_says()
        if text is None:
            return StopReason.environment_done if self._is_over() else StopReason.completed
        if self._is_over():
            self._append_question(turn, completion, text, generation_prompt=False)
            return StopReason.environment_done
        if self.rollout.turns >= self.limits.max_turns:
            return StopReason.max_turns
        fits = self._append_question(turn, completion, text, generation_prompt=True)
        return None if fits else self._full()

    async def _user_says(self) -> str | None:
        """The task's next scripted user turn; after the last one the environment is asked."""
        added = self.trajectory.added_messages
        asked = sum(message["role"] == "user" for message in added)
        if asked < len(self.rollout.task.user_turns):
            return self.rollout.task.user_turns[asked]
        if self.episode is None:
            return None
        return await self.episode.user(self.trajectory.messages[-1])

    def _is_over(self) -> bool:
        return self.episode is not None and self.episode.done

    def _append_question(
        self, turn: AssistantTurn, completion: Completion, text: str, *, generation_prompt: bool
    ) -> bool:
        """Append a user message; False, and nothing is appended, where it does not fit whole."""
        question: Message = {"role": "user", "content": text}
        suffix = self.chat.suffix(
            turn,
            [question],
            completion_ids=completion.token_ids,
            finish=completion.finish,
            generation_prompt=generation_prompt,
        )
        # Unlike a tool's text, a question is never clipped: it would be another question.
        if sum(len(ids) for _, ids in suffix) + int(generation_prompt) > self._room():
            return False
        for origin, token_ids in suffix:
            self.trajectory.append_context(token_ids, origin)
        self.trajectory.messages.append(question)
        return True

    def _calls(self, turn: AssistantTurn) -> list[ToolCall]:
        ignore = self.limits.on_malformed_call is OnMalformedCall.ignore
        return [call for call in turn.calls if not (ignore and call.malformed)]

    def _refusal(
        self, turn: AssistantTurn, calls: list[ToolCall], completion: Completion
    ) -> StopReason | None:
        """Why the calls are not run at all."""
        if self.limits.on_malformed_call is OnMalformedCall.stop and any(
            call.malformed for call in calls
        ):
            return StopReason.max_invalid_calls
        if self._too_many(calls) and self.limits.on_parallel_calls is OnParallelCalls.stop:
            return StopReason.max_tool_calls
        if self.rollout.turns >= self.limits.max_turns:
            return StopReason.max_turns
        if self._repeats(calls):
            return StopReason.repeated_call
        wrapper = self.chat.wrapper_length(
            turn,
            [_reply(ToolResult(call=call, content="")) for call in calls],
            completion_ids=completion.token_ids,
            finish=completion.finish,
            generation_prompt=True,
        )
        # One token must be left to sample, or the reply could never be read.
        return self._full() if wrapper + 1 > self._room() else None

    def _stops(self, calls: Sequence[ToolCall]) -> bool:
        """Return True if one calls a stop tool; one that is not this task's is an unknown tool."""
        return any(call.name in self.tools.stop_tools for call in calls)

    def _repeats(self, calls: list[ToolCall]) -> bool:
        self._calls_made += calls
        limit = self.limits.max_repeated_calls
        return limit is not None and repeated(self._calls_made, limit)

    def _too_many(self, calls: list[ToolCall]) -> bool:
        """Return True if the template cannot render the calls of this turn together."""
        return self.chat.one_call_per_turn and len(calls) > 1

    async def _execute(self, calls: list[ToolCall]) -> list[ToolResult]:
        """One result per call, in call order; calls over a limit get an error result."""
        if self._too_many(calls) and not self._stops(calls):
            return await self._execute_first(calls)
        refused = refusals(
            calls,
            self.rollout.tool_results,
            # A stop tool ends the rollout before any other limit, so its turn always runs.
            most=None if self._stops(calls) else self.limits.max_tool_calls,
            own_limit=lambda name: (
                None if name in self.tools.stop_tools else self.tools.limits(name).max_calls
            ),
        )
        runnable = [call for call, refusal in zip(calls, refused, strict=True) if refusal is None]
        ran = iter(await self.tools.execute(runnable, self._context))
        results = [
            next(ran) if refusal is None else limit_result(call, refusal)
            for call, refusal in zip(calls, refused, strict=True)
        ]
        self.rollout.tool_results.extend(results)
        return results

    async def _execute_first(self, calls: list[ToolCall]) -> list[ToolResult]:
        """The first call's result; the others are told that they were too many."""
        first = await self._execute(calls[:1])
        rest = [
            ToolResult(
                call=call,
                content=f"Error: only one call per turn; {call.name or 'this one'} was not run",
                error=ToolError.parallel,
            )
            for call in calls[1:]
        ]
        self.rollout.tool_results.extend(rest)
        return [*first, *rest]

    def _context(self, call: ToolCall) -> ToolContext:
        if self._task is None:
            self._task = own_task(self.rollout.task)
        return ToolContext(
            rollout_id=self.rollout.rollout_id,
            task=self._task,
            turn=self.trajectory.turns - 1,
            call_id=call.id,
            tool=call.name,
        )

    def _raise_if_unavailable(self, results: list[ToolResult]) -> None:
        """Raise ToolUnavailable for a broken tool: the model must not learn from its answer."""
        for result in results:
            if result.error is ToolError.unavailable:
                raise ToolUnavailable(f"tool {result.call.name}: {result.content}")

    def _limit_reached(self, results: list[ToolResult]) -> StopReason | None:
        """Limits that end the rollout once the calls are answered."""
        if self._is_over() or any(result.done for result in results):
            return StopReason.environment_done
        most = self.limits.max_tool_calls
        over = any(result.error is ToolError.limit for result in results)
        if over and most is not None and len(self.rollout.tool_results) > most:
            return StopReason.max_tool_calls
        errors = [result.error for result in self.rollout.tool_results if result.error]
        invalid = sum(error.invalid_call for error in errors)
        limit = self.limits.max_invalid_calls
        return StopReason.max_invalid_calls if limit is not None and invalid > limit else None

    def _append_replies(
        self,
        turn: AssistantTurn,
        results: list[ToolResult],
        completion: Completion,
        *,
        generation_prompt: bool,
    ) -> None:
        room = self._room() - int(generation_prompt)
        replies, suffix = fit_replies(
            self.chat,
            turn,
            [_reply(result) for result in results],
            completion=completion,
            room=room,
            max_result_tokens=[
                self.tools.limits(result.call.name).max_result_tokens
                or self.limits.max_result_tokens
                for result in results
            ],
            generation_prompt=generation_prompt,
        )
        for origin, token_ids in suffix:
            self.trajectory.append_context(token_ids, origin)
        self.trajectory.messages.extend(replies)


def _end_of(completion: Completion) -> StopReason | None:
    if completion.finish is Finish.length:
        return StopReason.max_tokens
    return StopReason.aborted if completion.finish is Finish.abort else None


def _reply(result: ToolResult) -> Message:
    return {
        "role": "tool",
        "tool_call_id": result.call.id,
        "name": result.call.name,
        "content": result.content,
    }


def append_prompt(
    rollout: Rollout,
    engine: Engine,
    chat: Chat,
    tools: RowTools,
    prompt_ids: Sequence[int] | None,
) -> None:
    """Begin the rollout's trajectory with its task's messages; `prompt_ids`: rendered already.

    A group shares its rendered prompt. Raises PromptTooLong as `check_room`.
    """
    task, trajectory = rollout.task, rollout.trajectories[0]
    trajectory.messages.extend(dict(message) for message in task.messages)
    trajectory.prompt_messages = len(trajectory.messages)
    if prompt_ids is None:
        prompt_ids = chat.prompt_ids(task.messages, tools.schemas)
    check_room(task, len(prompt_ids), engine.max_context)
    trajectory.append_context(prompt_ids, Origin.prompt)


def check_room(task: Task, prompt_length: int, max_context: int) -> None:
    """Raise PromptTooLong unless one token can follow the prompt."""
    if prompt_length >= max_context:
        raise PromptTooLong(
            f"task {task.task_id}: its prompt has {prompt_length} tokens, the engine's context "
            f"{max_context}: shorten the prompt or raise engine.max_context"
        )


def refusals(
    calls: Sequence[ToolCall],
    before: Sequence[ToolResult],
    *,
    most: int | None,
    own_limit: Callable[[str], int | None],
) -> list[str | None]:
    """Why each call of a turn may not run, in words for the model; None: it may.

    `most` limits all calls of a rollout, `own_limit` those of a tool by its name; `before` are the
    results of earlier turns. Example: with ``most=None``, ``own_limit=lambda name: 1`` and nothing
    before, the calls ``[search, sql, search]`` give ``[None, None, "the limit of 1 call of search
    is reached"]``.
    """
    own = [own_limit(call.name) for call in calls]
    limited = any(limit is not None for limit in own)
    ran = Counter([result.call.name for result in before if _counts(result)] if limited else None)
    refused: list[str | None] = []
    for place, (call, limit) in enumerate(zip(calls, own, strict=True), start=len(before)):
        if most is not None and place >= most:
            refused.append(f"the limit of {most} tool calls is reached")
        elif limit is not None and call.malformed is None and ran[call.name] >= limit:
            plural = "" if limit == 1 else "s"
            refused.append(f"the limit of {limit} call{plural} of {call.name} is reached")
        else:
            ran[call.name] += call.malformed is None  # one that cannot run uses nothing up
            refused.append(None)
    return refused


def limit_result(call: ToolCall, text: str) -> ToolResult:
    """Return the error result that the model reads in place of a call that may not run."""
    return ToolResult(call=call, content=f"Error: {text}", error=ToolError.limit)


def _counts(result: ToolResult) -> bool:
    """Return True if the tool ran; only those calls use up its own limit."""
    error = result.error
    return error not in (ToolError.limit, ToolError.parallel) and not (error and error.invalid_call)


def repeated(calls: Sequence[ToolCall], limit: int) -> bool:
    """Return True if more than `limit` calls in a row are equal, the order of arguments aside."""
    return any(len(list(run)) > limit for _, run in groupby(map(_identity, calls)))


def _identity(call: ToolCall) -> str:
    if call.malformed is not None:
        return call.text
    try:
        return json.dumps([call.name, call.arguments], sort_keys=True)
    except (RecursionError, ValueError):  # nested as deeply as could just be parsed
        return call.text
