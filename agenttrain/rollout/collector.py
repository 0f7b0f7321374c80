"""The rollouts of one step: all groups in flight at once, results ordered by task and sample.

No rollout waits for another. `step_metrics` computes the metrics of the step.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, Self

from agenttrain.chat.encoding import ChatError
from agenttrain.data.config import SPLITS, OnBadRow, at_source
from agenttrain.data.tasks import RowError
from agenttrain.engines.base import Lockstep
from agenttrain.environments.environments import Environments
from agenttrain.rewards.function import RewardError
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.config import OnBreak
from agenttrain.rollout.ledger import ParsedTurns, verify
from agenttrain.rollout.loop import run_rollout
from agenttrain.rollout.monitoring import InFlight, LoopMonitor, Throttle, Waiting, light_gc
from agenttrain.rollout.request import (
    BatchRequest,
    PromptTooLong,
    RolloutContext,
    RolloutRequest,
    check_room,
)
from agenttrain.rollout.row_tools import RowTools
from agenttrain.tools.toolbox import Toolbox
from agenttrain.tracking.metrics import agent_metrics, rollout_metrics, source_metrics
from agenttrain.types import AgenttrainError, LedgerError, Rollout, StopReason, Task
from agenttrain.utils.signals import StopRequest

Schemas = dict[str, list[dict[str, Any]]]
"""Tool schemas of each rollout, by its id."""


class NoRollouts(AgenttrainError):
    """A step has no rollout to learn from; the message quotes the first failure."""

    def __init__(self, message: str, collected: Collected) -> None:
        """`collected` holds the counts and the rollouts that failed."""
        super().__init__(message)
        self.collected = collected


class NoRewards(NoRollouts):
    """No rollout of a step has a reward; the message says why the first has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """Names of tools, rewards and sources that metrics contain, as in `tools/search/calls`."""

    tools: Sequence[str]
    """Names of all tools that some rollout may have."""
    rewards: Sequence[str]
    sources: Sequence[str] = ()
    """Names of the sources of a mixture."""
    outside_agents: bool = False
    """Outside agents make the rollouts, which have metrics of their own."""


