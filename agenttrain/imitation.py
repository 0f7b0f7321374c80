"""Supervised learning from demonstrations: the loop of `agenttrain sft`.

A demonstration becomes a rollout of reward 1, and REINFORCE without a baseline does the rest: its
loss is then the cross entropy, -log p, averaged over exactly the tokens that the assistant says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from agenttrain.clock import Clock
from agenttrain.config.algorithm import Advantage, Aggregation, AlgorithmConfig, Scale, Surrogate
from agenttrain.config.schema import OnBadRow, RunConfig
from agenttrain.data.source import TaskSource
from agenttrain.rollout.demonstration import REMEDY, BadDemonstration, Demonstrator
from agenttrain.signals import StopRequest
from agenttrain.tracking.tracker import Tracker
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.policy import Policy
from agenttrain.types import Rollout, Task
from agenttrain.watchdog import Watchdog

CROSS_ENTROPY = AlgorithmConfig(
    name="sft",
    group_size=1,
    advantage=Advantage.none,
    scale=Scale.none,
    surrogate=Surrogate.reinforce,
    aggregation=Aggregation.token_mean,
)
"""With a reward of 1 for each demonstration: sum of -log p / number of tokens of the update."""
SAMPLER = "sampling/"
"""Metrics that compare with the engine that sampled; nothing was sampled here."""


@dataclass(slots=True)
class Demonstrations:
    """Rows as rollouts, and how many rows gave none."""

    rollouts: list[Rollout] = field(default_factory=list)
    overlong: int = 0
    bad: int = 0


@dataclass(slots=True, kw_only=True)
class Imitation:
    """One supervised run. `done` counts finished steps: step n learns the n-th batch of rows."""

    config: RunConfig
    demonstrator: Demonstrator
    policy: Policy
    train_tasks: TaskSource
    test_tasks: TaskSource
    tracker: Tracker
    checkpoints: Checkpoints
    max_tokens: int
    """Of a conversation; longer ones are left out."""
    stop: StopRequest = field(default_factory=StopRequest)
    watchdog: Watchdog = field(default_factory=Watchdog)
    done: int = 0
    saved: int = 0
    """Step of the newest checkpoint."""
    evaluated: int = 0
    """Last step after which the held-out loss was taken."""
    _held_out: list[Rollout] | None = None

    def train(self) -> None:
        """The steps that are left, with held-out losses and checkpoints on the way.

        Raises Preempted between two steps.
        """
        self.tracker.begin()
        self._between()
        while self.done < self.config.steps:
            metrics, rollouts = self.step(self.done + 1)
            self.done += 1
            self.tracker.step(self.done, metrics, rollouts)
            self._between()

    def _between(self) -> None:
        """What is due after a step, or was still due where the run was stopped."""
        if self._due(self.config.eval.every) and self.evaluated < self.done:
            self.evaluate(f"step-{self.done}")
            self.evaluated = self.done
        if self._due(self.config.checkpoint.every):
            self.keep()
        self.stop.check()

    def step(self, number: int) -> tuple[dict[str, float], list[Rollout]]:
        """One update on the next batch of rows: its metrics, and the demonstrations as rollouts."""
        size, clock = self.config.sft.batch_size, Clock(partial(self.watchdog.phase, step=number))
        self.tracker.phase("data")
        with clock("data"):
            found = self._demonstrate(self.train_tasks, (number - 1) * size, size)
        self.tracker.phase("train")
        with clock("train"):
            training = self.policy.update([[rollout] for rollout in found.rollouts])
        tokens = sum(rollout.length for rollout in found.rollouts)
        metrics = {
            **{name: value for name, value in training.items() if not name.startswith(SAMPLER)},
            **self.policy.kernel_metrics(),
            "sft/conversations": len(found.rollouts),
            "sft/tokens": tokens,
            "data/overlong": found.overlong,
            "data/bad_rows": found.bad,
            **{f"time/{phase}_s": seconds for phase, seconds in clock.seconds.items()},
            "tokens_per_s": tokens / sum(clock.seconds.values()),
        }
        return metrics, found.rollouts

    def evaluate(self, label: str) -> dict[str, float]:
        """Cross entropy on the first `eval.questions` test rows; nothing if there are to be none.

        ``{"loss": 0.21, "tokens": 5210, "conversations": 100}``; the loss is of a token.
        """
        count = min(self.config.eval.questions, len(self.test_tasks))
        if self._held_out is None:
            self.tracker.phase("data")
            self._held_out = self._demonstrate(self.test_tasks, 0, count).rollouts
        if not self._held_out:
            return {}
        self.tracker.phase(f"held-out loss {label}")
        with self.watchdog.phase("evaluation", self.done):
            logprobs = self.policy.logprobs(self._held_out)
        tokens = sum(logprobs_S.numel() for logprobs_S in logprobs.values())
        total = sum(float(logprobs_S.double().sum()) for logprobs_S in logprobs.values())
        metrics = {
            "loss": -total / tokens,
            "tokens": float(tokens),
            "conversations": float(len(logprobs)),
        }
        self.tracker.evaluation(f"{label}/held_out", self.done, metrics)
        return metrics

    def keep(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one."""
        if self.saved == self.done:
            return
        self.tracker.check_folder()
        state = {"evaluated": self.evaluated}
        with self.watchdog.phase("checkpoint", self.done):
            path = self.checkpoints.save(self.policy, step=self.done, state=state)
        self.saved = self.done
        self.tracker.checkpoint(path)

    def _demonstrate(self, source: TaskSource, start: int, count: int) -> Demonstrations:
        found = Demonstrations()
        for place, task in enumerate(source.tasks(start, count), start):
            rollout = self._rollout(task, f"{place}/{task.task_id}")
            if rollout is None:
                found.bad += 1
            elif rollout.length > self.max_tokens:
                found.overlong += 1
            else:
                rollout.reward = 1.0
                found.rollouts.append(rollout)
        return found

    def _rollout(self, task: Task, rollout_id: str) -> Rollout | None:
        """None for a row that is left out."""
        try:
            return self.demonstrator(task, rollout_id)
        except BadDemonstration as error:
            if self.config.data.on_bad_row is OnBadRow.error:
                raise BadDemonstration(f"{error}. {REMEDY}") from error
            return None

    def _due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0 and self.done < self.config.steps
