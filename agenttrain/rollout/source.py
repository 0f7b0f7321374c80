"""Where a step's rollouts come from: sampled for its tasks, or made of demonstrations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.data.config import OnBadRow
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.tasks import TaskSource
from agenttrain.rollout.collector import (
    Collected,
    Collector,
    NoRewards,
    step_metrics,
    why_unrewarded,
)
from agenttrain.rollout.demonstration import REMEDY, BadDemonstration, Demonstrator
from agenttrain.rollout.sampling import sample_groups
from agenttrain.rollout.sharing import Costs, Peers, SingleProcess, merge_shares
from agenttrain.types import Rollout, Sampling

Metrics = dict[str, float]
SAMPLER_METRICS = "sampling/"
"""Begin of the metrics that compare with the engine that sampled."""


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One process's rollouts of a step."""

    groups: list[list[Rollout]]
    """To train on, in task order; groups of other processes are there and empty."""
    rollouts: list[Rollout]
    """All rollouts of this process, in (task, sample) order, also those that are not trained on."""


@dataclass(slots=True, kw_only=True)
class SampledBatch(StepBatch):
    """Rollouts that an engine sampled."""

    collected: Collected
    tasks: int
    """Tasks that all processes took: how far the data cursor moves."""
    costs: Costs
    """Expected costs after this step."""
    stuck: int
    """Abandoned tool calls of this process that still run."""
    metrics: Metrics
    """Metrics of the groups of all processes."""


@dataclass(slots=True, kw_only=True)
class RolloutSource:
    """Samples the groups of a step, each process its share of the tasks.

    `cursor` counts the tasks that finished steps took.
    """

    phase = "rollout"
    collector: Collector
    tasks: TaskSource
    algorithm: AlgorithmConfig
    tasks_per_step: int
    seed: int
    """The run's."""
    curriculum: Curriculum | None = None
    """Chooses among the tasks; None: they are taken in their order."""
    peers: Peers = field(default_factory=SingleProcess)
    costs: Costs = field(default_factory=Costs)
    """Costs of finished rollouts: which process gets which task is the same after a resume."""
    cursor: int = 0

    async def batch(self, step: int) -> StepBatch:
        """Sample and score the groups of a step; `finish` takes note of them.

        Raises NoRewards, in all processes, where not one rollout of all has a reward.
        """
        costs = self.costs.copy()
        tasks = self.curriculum or self.tasks
        drawn = await sample_groups(
            self.collector,
            lambda start, count: tasks.tasks(self.cursor + start, count),
            count=self.tasks_per_step,
            config=self.algorithm,
            sampling=Sampling(temperature=self.collector.limits.temperature),
            seed_path=(self.seed, "train", step),
            peers=self.peers,
            costs=costs,
        )
        rollouts = drawn.collected.rollouts
        reasons = self.peers.exchange([why_unrewarded(rollouts)], "the rewards of a step")
        if None not in reasons:
            reason = next(filter(None, reasons), "no rollout ended well")
            raise NoRewards(
                f"step {step}: not one rollout has a reward, so that there is nothing to learn; "
                f"the first: {reason}",
                drawn.collected,
            )
        return SampledBatch(
            groups=drawn.trained,
            rollouts=rollouts,
            collected=drawn.collected,
            tasks=drawn.tasks,
            costs=costs,
            stuck=len(self.collector.stuck),
            metrics=drawn.metrics() if self.algorithm.resamples else {},
        )

    def finish(self, batch: StepBatch) -> None:
        """Move on to the tasks of the next step: the policy has learnt from this one."""
        assert isinstance(batch, SampledBatch)
        self.cursor += batch.tasks
        self.costs = batch.costs
        if self.curriculum is not None:
            results = self.curriculum.results(batch.collected.groups)
            self.curriculum.learn(self.cursor, self.peers.exchange(results, "a step's results"))

    def summarise(
        self, batches: Sequence[StepBatch], training: Metrics, seconds: Mapping[str, float]
    ) -> tuple[Metrics, list[Rollout]]:
        """Return the metrics and rollouts of a step from the batches of all processes.

        `training` are those of the update; `seconds` are the slowest process's, by phase.
        """
        sampled = [batch for batch in batches if isinstance(batch, SampledBatch)]
        collected = merge_shares([batch.collected for batch in sampled])
        metrics = {**step_metrics(self.collector, collected, seconds), **training}
        metrics["tools/stuck"] = sum(batch.stuck for batch in sampled)
        if self.curriculum is not None:
            metrics |= self.curriculum.metrics()
        return {**metrics, **sampled[0].metrics}, collected.rollouts

    def state_dict(self) -> dict[str, Any]:
        """Return what the rollouts of later steps depend on besides the policy; JSON."""
        return {
            "cursor": self.cursor,
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "costs": self.costs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.cursor = state["cursor"]
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])
        self.costs.load_state_dict(state["costs"])