class HasTools(Protocol):
    """A kit: a run's tools, environments and rewards, or those of one source of a mixture."""

    @property
    def toolbox(self) -> Toolbox: ...

    @property
    def environments(self) -> Environments: ...

    @property
    def rubric(self) -> Rubric: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTools:
    """Tools, environments and rewards of one source of a mixture (`Collector.sources`)."""

    toolbox: Toolbox
    environments: Environments
    rubric: Rubric
    on_bad_row: OnBadRow = OnBadRow.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector(RolloutContext):
    """Everything that makes and scores a run's rollouts: the argument of `collect`.

    `Components.collector` makes it. Between two calls of `collect` nothing is in flight.

    A kit is a toolbox, environments and a rubric (rewards). In a mixture every task belongs to one
    of the `sources` and uses its kit. Without sources all tasks use the collector's own.
    """

    rubric: Rubric
    sources: Mapping[str, SourceTools] = field(default_factory=dict)
    """Tools, environments and rewards of the sources of a mixture, by name; empty: all tasks have
    those of the collector."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Request to stop the run, which cuts a collection short."""
    in_flight: InFlight = field(default_factory=InFlight)
    """The rollouts in flight, which the watchdog reads."""
    attempt: Callable[[RolloutRequest, RolloutContext], Awaitable[Rollout]] | None = None
    """Makes a rollout with an outside agent, one that has a loop of its own and calls our engine.
    It raises what `run_rollout` raises. None: `run_rollout`, our own loop, makes it."""
    progress: Callable[[int, int], None] | None = None
    """Called as ``progress(finished, total)`` after every rollout of a call of `collect`."""
    gate: asyncio.Semaphore | None = None
    """Bounds the rollouts in flight of several calls together; None: each call has its own."""
    monitor: LoopMonitor | None = None
    """Watches the event loop for several calls; None: each call has its own."""
    on_bad_row: OnBadRow = OnBadRow.error
    """Consequence of a prompt that the chat template refuses, or whose text it leaves out."""
    place_of: Callable[[Task], str] = "task {0.task_id}".format
    """Returns where a task's row stands, for error messages."""

    def for_task(self, task: Task) -> Self:
        """Return the collector with the tools, environments and rewards of the task's data source.

        In a run without sources this is the collector itself.
        """
        kit = self.sources.get(task.source)
        if kit is None:
            return self
        return replace(
            self,
            toolbox=kit.toolbox,
            environments=kit.environments,
            rubric=kit.rubric,
            on_bad_row=kit.on_bad_row,
        )

    def lenient(self) -> Self:
        """Return the collector with rewards whose NaN does not end the run, for evaluations."""
        sources = {
            name: replace(kit, rubric=kit.rubric.lenient()) for name, kit in self.sources.items()
        }
        return replace(self, rubric=self.rubric.lenient(), sources=sources)

    @property
    def _kits(self) -> Sequence[SourceTools | Self]:
        """The kits that tasks use: one per source; without sources the collector's own."""
        return list(self.sources.values()) or [self]

    def toolboxes(self) -> list[Toolbox]:
        """Return all toolboxes, each once: sources may share them."""
        toolboxes = [
            toolbox
            for kit in self._kits
            for toolbox in (kit.toolbox, *kit.environments.toolboxes.values())
        ]
        return list({id(toolbox): toolbox for toolbox in toolboxes}.values())

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights of all reward functions, by name."""
        return {name: weight for kit in self._kits for name, weight in kit.rubric.weights.items()}

    def waiting(self) -> list[Waiting]:
        """Return the rollouts in flight and what each waits for; callable from any thread."""
        calls = (call for toolbox in self.toolboxes() for call in toolbox.running_calls)
        return self.in_flight.waiting(calls)

    def blocking(self, limit_s: float) -> str | None:
        """Return the async tool that has blocked the event loop for over `limit_s`."""
        for toolbox in self.toolboxes():
            if (name := toolbox.blocking(limit_s)) is not None:
                return name
        return None

    @property
    def stuck(self) -> tuple[str, ...]:
        """Names of the tools whose abandoned calls still run, one per call."""
        # By identity: sources may share a toolbox, whose calls count once.
        toolboxes = {id(kit.toolbox): kit.toolbox.stuck for kit in self._kits}
        environments = {id(kit.environments): kit.environments.stuck for kit in self._kits}
        parts = (*toolboxes.values(), *environments.values())
        return tuple(name for stuck in parts for name in stuck)

    def tools_of(self, task: Task) -> tuple[str, ...]:
        """Return the names of all tools that rollouts of this task may have."""
        source = self.for_task(task)
        # The methods of the task's environment are tools too, in a toolbox of their own.
        methods = source.environments.toolbox_of(source.environments.kind_of(task))
        return (*source.toolbox.names, *methods.names)

    @property
    def metric_names(self) -> MetricNames:
        """What the metrics of its rollouts are named after."""
        return metric_names(self._kits, self.sources, outside_agents=self.attempt is not None)


def metric_names(
    kits: Iterable[HasTools], sources: Iterable[str], *, outside_agents: bool
) -> MetricNames:
    """Return the names that metrics contain: of tools (``tools/search/calls``), rewards, sources.

    A kit is the tools, environments and rewards of a run, or of one of its data `sources`.
    `outside_agents`: agents with loops of their own make the rollouts, and add metrics.
    """
    kits = list(kits)
    tools = (n for kit in kits for n in (*kit.toolbox.names, *kit.environments.tool_names))
    rewards = (name for kit in kits for name in kit.rubric.names)
    return MetricNames(
        tools=tuple(dict.fromkeys(tools)),
        rewards=tuple(dict.fromkeys(rewards)),
        sources=tuple(sources),
        outside_agents=outside_agents,
    )


@dataclass(slots=True, kw_only=True)
class Collected:
    """The scored rollouts of a request, or of several, and counts of those not trained on."""

    groups: list[list[Rollout]] = field(default_factory=list)
    """In task order; the rollouts of a group in sample order."""
    places: list[int] = field(default_factory=list)
    """Position of each group's task among those of the step."""
    overlong: int = 0
    """Tasks whose prompt leaves no room to sample."""
    bad_rows: int = 0
    """Tasks whose prompt the chat template refuses, left out by `data.on_bad_row=skip`."""
    overlong_sources: list[str] = field(default_factory=list)
    """Sources of a mixture that have overlong tasks, each once; "" stands for a run without any."""
    bad_sources: list[str] = field(default_factory=list)
    """Sources that have bad rows, likewise."""
    dropped: int = 0
    """Rollouts that are not trained on: they failed, their group has a broken ledger, or a reward
    function could not score them."""
    broken: int = 0
    """Rollouts whose ledger broke."""
    uneven_prompts: int = 0
    """Groups whose rollouts began with different prompts, because their environment's reset gave
    different messages: their rewards then compare different questions."""
    reward_s: float = 0.0
    """Wall seconds of scoring."""
    loop_lag_s: float = 0.0
    """Longest time that the event loop stood still."""

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts, in (task, sample) order."""
        return [rollout for group in self.groups for rollout in group]

    def leave_out_overlong(self, task: Task) -> None:
        """Count a task whose prompt leaves no room to sample."""
        self.overlong += 1
        self.overlong_sources = list(dict.fromkeys([*self.overlong_sources, task.source]))

    def leave_out_bad_row(self, task: Task) -> None:
        """Count a task whose prompt the chat template refuses."""
        self.bad_rows += 1
        self.bad_sources = list(dict.fromkeys([*self.bad_sources, task.source]))

    def extend(self, later: Collected) -> None:
        """Add the result of a later call."""
        self.groups += later.groups
        self.places += later.places
        self.overlong += later.overlong
        self.bad_rows += later.bad_rows
        self.overlong_sources = list(
            dict.fromkeys([*self.overlong_sources, *later.overlong_sources])
        )
        self.bad_sources = list(dict.fromkeys([*self.bad_sources, *later.bad_sources]))
        self.dropped += later.dropped
        self.broken += later.broken
        self.uneven_prompts += later.uneven_prompts
        self.reward_s += later.reward_s
        self.loop_lag_s = max(self.loop_lag_s, later.loop_lag_s)


class _NoRollout(StrEnum):
    """Why an attempt gave no rollout. It stands in the rollout's place among the results."""

    broken = "broken"
    """Its ledger broke."""
    overlong = "overlong"
    """Its prompt leaves no room to sample."""


