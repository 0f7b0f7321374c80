"""The rollouts of one step: groups in flight, no barrier between rollouts, ordered results.

`step_figures` makes metrics of them.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from agenttrain.engines.base import Lockstep
from agenttrain.rewards.function import RewardError
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.config import OnBreak
from agenttrain.rollout.ledger import Readings, verify
from agenttrain.rollout.loop import RolloutContext, RolloutRequest, check_room, run_rollout
from agenttrain.rollout.monitoring import InFlight, LoopMonitor, Pace, Waiting, short_collections
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.types import (
    AgenttrainError,
    LedgerError,
    PromptTooLong,
    Rollout,
    Sampling,
    StopReason,
    Task,
)
from agenttrain.utils.seeds import derive_seed
from agenttrain.utils.signals import StopRequest

Schemas = dict[str, list[dict[str, Any]]]
"""Schemas of the tools that each rollout had, by its id."""


class NoRollouts(AgenttrainError):
    """A step produced nothing to learn from; the message quotes the first failure."""

    def __init__(self, message: str, collected: Collected) -> None:
        """`collected` holds what there is all the same: counts, and rollouts that failed."""
        super().__init__(message)
        self.collected = collected


class NoRewards(NoRollouts):
    """Not one rollout of a step has a reward; the message says why the first has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector(RolloutContext):
    """Context and rubric of a run's rollouts; between calls nothing of it is in flight."""

    rubric: Rubric
    stop: StopRequest = field(default_factory=StopRequest)
    """Request that cuts a collection short."""
    in_flight: InFlight = field(default_factory=InFlight)
    progress: Callable[[int, int], None] | None = None
    """Called as ``progress(finished, total)`` after every rollout of a call of `collect`."""

    def waiting(self) -> list[Waiting]:
        """The rollouts on their way and what each waits for; any thread may ask."""
        boxes = (self.toolbox, *self.environments.toolboxes.values())
        return self.in_flight.waiting(call for box in boxes for call in box.running_calls)

    def blocking(self, limit_s: float) -> str | None:
        """The async tool that has held the event loop for longer than `limit_s`; any thread."""
        boxes = (self.toolbox, *self.environments.toolboxes.values())
        return next((name for box in boxes if (name := box.blocking(limit_s))), None)

    @property
    def stuck(self) -> tuple[str, ...]:
        """Names of the tools whose abandoned calls still run, one per call."""
        return (*self.toolbox.stuck, *self.environments.stuck)

    def declared(self, task: Task) -> tuple[str, ...]:
        """Every tool that rollouts of this task may have."""
        methods = self.environments.toolbox_of(self.environments.kind_of(task))
        return (*self.toolbox.names, *methods.names)

    @property
    def tool_names(self) -> tuple[str, ...]:
        """Every tool that a rollout may have."""
        return (*self.toolbox.names, *self.environments.tool_names)


@dataclass(slots=True, kw_only=True)
class Collected:
    """The rollouts of one call, and what did not become one."""

    groups: list[list[Rollout]] = field(default_factory=list)
    """In task order; the rollouts of a group in sample order."""
    places: list[int] = field(default_factory=list)
    """Position of each group's task among those of the step."""
    overlong: int = 0
    """Tasks whose prompt leaves no room to sample."""
    dropped: int = 0
    """Rollouts that are not trained on: failed ones, groups with a broken ledger, and those that
    a reward function could not score."""
    broken: int = 0
    """Rollouts whose ledger broke."""
    uneven_prompts: int = 0
    """Groups whose rollouts did not begin with the same prompt: their environment's reset gave
    different messages, so that their rewards compare different questions."""
    reward_s: float = 0.0
    """Wall seconds of scoring."""
    loop_lag_s: float = 0.0
    """The longest that the event loop stood still while rollouts were made."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, in (task, sample) order."""
        return [rollout for group in self.groups for rollout in group]

    def extend(self, later: Collected) -> None:
        """Add what a later call collected."""
        self.groups += later.groups
        self.places += later.places
        self.overlong += later.overlong
        self.dropped += later.dropped
        self.broken += later.broken
        self.uneven_prompts += later.uneven_prompts
        self.reward_s += later.reward_s
        self.loop_lag_s = max(self.loop_lag_s, later.loop_lag_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    place: int
    """Position of its task among those of the call."""
    request: RolloutRequest


class _Left(StrEnum):
    """Why an attempt gave no rollout."""

    broken = "broken"
    """Its ledger."""
    overlong = "overlong"
    """Its prompt leaves no room to sample."""


async def collect(
    collector: Collector,
    tasks: Sequence[Task],
    *,
    samples: int,
    sampling: Sampling,
    seed_path: tuple[int | str, ...],
    may_be_empty: bool = False,
    places: Sequence[int] | None = None,
) -> Collected:
    """Run `samples` rollouts of every task and score them.

    `seed_path` names the call, e.g. (run seed, "train", step): a rollout's seed derives from it,
    the task's position, the sample and the attempt, so that sampling noise depends on nothing else.
    `places` are the tasks' positions where they are some of the call's only; None: 0, 1, ….
    Raises NoRollouts when not one rollout could be had, unless the call `may_be_empty`; LedgerError
    and ToolUnavailable as `rollout.on_break` and `rollout.on_tool_failure` say; StuckTools when
    calls pile up.
    """
    collected = Collected()
    placed = list(zip(range(len(tasks)) if places is None else places, tasks, strict=True))
    attempts = _plan(collector, placed, samples, sampling, seed_path, collected)
    limit_s = collector.limits.max_loop_lag_s
    schemas: Schemas = {}
    readings = Readings()
    with short_collections():
        async with LoopMonitor(limit_s, collector.blocking) as monitor:
            results = await _run_all(replace(collector, readings=readings), attempts, schemas)
    collected.loop_lag_s = monitor.max_lag_s
    attempts, results = _without_overlong(attempts, results, collected)
    if tasks and not attempts and not may_be_empty:
        raise NoRollouts(
            f"the prompts of all {len(tasks)} tasks fill the engine's context of "
            f"{collector.engine.max_context} tokens. Raise engine.max_context, or give shorter "
            "prompts in data.train and data.test.",
            collected,
        )
    collected.broken = results.count(_Left.broken)
    groups = _whole_groups(attempts, results)
    collected.groups, collected.places = list(groups.values()), list(groups)
    collected.uneven_prompts = sum(map(_uneven, collected.groups))
    collector.environments.warn_uneven_prompts(collected.uneven_prompts, len(collected.groups))
    usable = [rollout for rollout in collected.rollouts if may_be_scored(rollout)]
    collected.dropped = len(attempts) - len(usable)
    if attempts and not usable and not may_be_empty:
        raise NoRollouts(_why(collected.rollouts, len(attempts)), collected)
    started = time.perf_counter()
    try:
        unscored = await collector.rubric.score(usable)
    except RewardError as error:
        error.rollouts = usable
        raise
    for rollout in usable:
        # Once more, after all code that is not ours: what is trained is what was verified.
        verify(rollout, collector.chat, schemas[rollout.rollout_id], readings)
    collected.dropped += len(unscored)
    collected.reward_s = time.perf_counter() - started
    if collector.rubric.strict and usable and len(unscored) == len(usable):
        told = f"not one of {len(usable)} rollouts could be scored; {unscored[0]}"
        raise NoRewards(told, collected)
    return collected


def unrewarded(rollouts: Sequence[Rollout]) -> str | None:
    """Return why the first rollout has no reward, empty for no rollouts; None: one has a reward."""
    if any(rollout.reward is not None for rollout in rollouts):
        return None
    first = next(filter(may_be_scored, rollouts), None)
    if first is None:
        return ""
    names = ", ".join(first.rewards)
    return first.error or (
        f"rollout {first.rollout_id!r} of task {first.task.task_id!r}: every reward function "
        f"({names}) gave None, which means that it does not apply to the rollout"
    )


def _why(failed: Sequence[Rollout], attempts: int) -> str:
    """How all of `attempts` rollouts failed, and what to change."""
    reasons = Counter(str(rollout.stop_reason) for rollout in failed)
    if len(failed) < attempts:
        reasons["in a group with a broken ledger"] = attempts - len(failed)
    counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    errors = [f"; the first: {rollout.error}" for rollout in failed if rollout.error]
    late = reasons[StopReason.timeout]
    remedy = ". Raise rollout.timeout_s, which passed before a turn was complete" if late else ""
    return f"all {attempts} rollouts failed ({counted}){''.join(errors[:1])}{remedy}"


def _plan(
    collector: Collector,
    placed: Sequence[tuple[int, Task]],
    samples: int,
    sampling: Sampling,
    seed_path: tuple[int | str, ...],
    collected: Collected,
) -> list[_Attempt]:
    attempts = []
    name = "-".join(str(part) for part in seed_path[1:])
    for occurrence, task in placed:
        try:
            prompt_ids = _shared_prompt(collector, task)
        except PromptTooLong:
            collected.overlong += 1
            continue
        group_id = f"{name}-{occurrence}"
        attempts += [
            _Attempt(
                place=occurrence,
                request=RolloutRequest(
                    task=task,
                    sampling=replace(sampling, seed=derive_seed(*seed_path, occurrence, sample, 0)),
                    rollout_id=f"{group_id}-{sample}",
                    group_id=group_id,
                    sample=sample,
                    group_seed=derive_seed(*seed_path, occurrence),
                    prompt_ids=prompt_ids,
                ),
            )
            for sample in range(samples)
        ]
    return attempts


def _shared_prompt(collector: Collector, task: Task) -> list[int] | None:
    """The prompt of a task's rollouts; None where their environments add to it."""
    kind = collector.environments.kind_of(task)
    if kind is not None and kind.has_reset:
        return None
    tools = RowTools(task, collector.toolbox, collector.environments)
    prompt_ids = collector.chat.prompt_ids(task.messages, tools.schemas)
    check_room(task, len(prompt_ids), collector.engine.max_context)
    return prompt_ids


async def _run_all(
    collector: Collector,
    attempts: Sequence[_Attempt],
    schemas: Schemas,
) -> list[Rollout | _Left]:
    engine, at_once = collector.engine, collector.limits.concurrency
    if collector.limits.deterministic is not False and isinstance(engine, Lockstep):
        engine.expect([attempt.request.rollout_id for attempt in attempts])
        # The engine admits by its rows; a limit here would keep back rollouts it waits for.
        at_once = len(attempts)
    gate, pace = asyncio.Semaphore(at_once), Pace()
    paced = replace(collector, pace=pace)
    finished = 0

    async def run(attempt: _Attempt) -> Rollout | _Left:
        nonlocal finished
        async with gate:
            await pace.turn()
            result = await _attempt(paced, attempt.request, schemas)
        finished += 1
        if collector.progress is not None:
            collector.progress(finished, len(attempts))
        return result

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(attempt)) for attempt in attempts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