@dataclass(slots=True, kw_only=True)
class DemonstrationBatch(StepBatch):
    """Rollouts made of rows, and counts of the rows that gave none."""

    places: list[int]
    """Position of each rollout's row."""
    overlong: int = 0
    bad: int = 0


@dataclass(slots=True, kw_only=True)
class Demonstrations:
    """Makes rollouts of reward 1 out of rows with answers, each process its share of the rows.

    REINFORCE without a baseline then learns the cross entropy, -log p, averaged over exactly the
    tokens that the assistant says. Step n takes the n-th `sft.batch_size` rows.
    """

    phase = "data"
    demonstrator: Demonstrator
    tasks: TaskSource
    batch_size: int
    """Rows of a step, of all processes."""
    on_bad_row: OnBadRow = OnBadRow.error
    max_tokens: int = 2**31
    """Most tokens of a conversation; longer ones are left out."""
    peers: Peers = field(default_factory=SingleProcess)

    async def batch(self, step: int) -> StepBatch:
        """Make the demonstrations of a step. Raises BadDemonstration, in all processes."""
        await asyncio.sleep(0)  # nothing else here waits, and Ctrl-C arrives where something does
        return self.demonstrate(self.tasks, (step - 1) * self.batch_size, self.batch_size)

    def demonstrate(self, source: TaskSource, start: int, count: int) -> DemonstrationBatch:
        """Make rollouts of this process's share of `count` rows: every row of the n-th is its own.

        Of n processes the r-th has the rows r, n + r, 2n + r, … Raises BadDemonstration.
        """
        batch = DemonstrationBatch(groups=[], rollouts=[], places=[])
        failure: BadDemonstration | None = None
        try:
            for index, task in enumerate(source.tasks(start, count)):
                batch.groups.append([])
                if index % self.peers.size == self.peers.rank:
                    self._add(batch, task, start + index)
        except BadDemonstration as error:
            failure = BadDemonstration(f"{error}. {REMEDY}")
        self.peers.exchange((), "the demonstrations of a step", failure)
        return batch

    def _add(self, batch: DemonstrationBatch, task: Any, place: int) -> None:
        try:
            rollout = self.demonstrator(task, f"{place}/{task.task_id}")
        except BadDemonstration:
            if self.on_bad_row is OnBadRow.error:
                raise
            batch.bad += 1
            return
        if rollout.length > self.max_tokens:
            batch.overlong += 1
            return
        rollout.reward = 1.0
        batch.groups[-1].append(rollout)
        batch.rollouts.append(rollout)
        batch.places.append(place)

    def finish(self, batch: StepBatch) -> None:
        """Do nothing: the rows of a step follow from its number."""

    def summarise(
        self, batches: Sequence[StepBatch], training: Metrics, seconds: Mapping[str, float]
    ) -> tuple[Metrics, list[Rollout]]:
        """Return the metrics and rollouts of a step from the batches of all processes."""
        shown = [batch for batch in batches if isinstance(batch, DemonstrationBatch)]
        by_place = {p: r for b in shown for p, r in zip(b.places, b.rollouts, strict=True)}
        rollouts = [by_place[place] for place in sorted(by_place)]
        tokens = sum(rollout.length for rollout in rollouts)
        sampler = [name for name in training if name.startswith(SAMPLER_METRICS)]
        metrics = {
            **{name: value for name, value in training.items() if name not in sampler},
            "sft/conversations": len(rollouts),
            "sft/tokens": tokens,
            "data/overlong": sum(batch.overlong for batch in shown),
            "data/bad_rows": sum(batch.bad for batch in shown),
            **{f"time/{phase}_s": value for phase, value in seconds.items()},
            "tokens_per_s": tokens / sum(seconds.values()),
        }
        return metrics, rollouts

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the rows of a step follow from its number."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""