async def collect(collector: Collector, request: BatchRequest) -> Collected:
    """Run the rollouts of a request and score them.

    Raises NoRollouts when not one rollout can be scored, unless the request `may_be_empty`, and
    NoRewards when none of them gets a reward. Raises LedgerError and ToolUnavailable as
    `rollout.on_break` and `rollout.on_tool_failure` say, and StuckTools when abandoned calls pile
    up.
    """
    collected = Collected()
    requests = _rollout_requests(collector, request, collected)  # counts tasks that it leaves out
    collector = replace(
        collector, parsed_turns=ParsedTurns(), throttle=collector.throttle or Throttle()
    )
    schemas: Schemas = {}  # filled by `_run_all`: the tool schemas of each rollout, by its id
    # A full garbage collection would block the event loop for a third of a second.
    with light_gc():
        if collector.monitor is not None:  # the caller watches the event loop over many calls
            results = await _run_all(collector, requests, schemas)
        else:
            limit_s = collector.limits.max_loop_lag_s
            async with LoopMonitor(limit_s, collector.blocking) as monitor:
                results = await _run_all(collector, requests, schemas)
            collected.loop_lag_s = monitor.max_lag_s
    attempts = _group_results(requests, results, collected)  # adds the groups to `collected`
    # `attempt` runs an outside agent, which may begin every rollout with another prompt.
    has_outside_agent = collector.attempt is not None
    if not has_outside_agent:
        collector.environments.warn_uneven_prompts(collected.uneven_prompts, len(collected.groups))

    usable = [rollout for rollout in collected.rollouts if may_be_scored(rollout)]
    collected.dropped = attempts - len(usable)  # so far: scoring may drop more
    if request.tasks and not request.may_be_empty:
        check_usable(collected, len(request.tasks), attempts, collector.engine.max_context)
    started = time.perf_counter()
    with collector.in_flight.timeline.phase("reward", label=request.name):
        unscored = await _score(collector, usable)
    for rollout in usable:
        # Again, after all user code has run: what is trained is what was verified.
        verify(rollout, collector.chat, schemas[rollout.rollout_id], collector.parsed_turns)
    collected.dropped += len(unscored)
    collected.reward_s = time.perf_counter() - started
    # An evaluation, whose rubric is not strict, counts its unscored rollouts instead.
    if collector.rubric.strict and usable and len(unscored) == len(usable):
        message = f"not one of {len(usable)} rollouts could be scored; {unscored[0]}"
        raise NoRewards(message, collected)
    return collected