async def _attempt(
    collector: Collector, request: RolloutRequest, schemas: Schemas
) -> Rollout | _Left:
    """One rollout with its ledger verified, or why there is none; `schemas` gets its tools'."""
    try:
        with collector.in_flight.noted(request.rollout_id, collector.engine) as engine:
            rollout = await run_rollout(request, replace(collector, engine=engine))
        if rollout.length:  # an environment that could not be started has not even a prompt
            tools = RowTools(rollout.task, collector.toolbox, collector.environments)
            schemas[rollout.rollout_id] = tools.schemas
            verify(rollout, collector.chat, tools.schemas, collector.readings)
    except PromptTooLong:
        return _Left.overlong
    except LedgerError:
        if collector.limits.on_break is OnBreak.error:
            raise
        return _Left.broken
    return rollout


def _without_overlong(
    attempts: Sequence[_Attempt], results: Sequence[Rollout | _Left], collected: Collected
) -> tuple[list[_Attempt], list[Rollout | _Left]]:
    """Leave out, and count, the groups that hold an overlong prompt."""
    pairs = list(zip(attempts, results, strict=True))
    overlong = {attempt.place for attempt, result in pairs if result is _Left.overlong}
    collected.overlong += len(overlong)
    kept = [(attempt, result) for attempt, result in pairs if attempt.place not in overlong]
    return [attempt for attempt, _ in kept], [result for _, result in kept]


def _uneven(group: Sequence[Rollout]) -> bool:
    """Return True if the rollouts of a group began with different prompts."""
    prompts = {r.trajectories[0].spans[0].token_ids for r in group if r.length}
    return len(prompts) > 1


def may_be_scored(rollout: Rollout) -> bool:
    """Return True unless something besides the model failed, which is no reward of zero."""
    failed = rollout.stop_reason in (StopReason.error, StopReason.aborted)
    return rollout.turns > 0 and not failed


def _whole_groups(
    attempts: Sequence[_Attempt], results: Sequence[Rollout | _Left]
) -> dict[int, list[Rollout]]:
    """The rollouts by the place of their task, without groups that hold a broken ledger."""
    groups: dict[int, list[Rollout | _Left]] = {}
    for attempt, result in zip(attempts, results, strict=True):
        groups.setdefault(attempt.place, []).append(result)
    return {
        place: [result for result in group if isinstance(result, Rollout)]
        for place, group in groups.items()
        if _Left.broken not in group
    }


def step_figures(
    collector: Collector, collected: Collected, seconds: Mapping[str, float]
) -> dict[str, float]:
    """The metrics of the rollouts of all processes; `seconds` by phase, `rollout` among them."""
    tokens = sum(rollout.sampled_length for rollout in collected.rollouts)
    return {
        **rollout_metrics(
            collected.groups, tools=collector.tool_names, rewards=collector.rubric.names
        ),
        "rollout/dropped": collected.dropped,
        "rollout/ledger_breaks": collected.broken,
        "time/loop_lag_max_s": collected.loop_lag_s,
        "data/overlong": collected.overlong,
        "data/uneven_prompts": collected.uneven_prompts,
        "time/reward_s": collected.reward_s,
        **{f"time/{phase}_s": value for phase, value in seconds.items()},
        "tokens_per_s": tokens / seconds["rollout"],
    }
