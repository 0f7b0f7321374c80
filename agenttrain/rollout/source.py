"""Sources of a step's rollouts: sampled for its tasks, or made of recorded conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.data.config import OnBadRow
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.mixture import Mixture
from agenttrain.data.tasks import TaskSource
from agenttrain.engines.config import Sampling
from agenttrain.rollout.collector import (
    Collected,
    Collector,
    MetricNames,
    NoRewards,
    step_metrics,
    why_unrewarded,
)
from agenttrain.rollout.config import tasks_of_round
from agenttrain.rollout.demonstration import REMEDY, BadDemonstration, Demonstrator
from agenttrain.rollout.request import BatchRequest
from agenttrain.rollout.sampling import sample_groups
from agenttrain.rollout.sharing import Costs, Peers, SingleProcess, merge_shares
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.types import Rollout, Task

STATE = ("cursor", "curriculum", "costs")
"""Keys of the state of a RolloutSource."""
SAMPLER_METRICS = "sampling/"
"""Prefix of the metrics that compare the policy with the engine that sampled."""


@dataclass(slots=True, kw_only=True)
class RolloutSource:
    """Samples a step's groups, each process its share. `cursor` counts finished tasks.

    For each step `batch` samples, `finish` moves on to the next step once this one was trained, and
    `summarise` makes the metrics from the batches of all processes. All processes have the same
    tasks, cursor, curriculum and costs, so each finds its share without asking the others.
    """

    phase = "rollout"
    """Name of the step's phase in which `batch` runs, in metrics: ``time/rollout_s``."""
    collector: Collector
    tasks: TaskSource | Mixture
    algorithm: AlgorithmConfig
    tasks_per_step: int
    seed: int
    """Seed of the run."""
    curriculum: Curriculum | Mixture | None = None
    """Chooses the next task, by success or from the sources of a mixture; None: the tasks are taken
    in order."""
    peers: Peers = field(default_factory=SingleProcess)
    costs: Costs = field(default_factory=Costs)
    """Measured costs of rollouts, in tokens, by which a step's tasks are spread evenly over the
    processes. Saved, so that a resumed run assigns tasks to the same processes."""
    cursor: int = 0

    async def batch(self, step: int) -> StepBatch:
        """Sample and score the groups of a step. Raises NoRewards, in all processes."""
        self.collector.in_flight.take_idle_s()  # the idle time before the step does not count
        first_round = tasks_of_round(self.tasks_per_step, self.algorithm.oversample)
        batch = await sample_groups(
            self.collector,
            self.request(step, self._draw_tasks(0, first_round)),
            self._draw_tasks,  # for further rounds, if too few groups can be learned from
            count=self.tasks_per_step,
            config=self.algorithm,
            peers=self.peers,
            costs=self.costs.copy(),  # it learns this step's costs, which `finish` takes over
        )
        # Each process sends why none of its rollouts has a reward. None: one has; "": there was
        # none to score. One process with a reward is enough for all.
        reasons = self.peers.exchange([why_unrewarded(batch.rollouts)], "the rewards of a step")
        if None not in reasons:
            first_reason = next((reason for reason in reasons if reason), "")
            raise nothing_to_learn(step, first_reason, batch.collected)
        batch.stuck = len(self.collector.stuck)  # abandoned tool calls that still run
        # After the exchange: the engine waits for the slowest process too.
        batch.idle_s = self.collector.in_flight.take_idle_s()
        if not self.algorithm.resamples:  # its metrics are of rounds, and there is only one
            batch.metrics = {}
        return batch

    def request(self, step: int, tasks: Sequence[Task]) -> BatchRequest:
        """Return the request for the groups of some tasks of a step."""
        return BatchRequest(
            tasks=tasks,
            samples=self.algorithm.group_size,
            sampling=Sampling(temperature=self.collector.limits.temperature),
            seed_path=(self.seed, "train", step),
        )

    def _draw_tasks(self, start: int, count: int) -> Sequence[Task]:
        """Return `count` tasks, from the `start`-th after the cursor."""
        return (self.curriculum or self.tasks).tasks(self.cursor + start, count)

    def finish(self, batch: StepBatch) -> None:
        """Move the cursor to the tasks of the next step; update costs and curriculum."""
        assert batch.costs is not None, "every batch of a RolloutSource has costs"
        self.cursor += batch.tasks
        self.costs = batch.costs
        if self.curriculum is not None:
            results: list[Any] = list(self.curriculum.results(batch.collected.groups))
            self.curriculum.learn(self.cursor, self.peers.exchange(results, "a step's results"))
            batch.metrics = {**self.curriculum.metrics(), **batch.metrics}

    def summarise(
        self, batches: Sequence[StepBatch], training: dict[str, float], seconds: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Merge the batches of all processes: return the metrics and the rollouts of the step."""
        return merge_batches(self.collector.metric_names, batches, training, seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state that later steps' rollouts depend on, the policy aside."""
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


def nothing_to_learn(step: int, reason: str, collected: Collected) -> NoRewards:
    """Return the error of a step without rewards; `reason` is `why_unrewarded`, perhaps ""."""
    return NoRewards(
        f"step {step}: not one rollout has a reward, so that there is nothing to learn; the first: "
        f"{reason or 'no rollout ended well'}",
        collected,
    )


def merge_batches(
    names: MetricNames,
    batches: Sequence[StepBatch],
    training: dict[str, float],
    seconds: Mapping[str, float],
) -> tuple[dict[str, float], list[Rollout]]:
    """Merge the batches of a step, one per process, into its metrics and rollouts.

    `training` are the metrics of the update, `seconds` the wall seconds of each phase.
    """
    collected = merge_shares([batch.collected for batch in batches])
    metrics = {**step_metrics(names, collected, seconds), **training}
    metrics["tools/stuck"] = sum(batch.stuck for batch in batches)  # tool calls that never ended
    # Asynchronous training samples ahead, also while earlier steps are trained: the tokens are then
    # divided by the seconds of all phases, not only of `rollout`.
    if batches[0].ahead:
        tokens = sum(rollout.sampled_length for rollout in collected.rollouts)
        metrics["tokens_per_s"] = tokens / sum(seconds.values())
    # Seconds in which an engine had no request; None where they were not measured.
    engine_idle_s = [batch.idle_s for batch in batches if batch.idle_s is not None]
    if engine_idle_s:
        metrics["idle/rollout"] = min(fmean(engine_idle_s) / seconds["rollout"], 1.0)
    # Every process has the same metrics of the step's groups, those of all processes.
    group_metrics = batches[0].metrics
    return {**metrics, **group_metrics}, collected.rollouts


@dataclass(slots=True, kw_only=True)
class Demonstrations:
    """Makes rollouts of reward 1 from rows with answers, each process from its share of the rows.

    With reward 1 and no baseline, REINFORCE minimises the cross entropy -log p, averaged over
    exactly the assistant's tokens. Step n takes the n-th `sft.batch_size` rows.
    """

    phase = "data"
    """Name of the step's phase in which `batch` runs, in metrics: ``time/data_s``."""
    demonstrator: Demonstrator
    tasks: TaskSource
    batch_size: int
    """Rows of a step, over all processes."""
    on_bad_row: OnBadRow = OnBadRow.error
    max_tokens: int = 2**31
    """Most tokens of a conversation; longer ones are left out."""
    peers: Peers = field(default_factory=SingleProcess)

    async def batch(self, step: int) -> StepBatch:
        """Make the demonstrations of a step. Raises BadDemonstration, in all processes."""
        await asyncio.sleep(0)  # the only await of a step: Ctrl-C is delivered at one
        return self.demonstrate(self.tasks, (step - 1) * self.batch_size, self.batch_size)

    def demonstrate(self, source: TaskSource, start: int, count: int) -> StepBatch:
        """Make rollouts of this process's share of `count` rows, from row `start` on.

        The process of rank r takes every n-th row from the r-th on, for n processes. Each row is a
        group of one rollout. A bad row counts as dropped, or with `on_bad_row` `error` raises
        BadDemonstration in all processes.

        The batch's `trained` names all rows of the step, in every process alike. Rows of other
        processes, and rows that were left out, are empty groups in it.
        """
        collected = Collected()
        rows = list(source.tasks(start, count))
        failure: BadDemonstration | None = None
        for place, task in enumerate(rows, start):
            in_share = (place - start) % self.peers.size == self.peers.rank
            if not in_share:
                continue
            try:
                rollout = self.demonstrator(task, f"{place}/{task.task_id}")
            except BadDemonstration as error:
                if self.on_bad_row is OnBadRow.error:
                    failure = BadDemonstration(f"{error}. {REMEDY}")
                    break  # to the exchange below, which raises it
                collected.dropped += 1
                continue
            if max(trajectory.length for trajectory in rollout.trajectories) > self.max_tokens:
                collected.leave_out_overlong(task)
                continue
            rollout.reward = 1.0  # with it, REINFORCE maximizes the likelihood of its tokens
            collected.groups.append([rollout])
            collected.places.append(place)
        # Nothing is exchanged but a failure, which is raised in all processes.
        self.peers.exchange((), "the demonstrations of a step", failure)
        return StepBatch(collected=collected, trained=tuple(range(start, start + len(rows))))

    def finish(self, batch: StepBatch) -> None:
        """Do nothing: the rows of a step follow from its number."""

    def summarise(
        self, batches: Sequence[StepBatch], training: dict[str, float], seconds: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Merge the batches of all processes: return the metrics and the rollouts of the step."""
        collected = merge_shares([batch.collected for batch in batches])
        rollouts = collected.rollouts
        tokens = sum(rollout.length for rollout in rollouts)
        # No engine sampled these rollouts.
        training = {
            name: value for name, value in training.items() if not name.startswith(SAMPLER_METRICS)
        }
        metrics = {
            **training,
            "sft/conversations": len(rollouts),
            "sft/tokens": tokens,
            "data/overlong": collected.overlong,
            "data/bad_rows": collected.dropped,
            **{f"time/{phase}_s": value for phase, value in seconds.items()},
            "tokens_per_s": tokens / sum(seconds.values()),
        }
        return metrics, rollouts

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the rows of a step follow from its number."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""