async def _score(collector: Collector, rollouts: Sequence[Rollout]) -> Sequence[str]:
    """Score rollouts; return the reasons of those that could not be scored. Raises RewardError.

    Each gets the rewards of its source. A rollout whose outside agent failed gets 0
    (`agent.on_failure=zero`).
    """
    by_source: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.stop_reason is StopReason.agent_failed:
            names = collector.for_task(rollout.task).rubric.names
            rollout.rewards, rollout.reward = dict.fromkeys(names, 0.0), 0.0
        else:
            by_source.setdefault(rollout.task.source, []).append(rollout)
    unscored: list[str] = []
    try:
        for scored in by_source.values():
            unscored += await collector.for_task(scored[0].task).rubric.score(scored)
    except RewardError as error:
        error.rollouts = list(rollouts)
        raise
    return unscored


def _rollout_requests(
    collector: Collector, request: BatchRequest, collected: Collected
) -> list[RolloutRequest]:
    """Return the requests for single rollouts, task by task.

    A task with an overlong prompt or a bad row gets none and is counted in `collected`. Raises
    RowError for a row with tools or an environment that the run lacks, and ChatError for a prompt
    that the chat template refuses, unless bad rows are skipped.
    """
    requests: list[RolloutRequest] = []
    has_outside_agent = collector.attempt is not None
    for place, task in request.placed_tasks():
        prompt_ids: list[int] | None = None
        source = collector.for_task(task)
        if has_outside_agent:  # it sends a prompt of its own
            requests += request.rollouts(place, task, None)
            continue
        try:
            kind = source.environments.kind_of(task)
            tools = RowTools(task, source.toolbox, source.environments)
        except ValueError as error:
            # The rows were checked when the run began, except later ones of an endless or very
            # long source.
            message = f"{collector.place_of(task)}: {error}"
            raise RowError(at_source(task.source, own_keys=(), text=message)) from error
        if kind is None or not kind.has_reset:
            # All rollouts of the group begin with this prompt. An environment's reset adds to it:
            # then each rollout renders its own, and is counted if that is too long (`_run_all`).
            try:
                prompt_ids = collector.chat.prompt_ids(task.messages, tools.schemas)
                check_room(task, len(prompt_ids), collector.engine.max_context)
            except PromptTooLong:
                collected.leave_out_overlong(task)
                continue
            except ChatError as error:
                if source.on_bad_row is OnBadRow.skip:
                    collected.leave_out_bad_row(task)
                    continue
                message = f"{collector.place_of(task)}: {error}; or data.on_bad_row=skip"
                raise ChatError(at_source(task.source, own_keys=(), text=message)) from error
        requests += request.rollouts(place, task, prompt_ids)
    return requests


