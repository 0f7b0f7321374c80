"""The training loop: get a step's rollouts, update the policy, sync the engine, record.

This is the file to read first, with `types.py` and `rollout/loop.py`. Reinforcement learning and
supervised learning are the same loop: they differ in where a step's rollouts come from
(`rollout/source.py`) and in how the policy is evaluated (`evaluation.py`). In a run of several
processes each has a Trainer, and they do the same steps: each samples its share of a step's tasks
alone and trains on it together with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from agenttrain.algorithms.loss import Averages, mean_parts, policy_loss
from agenttrain.engines.base import Engine
from agenttrain.evaluation import Best, Evaluation, Evaluator, HeldOutLoss
from agenttrain.health.guards import Guards, GuardTripped
from agenttrain.rollout.source import Batch
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.run_folder import FolderGone
from agenttrain.tracking.tracker import Tracker
from agenttrain.training.blame import check_logprobs, check_weights
from agenttrain.training.checkpoint import Checkpoints, random_states, set_random_states
from agenttrain.training.policy import Policy
from agenttrain.training.update import Minibatch, assign_advantages, loss_inputs
from agenttrain.training.weight_sync import Probed, rest, sync
from agenttrain.training.world import World
from agenttrain.types import Rollout
from agenttrain.utils.signals import StopRequest


class RunContext(Protocol):
    """The run that the loop is a part of (`agenttrain.runs.run.Run`)."""

    world: World
    stop: StopRequest
    tracker: Tracker
    seconds: dict[str, float]
    """Wall seconds of this step's phases."""

    def phase(
        self, name: str, step: int, *, label: str = "", rollouts: Sequence[Rollout] = ()
    ) -> AbstractContextManager[None]:
        """Within, the run is in this phase of a step; a crash bundle keeps `rollouts`."""
        ...


