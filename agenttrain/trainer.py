"""The training loop: collect rollouts, update the policy, give the engine its weights, record.

This is the file to read first, with `types.py` and `rollout/loop.py`. In a run of several processes
each has a Trainer, and they do the same steps: each samples its share of a step's tasks alone and
trains on it together with the others.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agenttrain.config.schema import RunConfig
from agenttrain.crash import Evidence
from agenttrain.data.source import TaskSource
from agenttrain.evaluate import Evaluation, evaluate
from agenttrain.guards import Guards, GuardTripped
from agenttrain.rollout.collect import Collected, Collector
from agenttrain.rollout.deal import Costs
from agenttrain.rollout.peers import merge
from agenttrain.rollout.resample import Drawn, draw
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.tracking.tracker import Tracker
from agenttrain.training.blame import check_logprobs, check_weights
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import rest, sync
from agenttrain.training.world import World
from agenttrain.types import Sampling


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One process of a run. `done` counts finished steps, `cursor` the tasks that they drew."""

    config: RunConfig
    collector: Collector
    policy: Policy
    train_tasks: TaskSource
    test_tasks: TaskSource
    tracker: Tracker
    checkpoints: Checkpoints
    evidence: Evidence
    guards: Guards
    done: int = 0
    cursor: int = 0
    world: World = field(default_factory=World)
    costs: Costs = field(default_factory=Costs)
    _clock: Clock = field(default_factory=lambda: Clock())

    async def train(self) -> None:
        """The steps that are left, with evaluations and checkpoints on the way."""
        self.tracker.begin()
        while self.done < self.config.steps:
            metrics, collected = await self.step(self.done + 1)
            self.done += 1
            self.tracker.step(self.done, metrics, collected.rollouts)
            self._guard(metrics, collected)
            if self._due(self.config.eval.every):
                await self.evaluate(f"step-{self.done}")
            if self._due(self.config.checkpoint.every):
                self.save()

    def _guard(self, metrics: dict[str, float], collected: Collected) -> None:
        """The main process has seen all rollouts: what it says goes for all."""
        with self.world.together(f"the guards after step {self.done}", GuardTripped):
            if self.world.is_main:
                self.guards.look(self.done, metrics, collected.rollouts, self.tracker.progress.log)

    async def step(self, number: int) -> tuple[dict[str, float], Collected]:
        """One step: rollouts, advantages and updates, weight sync; its metrics.

        The main process gets the rollouts and metrics of all processes, another its own rollouts.
        Raises NotFinite and RewardError, with the evidence in the run's folder.
        """
        self._clock = clock = Clock()
        with self.evidence.of(number) as seen:
            check_weights(self.policy.model, f"before step {number}", self.world)
            self.tracker.phase("rollout")
            with clock("rollout"):
                drawn = await self._draw(number)
            seen.rollouts = drawn.collected.rollouts
            check_logprobs(seen.rollouts, self.world)
            self.tracker.phase("train")
            with clock("train"):
                await rest(self.collector.engine)
                training = self.policy.update(drawn.trained)
            check_weights(self.policy.model, f"after the update of step {number}", self.world)
        with clock("sync"):
            await sync(self.policy, self.collector.engine, number, self.config.weight_sync)
        self.cursor += drawn.tasks
        return self._told(drawn, training, clock)

    async def _draw(self, number: int) -> Drawn:
        return await draw(
            self.collector,
            lambda start, count: self.train_tasks.tasks(self.cursor + start, count),
            count=self.config.tasks_per_step,
            config=self.config.algorithm,
            sampling=Sampling(temperature=self.config.rollout.temperature),
            seed_path=(self.config.seed, "train", number),
            peers=self.world,
            costs=self.costs,
        )

    def _told(
        self, drawn: Drawn, training: dict[str, float], clock: Clock
    ) -> tuple[dict[str, float], Collected]:
        """Metrics of all processes, and rollouts on the main one; its seconds are the slowest's."""
        mine = (drawn.collected, clock.seconds, len(self.collector.stuck))
        told = self.world.to_main([mine], "the rollouts of a step")
        if not told:
            return training, drawn.collected
        shares, clocks, stuck = zip(*told, strict=True)
        seconds = {phase: max(one[phase] for one in clocks) for phase in clock.seconds}
        collected = merge(shares)
        metrics = self._metrics(collected, training, seconds)
        metrics["tools/stuck"] = sum(stuck)
        more = drawn.metrics() if self.config.algorithm.resamples else {}
        return {**metrics, **more}, collected

    def _metrics(
        self, collected: Collected, training: dict[str, float], seconds: dict[str, float]
    ) -> dict[str, float]:
        tokens = sum(rollout.sampled_length for rollout in collected.rollouts)
        return {
            **rollout_metrics(
                collected.groups,
                tools=self.collector.tool_names,
                rewards=self.collector.rubric.names,
            ),
            **training,
            "rollout/dropped": collected.dropped,
            "rollout/ledger_breaks": collected.broken,
            "time/loop_lag_max_s": collected.loop_lag_s,
            "data/overlong": collected.overlong,
            "data/uneven_prompts": collected.uneven_prompts,
            "time/reward_s": collected.reward_s,
            **{f"time/{phase}_s": value for phase, value in seconds.items()},
            "tokens_per_s": tokens / seconds["rollout"],
        }

    async def evaluate(self, label: str) -> list[Evaluation]:
        """Evaluate on the first `eval.questions` test tasks; empty if there are to be none."""
        questions = min(self.config.eval.questions, len(self.test_tasks))
        if questions == 0:
            return []
        self.tracker.phase(f"evaluation {label}")
        tasks = self.test_tasks.tasks(0, questions)
        evaluations = await evaluate(
            self.collector,
            tasks,
            self.config.eval,
            seed=self.config.seed,
            world=self.world,
            costs=self.costs,
        )
        for evaluation in evaluations:
            self.tracker.evaluation(f"{label}/{evaluation.label}", self.done, evaluation.metrics())
        return evaluations

    def _due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0 and self.done < self.config.steps

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        state = {"cursor": self.cursor, "streak": self.guards.streak}
        path = self.checkpoints.save(self.policy, step=self.done, state=state)
        self.tracker.checkpoint(path)
        return path


class Clock:
    """Wall seconds by phase.

    Example: ``with clock("train"): …`` adds to ``clock.seconds["train"]``.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed
