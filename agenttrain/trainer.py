"""The training loop: collect rollouts, update the policy, give the engine its weights, record.

This is the file to read first, with `types.py` and `rollout/loop.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from agenttrain.config.schema import RunConfig
from agenttrain.crash import Evidence
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.source import TaskSource
from agenttrain.evaluate import Best, Evaluation, evaluate
from agenttrain.guards import Guards
from agenttrain.rollout.collect import Collected, Collector
from agenttrain.rollout.resample import Drawn, draw
from agenttrain.tracking.metrics import rollout_metrics
from agenttrain.tracking.tracker import Tracker
from agenttrain.training.blame import check_logprobs, check_weights
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.policy import Policy
from agenttrain.training.weight_sync import rest, sync
from agenttrain.types import Sampling
from agenttrain.watchdog import Watchdog

Within = Callable[[str], AbstractContextManager[object]]


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One run in one process. `done` counts finished steps, `cursor` the tasks that they drew."""

    config: RunConfig
    collector: Collector
    policy: Policy
    train_tasks: TaskSource
    test_tasks: TaskSource
    tracker: Tracker
    checkpoints: Checkpoints
    evidence: Evidence
    guards: Guards
    watchdog: Watchdog = field(default_factory=Watchdog)
    best: Best = field(default_factory=Best)
    curriculum: Curriculum | None = None
    """Which of the train_tasks are drawn; None: in their order."""
    done: int = 0
    cursor: int = 0
    _clock: Clock = field(default_factory=lambda: Clock())

    async def train(self) -> None:
        """The steps that are left, with evaluations and checkpoints on the way."""
        self.tracker.begin()
        while self.done < self.config.steps:
            metrics, collected = await self.step(self.done + 1)
            self.done += 1
            self.tracker.step(self.done, metrics, collected.rollouts)
            self.guards.look(self.done, metrics, collected.rollouts, self.tracker.progress.log)
            if self._due(self.config.eval.every):
                await self.evaluate(f"step-{self.done}")
            if self._due(self.config.checkpoint.every):
                self.save()

    async def step(self, number: int) -> tuple[dict[str, float], Collected]:
        """One step: rollouts, advantages and updates, weight sync; its metrics.

        Raises NotFinite and RewardError, with the evidence in the run's folder.
        """
        self._clock = clock = Clock(partial(self.watchdog.phase, step=number))
        with self.evidence.of(number) as seen:
            check_weights(self.policy.model, f"before step {number}")
            self.tracker.phase("rollout")
            with clock("rollout"):
                drawn = await self._draw(number)
            seen.rollouts = drawn.collected.rollouts
            check_logprobs(seen.rollouts)
            self.tracker.phase("train")
            with clock("train"):
                await rest(self.collector.engine)
                training = self.policy.update(drawn.trained)
            check_weights(self.policy.model, f"after the update of step {number}")
        with clock("sync"):
            await sync(self.policy, self.collector.engine, number, self.config.weight_sync)
        self.cursor += drawn.tasks
        if self.curriculum is not None:
            self.curriculum.learn(self.cursor, self.curriculum.results(drawn.collected.groups))
        return self._metrics(drawn, training, clock), drawn.collected

    async def _draw(self, number: int) -> Drawn:
        source = self.curriculum or self.train_tasks
        return await draw(
            self.collector,
            lambda start, count: source.tasks(self.cursor + start, count),
            count=self.config.tasks_per_step,
            config=self.config.algorithm,
            sampling=Sampling(temperature=self.config.rollout.temperature),
            seed_path=(self.config.seed, "train", number),
        )

    def _metrics(self, drawn: Drawn, training: dict[str, float], clock: Clock) -> dict[str, float]:
        collected = drawn.collected
        tokens = sum(rollout.sampled_length for rollout in collected.rollouts)
        return {
            **rollout_metrics(
                collected.groups,
                tools=self.collector.tool_names,
                rewards=self.collector.rubric.names,
            ),
            **training,
            **(drawn.metrics() if self.config.algorithm.resamples else {}),
            **({} if self.curriculum is None else self.curriculum.metrics()),
            "rollout/dropped": collected.dropped,
            "rollout/ledger_breaks": collected.broken,
            "tools/stuck": len(self.collector.stuck),
            "time/loop_lag_max_s": collected.loop_lag_s,
            "data/overlong": collected.overlong,
            "data/uneven_prompts": collected.uneven_prompts,
            "time/reward_s": collected.reward_s,
            **{f"time/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
            "tokens_per_s": tokens / clock.seconds["rollout"],
        }

    async def evaluate(self, label: str) -> list[Evaluation]:
        """Evaluate on the first `eval.questions` test tasks; empty if there are to be none."""
        questions = min(self.config.eval.questions, len(self.test_tasks))
        if questions == 0:
            return []
        self.tracker.phase(f"evaluation {label}")
        tasks = self.test_tasks.tasks(0, questions)
        with self.watchdog.phase("evaluation", self.done):
            evaluations = await evaluate(
                self.collector, tasks, self.config.eval, seed=self.config.seed
            )
        for evaluation in evaluations:
            self.tracker.evaluation(f"{label}/{evaluation.label}", self.done, evaluation.metrics())
        # Before the first step there is no checkpoint that could be kept for it.
        if self.done and self.best.look(self.done, evaluations):
            self.tracker.best(self.best.found)
        return evaluations

    def _due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0 and self.done < self.config.steps

    def save(self) -> Path:
        """Write a checkpoint of the present step."""
        curriculum = None if self.curriculum is None else self.curriculum.state_dict()
        state = {
            "cursor": self.cursor,
            "streak": self.guards.streak,
            "best": self.best.found,
            "curriculum": curriculum,
        }
        with self.watchdog.phase("checkpoint", self.done):
            path = self.checkpoints.save(self.policy, step=self.done, state=state)
        self.tracker.checkpoint(path)
        return path


class Clock:
    """Wall seconds by phase.

    Example: ``with clock("train"): …`` adds to ``clock.seconds["train"]``.
    """

    def __init__(self, within: Within = nullcontext) -> None:
        """`within(phase)` is entered for each phase: who else wants to know of it."""
        self.seconds: dict[str, float] = {}
        self._within = within

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self._within(phase):
                yield
        finally:
            elapsed = time.perf_counter() - started
            self.seconds[phase] = self.seconds.get(phase, 0.0) + elapsed