class BatchSource(Protocol):
    """Where a step's rollouts come from."""

    phase: str
    """Name of the phase in which they are made."""

    async def groups(self, step: int) -> Batch:
        """Return this process's rollouts of a step."""
        ...

    def finish(self, batch: Batch) -> None:
        """Move on to the next step: the policy has learnt from `batch`."""
        ...

    def summarise(
        self, batches: Sequence[Batch], training: dict[str, float], seconds: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Return the metrics and rollouts of a step from the batches of all processes."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what the rollouts of later steps depend on besides the policy; JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        ...


@dataclass(slots=True, kw_only=True)
class Trainer:
    """One process of a run. `done` counts finished steps."""

    config: RunConfig
    run: RunContext
    source: BatchSource
    policy: Policy
    evaluator: Evaluator
    checkpoints: Checkpoints
    engine: Engine | None = None
    """Samples from the policy; None where nothing is sampled."""
    guards: Guards | None = None
    best: Best | None = None
    """The best evaluation so far; None where evaluations are not compared."""
    done: int = 0
    probed: Probed | None = None
    """Result of the last weight sync, of an engine with weights of its own."""
    saved: int = 0
    """Step of the newest checkpoint."""
    evaluated: int = 0
    """Last step after which there was an evaluation."""
    _states: dict[str, Any] = field(default_factory=random_states)
    """States of the random generators after the last finished step."""

    async def train(self) -> None:
        """Do the steps that are left, with evaluations and checkpoints on the way.

        Raises Preempted between two steps, or where rollouts were cut short: the state that the
        last finished step left is then untouched.
        """
        self.run.tracker.begin()
        await self._between_steps()
        while self.done < self.config.steps:
            metrics, rollouts = await self.step(self.done + 1)
            self.done += 1
            self._states = random_states()
            self.run.tracker.step(self.done, metrics, rollouts)
            if self.guards is not None:
                # The main process has seen all rollouts, and decides for all.
                with self.world.together(f"the guards after step {self.done}", GuardTripped):
                    if self.world.is_main:
                        self.guards.look(self.done, metrics, rollouts, self.run.tracker.warn)
            await self._between_steps()

    async def step(self, n: int) -> tuple[dict[str, float], list[Rollout]]:
        """Do step n: rollouts, advantages and updates, weight sync; return metrics and rollouts.

        The main process gets the rollouts and metrics of all processes, another its own rollouts.
        Raises NotFinite and RewardError, with the evidence in the run's folder; NoRewards.
        """
        self.run.seconds.clear()
        with self.run.phase("check", n):
            check_weights(self.policy.model, f"before step {n}", self.world)
        with self.run.phase(self.source.phase, n):
            batch = await self.source.groups(n)
        with self.run.phase("check", n, rollouts=batch.rollouts):
            check_logprobs(batch.rollouts, self.world)
        with self.run.phase("train", n, rollouts=batch.rollouts):
            if self.engine is not None:
                await rest(self.engine)
            training = update(self.policy, batch.groups)
        with self.run.phase("check", n, rollouts=batch.rollouts):
            check_weights(self.policy.model, f"after the update of step {n}", self.world)
        if self.engine is not None:
            with self.run.phase("sync", n):
                await self._sync(self.engine, n)
        self.source.finish(batch)
        return self._summary(batch, training)

    async def _sync(self, engine: Engine, version: int) -> None:
        settings = self.config.weight_sync
        self.probed = await sync(self.policy, engine, version, settings, self.probed)

    def _summary(
        self, batch: Batch, training: dict[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Return metrics and rollouts of all processes on the main one; its own on another."""
        share = (batch, dict(self.run.seconds))
        shares = self.world.to_main([share], "the rollouts of a step")
        if not shares:
            return training, batch.rollouts
        training = {**training, **self.policy.kernel_metrics()}
        if self.probed is not None:
            training |= self.probed.gap.metrics()
        batches, clocks = zip(*shares, strict=True)
        seconds = {phase: max(clock[phase] for clock in clocks) for phase in self.run.seconds}
        return self.source.summarise(batches, training, seconds)

    async def _between_steps(self) -> None:
        """Do what is due after a step, or was still due where the run was stopped."""
        if self._is_due(self.config.eval.every) and self.evaluated < self.done:
            await self.evaluate(f"step-{self.done}")
            self.evaluated = self.done
        if self._is_due(self.config.checkpoint.every) or self._is_best:
            self.save_checkpoint()
        self.run.stop.check()

    def _is_due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0 and self.done < self.config.steps

    async def evaluate(self, label: str) -> Sequence[Evaluation | HeldOutLoss]:
        """Evaluate on the first `eval.questions` test tasks; empty if there are to be none.

        Whatever tools and rewards draw at random, training goes on as if they had not.
        """
        if self.evaluator.questions == 0:
            return []
        with self.run.phase("evaluation", self.done, label=f"{self.evaluator.title} {label}"):
            evaluations = await self.evaluator.evaluate()
        set_random_states(self._states)
        for evaluation in evaluations:
            name = f"{label}/{evaluation.label}"
            self.run.tracker.evaluation(name, self.done, evaluation.metrics())
            if self.guards is not None:
                self.guards.look_at_evaluation(name, evaluation.rollouts, self.run.tracker.warn)
        # Before the first step there is no checkpoint that could be kept for it.
        if self.best is not None and self.done and self.best.look(self.done, evaluations):
            self.run.tracker.best(self.best.found)
        return evaluations

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one."""
        if self.saved < self.done:
            with self.world.together("the run folder before a checkpoint", FolderGone):
                self.run.tracker.check_folder()
            with self.run.phase("checkpoint", self.done):
                path = self.checkpoints.save(
                    self.policy, step=self.done, state=self.state_dict(), rng=self._states
                )
            self.saved = self.done
            self.run.tracker.checkpoint(path)
        if self._is_best:
            self.checkpoints.mark_best(self.policy, self.done)

    @property
    def _is_best(self) -> bool:
        """Return whether the policy as it is now is the one to keep."""
        best = None if self.best is None else self.best.step
        return self.config.checkpoint.keep_best and 0 < self.done == best

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self.run.world

    def state_dict(self) -> dict[str, Any]:
        """Return what the next step depends on besides the policy and the random states; JSON."""
        return {
            "evaluated": self.evaluated,
            **self.source.state_dict(),
            **({} if self.guards is None else self.guards.state_dict()),
            **({} if self.best is None else {"best": self.best.found}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of a checkpoint, to which that adds `step`."""
        self.done = self.saved = state["step"]
        self.evaluated = state["evaluated"]
        self.source.load_state_dict(state)
        if self.guards is not None:
            self.guards.load_state_dict(state)
        if self.best is not None:
            self.best.found = state["best"]


def update(policy: Policy, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Make all optimizer updates of one step; set every rollout's advantage; return metrics.

    Groups come in the order of their tasks; their rollouts are taken in the order of `sample`. Of
    several processes each gives the groups of all, those of others empty: which rollouts an update
    is made of does not depend on who has them. Rollouts without a reward take no part. Those that
    the policy scores get its `trainer_logprobs` and `entropies` too. Raises BrokenUpdate, in all
    processes, before weights are touched by a loss or gradient that is not finite.

    Metrics: loss, grad_norm, lr, train/tokens (sampled tokens per update), those of `metric_names`
    over the rollouts that had a gradient, and `MISMATCH_NAMES` (the distance between the engine's
    and the trainer's logprobs before the first update).
    """
    groups = [sorted(group, key=lambda rollout: rollout.sample) for group in groups]
    metrics = Averages()
    rows = policy.score(groups)
    penalties, kl = policy.penalties(rows)
    metrics.add(kl)
    assign_advantages(
        groups,
        policy.algorithm,
        policy.world,
        penalties=penalties,
        reward_weights=policy.reward_weights,
    )
    policy.begin_step()
    with policy.ready():
        for minibatch in policy.minibatches(rows):
            update_once(policy, minibatch, metrics)
    return policy.end_step(metrics)


def update_once(policy: Policy, minibatch: Minibatch, metrics: Averages) -> None:
    """Make one optimizer update. Raises BrokenUpdate, as `update`."""
    for batch in policy.batches(minibatch):
        logprobs_S, entropy_S = policy.forward(batch)
        inputs = loss_inputs(batch, logprobs_S, entropy_S, minibatch, policy.algorithm)
        loss, parts = policy_loss(inputs, policy.algorithm)
        policy.backward(loss)
        minibatch.record(batch, inputs, loss)
        parts["entropy"] = mean_parts(entropy_S.detach())
        # The row that stands in for a process without rows is in no mean.
        metrics.add(parts, counted=entropy_S.numel() > 0)
    metrics.add(policy.optimizer_step(minibatch))