async def _run_all(
    collector: Collector, requests: Sequence[RolloutRequest], schemas: Schemas
) -> list[Rollout | _NoRollout]:
    """Run all rollouts and verify their ledgers. Return the results in the order of requests.

    Adds to `schemas` the tool schemas of each rollout, by its id, for later checks of its ledger.
    """
    engine, concurrency = collector.engine, collector.limits.concurrency
    # `deterministic` is None by default: the run then repeats if the engine can.
    if collector.limits.deterministic is not False and isinstance(engine, Lockstep):
        engine.expect([request.rollout_id for request in requests])
        # The engine admits by its slots: a limit here would hold back rollouts that it waits for.
        concurrency = len(requests)
    # Bounds the rollouts in flight. Calls that run at the same time share the collector's gate.
    gate = collector.gate or asyncio.Semaphore(concurrency)
    make_rollout = collector.attempt or run_rollout  # `attempt` runs an outside agent
    throttle = collector.throttle
    assert throttle is not None, "`collect` has set one"
    finished = 0

    async def run(request: RolloutRequest) -> Rollout | _NoRollout:
        """Run one rollout behind the gate, verify its ledger and report the progress."""
        nonlocal finished
        result: Rollout | _NoRollout
        async with gate:
            await throttle.wait()  # so that thousands of starts do not stop the event loop
            try:
                with collector.in_flight.tracked(request.rollout_id, engine) as tracked_engine:
                    # With the tools, environments and rewards of the task's data source.
                    source = collector.for_task(request.task)
                    result = await make_rollout(request, replace(source, engine=tracked_engine))
                if result.length:  # an environment that could not be started has no prompt
                    tools = RowTools(result.task, source.toolbox, source.environments)
                    schemas[result.rollout_id] = tools.schemas
                    verify(result, collector.chat, tools.schemas, collector.parsed_turns)
            except PromptTooLong:
                result = _NoRollout.overlong
            except LedgerError:
                if collector.limits.on_break is OnBreak.error:
                    raise
                result = _NoRollout.broken
        finished += 1
        if collector.progress is not None:
            collector.progress(finished, len(requests))
        return result

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(run(request)) for request in requests]
    except ExceptionGroup as errors:  # the task group has cancelled the other rollouts
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


def _group_results(
    requests: Sequence[RolloutRequest],
    results: Sequence[Rollout | _NoRollout],
    collected: Collected,
) -> int:
    """Add the groups that can be trained on to `collected`; return the number of attempts.

    A group with an overlong prompt or a broken ledger is left out and counted. Attempts are the
    rollouts of all groups whose prompt is not overlong.
    """
    by_place: dict[int, list[Rollout | _NoRollout]] = {}
    tasks: dict[int, Task] = {}
    for request, result in zip(requests, results, strict=True):
        by_place.setdefault(request.place, []).append(result)
        tasks[request.place] = request.task
    attempts = 0
    for place, group in by_place.items():
        if _NoRollout.overlong in group:
            collected.leave_out_overlong(tasks[place])
            continue
        attempts += len(group)
        collected.broken += group.count(_NoRollout.broken)
        if _NoRollout.broken not in group:
            rollouts = [result for result in group if isinstance(result, Rollout)]
            # A rollout of length 0 has no prompt: its environment could not be started.
            prompts = {r.trajectories[0].spans[0].token_ids for r in rollouts if r.length}
            if len(prompts) > 1:
                collected.uneven_prompts += 1
            collected.places.append(place)
            collected.groups.append(rollouts)
    return attempts


def check_usable(collected: Collected, tasks: int, attempts: int, max_context: int) -> None:
    """Raise NoRollouts if no rollout of these tasks can be scored.

    `tasks` counts all tasks, `attempts` the rollouts of those whose prompt was usable. Without
    attempts, prompts were refused by the chat template (bad rows) or too long (overlong).
    """
    # `at_source` returns a key as the run has it: ``data.train`` of the source shop is
    # ``data.sources.shop.train``. `own_keys`, needed for other keys than data's, are none.
    if not attempts and collected.bad_rows:  # perhaps also overlong prompts
        keys = [
            at_source(name, own_keys=(), text="data.on_bad_row") for name in collected.bad_sources
        ]
        raise NoRollouts(
            f"the chat template refuses the prompts of {collected.bad_rows} of all {tasks} tasks "
            f"({', '.join(f'{key}=skip' for key in keys)}), and the others leave no room. "
            f"`agenttrain data` shows rows; {keys[0]}=error names the first such row.",
            collected,
        )
    if not attempts:  # all are overlong
        splits = [
            at_source(name, own_keys=(), text=f"data.{split}")
            for name in collected.overlong_sources
            for split in SPLITS
        ]
        raise NoRollouts(
            f"the prompts of all {tasks} tasks fill the engine's context of {max_context} tokens. "
            f"Raise engine.max_context, or give shorter prompts in {' and '.join(splits)}.",
            collected,
        )
    if not any(map(may_be_scored, collected.rollouts)):
        raise NoRollouts(_describe_failures(collected.rollouts, attempts), collected)


def _describe_failures(failed: Sequence[Rollout], attempts: int) -> str:
    """Return an error message that counts the reasons of `attempts` failed rollouts.

    `failed` has those whose group was kept; the others are in groups with a broken ledger.
    """
    reasons = Counter(str(rollout.stop_reason) for rollout in failed)
    if len(failed) < attempts:
        reasons["in a group with a broken ledger"] = attempts - len(failed)
    counted = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    errors = [f"; the first: {rollout.error}" for rollout in failed if rollout.error]
    remedy = ""
    if reasons[StopReason.timeout]:
        remedy = ". Raise rollout.timeout_s, which passed before a turn was complete"
    return f"all {attempts} rollouts failed ({counted}){''.join(errors[:1])}{remedy}"


def why_unrewarded(rollouts: Sequence[Rollout]) -> str | None:
    """Return why no rollout has a reward, for the first one that could have one.

    None if any rollout has a reward; "" if none could have one.
    """
    if any(rollout.reward is not None for rollout in rollouts):
        return None
    first = next(filter(may_be_scored, rollouts), None)
    if first is None:
        return ""
    if first.error:  # of a reward function that could not score it
        return first.error
    names = ", ".join(first.rewards)
    return (
        f"rollout {first.rollout_id!r} of task {first.task.task_id!r} ended as "
        f"{first.stop_reason}, and every reward function ({names}) gave None, which means that it "
        "does not apply to the rollout"
    )


def may_be_scored(rollout: Rollout) -> bool:
    """Return True unless the rollout failed for a reason that is not the model's fault."""
    failed = rollout.stop_reason in (StopReason.error, StopReason.aborted)
    return rollout.turns > 0 and not failed


def step_metrics(
    names: MetricNames, collected: Collected, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Return the metrics of a step's rollouts, those of all processes.

    `seconds` are the wall seconds of each phase, `rollout` among them.
    """
    tokens = sum(rollout.sampled_length for rollout in collected.rollouts)
    return {
        **rollout_metrics(collected.groups, tools=names.tools, rewards=names.rewards),
        **(agent_metrics(collected.rollouts) if names.outside_agents else {}),
        **source_metrics(collected.groups, names.sources),
        "rollout/dropped": collected.dropped,
        "rollout/ledger_breaks": collected.broken,
        "time/loop_lag_max_s": collected.loop_lag_s,
        "data/overlong": collected.overlong,
        **({"data/bad_rows": collected.bad_rows} if collected.bad_rows else {}),
        "data/uneven_prompts": collected.uneven_prompts,
        "time/reward_s": collected.reward_s,
        **{f"time/{phase}_s": value for phase, value in seconds.items()},
        "tokens_per_s": tokens / seconds["rollout"],
    }
