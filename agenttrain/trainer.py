"""The training loop: get a step's rollouts, update the policy, sync the engine, record.

Read this file first, then `types.py` and `rollout/loop.py`. `Trainer.step` is one step; its
training is `train_policy` below: scores, advantages, microbatches, loss, optimizer.

Reinforcement learning and supervised learning are the same loop. They differ in the source of a
step's rollouts (`rollout/source.py`) and in the evaluation (`evaluation.py`). A run of several
processes has a Trainer in each. They do the same steps at the same time: each process samples its
share of a step's tasks by itself and trains on that share together with the others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from agenttrain.algorithms.loss import Averages, LossInputs, MetricParts, mean_parts, policy_loss
from agenttrain.engines.base import Engine, EngineDead, EngineRestarted, Metered, Separate
from agenttrain.evaluation import Best, Evaluation, Evaluator, HeldOutLoss
from agenttrain.health.guards import Guards, GuardTripped
from agenttrain.health.stop_when import StopWhen
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.run_folder import FolderGone
from agenttrain.tracking.tracker import Tracker
from agenttrain.tracking.usage import Usage
from agenttrain.training.batch import Microbatch
from agenttrain.training.checkpoint import Checkpoints, random_states, set_random_states
from agenttrain.training.credit_assignment import assign_advantages
from agenttrain.training.minibatch import Minibatch, loss_inputs
from agenttrain.training.nonfinite import check_logprobs, check_weights
from agenttrain.training.operations import work_metrics
from agenttrain.training.policy import Policy
from agenttrain.training.teacher_scores import Teacher, add_teacher, score_with
from agenttrain.training.weight_sync import SyncProbe, sync
from agenttrain.training.world import World
from agenttrain.types import Rollout
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.signals import StopRequest

Result = TypeVar("Result")


class RunContext(Protocol):
    """The part of a run that the loop uses (`agenttrain.runs.run.Run` implements it)."""

    world: World
    stop: StopRequest
    tracker: Tracker
    seconds: dict[str, float]
    """Wall seconds of the current step, by phase."""
    usage: Usage
    """Tokens, seconds and cost of the steps so far, in the main process."""

    def phase(
        self, name: str, step: int, *, label: str = "", rollouts: Sequence[Rollout] = ()
    ) -> AbstractContextManager[None]:
        """Put the run into a phase of a step for the block.

        Times it, gives the watchdog its deadline, and names it on the console. If the block fails
        on bad numbers, the crash bundle contains `rollouts`.
        """
        ...


class BatchSource(Protocol):
    """Source of a step's rollouts: sampled by an engine, or made of recorded conversations."""

    phase: str
    """Name of the run phase in which `batch` is called."""

    async def batch(self, step: int) -> StepBatch:
        """Return this process's rollouts of a step."""
        ...

    def finish(self, batch: StepBatch) -> None:
        """Move on to the next step, after the policy was trained on `batch`."""
        ...

    def summarise(
        self, batches: Sequence[StepBatch], training: dict[str, float], seconds: Mapping[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Merge the batches of all processes: return the metrics and the rollouts of the step.

        `training` are the metrics of the update, `seconds` those of the step's phases.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state that later steps' rollouts depend on, without the policy."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        ...


@dataclass(slots=True, kw_only=True)
class Trainer:
    """The training loop of one process.

    `agenttrain.runs.run` makes it, and loads the state of a checkpoint into it. It then calls
    `evaluate`, `train`, `evaluate` and `save_checkpoint`.

    Parts of a step that all processes do at once stand in a block of `World`: `collective` for
    operations that wait for the others, `together` for work after which an error of one process is
    raised in all.
    """

    config: RunConfig
    run: RunContext
    source: BatchSource
    policy: Policy
    evaluator: Evaluator
    checkpoints: Checkpoints
    engine: Engine | None = None
    """Samples from the policy; None in supervised runs that sample nothing."""
    teacher: Teacher | None = None
    """Scores the rollouts with `algorithm.teacher`; None: there is none."""
    stop_when: StopWhen
    guards: Guards | None = None
    """Checks of every step; None in supervised runs."""
    best: Best | None = None
    """The best evaluation so far; None if evaluations are not compared."""
    finished_steps: int = 0
    probe: SyncProbe | None = None
    """Result of the last weight sync with an engine that holds its own copy of the weights;
    `agenttrain.runs.run` gives that of the first sync, before any step. None: no such engine."""
    saved_step: int = 0
    """Step of the newest complete checkpoint. One may be pending: begun in the background
    (`Checkpoints.pending`), and recorded once it is complete."""
    evaluated_step: int = 0
    """Step of the last evaluation."""
    _random_states: dict[str, Any] = field(default_factory=random_states)
    """States of the random generators after the last finished step. An evaluation ends with them,
    and a checkpoint holds them, also one that is saved while the next step is under way."""

    async def train(self) -> None:
        """Do the remaining steps, with the evaluations and checkpoints that fall between them.

        Raises Preempted between two steps or while rollouts are sampled. The trainer's state is
        then the one after the last finished step.
        """
        self.run.tracker.progress.begin()
        # A resumed run may have stopped before the evaluation or checkpoint of its last step.
        await self._between_steps()
        while not self.finished:
            metrics, rollouts = await self.step(self.finished_steps + 1)
            self.finished_steps += 1
            self._random_states = random_states()
            self.run.tracker.step(self.finished_steps, metrics, rollouts)
            self._check_guards(metrics, rollouts)
            if self.stop_when.config.enabled:
                self._add_to_stop_when(metrics)
            await self._between_steps()

    @property
    def finished(self) -> bool:
        """Return True if no step is left, or `stop_when` has ended the run."""
        return self.finished_steps >= self.config.steps or self.stop_when.record is not None

    def _check_guards(self, metrics: Mapping[str, float], rollouts: list[Rollout]) -> None:
        """Raise GuardTripped, in all processes, if a guard refuses the step that was just done."""
        if self.guards is None:
            return
        step = self.finished_steps
        # Only the main process has the rollouts of all processes, so it decides for all.
        with self.run.world.together(f"the guards after step {step}", GuardTripped):
            if self.run.world.is_main:
                self.guards.check_step(step, metrics, rollouts, self.run.tracker.warn)

    def _add_to_stop_when(self, metrics: Mapping[str, float]) -> None:
        """Add the step's value of the metric to `stop_when`.

        Every process adds the main process's value, so that all of them stop after the same step.
        """
        name = self.stop_when.config.metric
        if self.finished_steps == 1 and self.run.world.is_main and name not in metrics:
            self.run.tracker.warn(
                f"stop_when.metric={name}: step 1 has no such metric{did_you_mean(name, metrics)}; "
                "the run ends early only if later steps have it"
            )
        self.stop_when.add(self.run.world.broadcast(metrics.get(name), "the metric of stop_when"))

    async def step(self, n: int) -> tuple[dict[str, float], list[Rollout]]:
        """Do step n: get rollouts, update the policy, sync the engine. Return metrics and rollouts.

        The main process returns the metrics and rollouts of all processes, any other process only
        its own. Raises NotFinite and RewardError, both with a crash bundle in the run's folder, and
        NoRewards.
        """
        self.run.seconds.clear()
        with self.run.phase("check", n):
            check_weights(self.policy.model, f"before step {n}", self.run.world)
        with self.run.phase(self.source.phase, n):
            batch = await self._batch(n)
        with self.run.phase("check", n, rollouts=batch.rollouts):
            check_logprobs(batch.rollouts, self.run.world)
        with self.run.phase("train", n, rollouts=batch.rollouts):
            if isinstance(self.engine, Separate):  # it has a copy of the weights
                # Frees its GPU memory for the update, until the sync below wakes it.
                await self.engine.sleep()
            with self.policy.optimizer_on_device():
                training = train_policy(self.policy, batch.groups, self.teacher)
        with self.run.phase("check", n, rollouts=batch.rollouts):
            check_weights(self.policy.model, f"after the update of step {n}", self.run.world)
        if self.engine is not None:
            with self.run.phase("sync", n):
                try:
                    await self._sync(n)
                except EngineRestarted as error:
                    self.run.tracker.warn(str(error))
                    await self._sync(n)  # a new engine has no weights of the policy yet
        self.source.finish(batch)
        return self._summarise(batch, training)

    async def _batch(self, n: int) -> StepBatch:
        """Return this process's rollouts of step n. If the engine dies, save the step before."""
        try:
            return await self._retry_after_restart(lambda: self.source.batch(n))
        except EngineDead as error:
            # The policy is still that of the last finished step. Saving waits for all processes, so
            # this one may save only if they all got this error (`everywhere`) and do the same.
            if self.run.world.size == 1 or error.everywhere:
                self.save_checkpoint()
            raise

    def _summarise(
        self, batch: StepBatch, training: dict[str, float]
    ) -> tuple[dict[str, float], list[Rollout]]:
        """Return the metrics and rollouts of the step; `training` are the metrics of the update.

        The main process returns them for all processes, any other process only its own.
        """
        # Tokens and floating-point operations of this process's passes in the step.
        work = self.policy.take_work(self.config.cost.peak_tflops)
        share = (batch, dict(self.run.seconds), work)
        shares = self.run.world.to_main([share], "the rollouts of a step")
        if not shares:  # in all processes but the main one
            return training, batch.rollouts
        training = {**training, **self.policy.kernel_metrics()}
        if self.probe is not None:
            training |= self.probe.metrics()
        if isinstance(self.engine, Metered):
            training |= self.engine.metrics()
        batches, clocks, works = zip(*shares, strict=True)
        # The slowest process determines how long a phase took.
        seconds = {phase: max(clock[phase] for clock in clocks) for phase in self.run.seconds}
        metrics, rollouts = self.source.summarise(batches, training, seconds)
        metrics |= work_metrics(works, seconds["train"])
        if self.engine is not None:
            metrics["tokens/sampled"] = float(sum(r.sampled_length for r in rollouts))
        if "perf/peak_gb" in metrics:  # on a GPU
            gpu_s = sum(seconds.values()) * self.run.usage.gpus
            metrics["perf/tokens_per_s_gpu"] = sum(r.length for r in rollouts) / gpu_s
        return {**metrics, **self.run.usage.add(metrics)}, rollouts

    async def _sync(self, version: int) -> None:
        """Send the weights after step `version` to the engine, and probe it."""
        assert self.engine is not None
        self.probe = await sync(
            self.policy, self.engine, version, self.config.weight_sync, self.probe
        )

    async def _retry_after_restart(self, request: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `request()`; repeat it if the engine was started again meanwhile.

        `request` makes all rollouts of a step or of an evaluation.
        """
        try:
            return await request()
        except EngineRestarted as error:
            self.run.tracker.warn(str(error))
            # A new engine has no weights of the policy yet. One engine samples for all processes,
            # so all of them get this error, each in its own rollouts: wait until they are here.
            with self.run.world.collective("the weights of an engine that was started again"):
                await self._sync(self.finished_steps)
            return await request()

    async def _between_steps(self) -> None:
        """Evaluate and save if that is due after this step. Raises Preempted after a signal.

        A resumed run calls it before its first step, for the step before: what it has done of that
        is not repeated (`evaluated_step`, `saved_step`). `agenttrain.runs.run` evaluates before the
        first step, and evaluates and saves after the last.
        """

        def is_due(every: int | None) -> bool:
            return every is not None and self.finished_steps % every == 0 and not self.finished

        if is_due(self.config.eval.every) and self.evaluated_step < self.finished_steps:
            await self.evaluate(f"step-{self.finished_steps}")
            self.evaluated_step = self.finished_steps
        self._finish_checkpoint(wait=False)
        # A step with the best evaluation so far gets a checkpoint even if none is due.
        if is_due(self.config.checkpoint.every) or self._sources_with_best_at(self.finished_steps):
            self.save_checkpoint(in_background=self.config.checkpoint.in_background)
        self.run.stop.check()

    async def evaluate(self, label: str) -> Sequence[Evaluation | HeldOutLoss]:
        """Evaluate on the first `eval.questions` held-out tasks; return [] if that is 0.

        Restores the random states afterwards: training continues as if nothing had been evaluated.
        """
        if self.evaluator.questions == 0:
            return []
        step = self.finished_steps
        with self.run.phase("evaluation", step, label=f"{self.evaluator.title} {label}"):
            evaluations = await self._retry_after_restart(self.evaluator.evaluate)
        set_random_states(self._random_states)
        for evaluation in evaluations:
            name = f"{label}/{evaluation.label}"
            self.run.tracker.evaluation(name, step, evaluation.metrics())
            # The other processes have no rollouts to check. Unlike in `_check_guards` they need not
            # wait for the first one: this check only warns, and stops no process.
            if self.guards is not None:
                self.guards.check_evaluation(name, evaluation.rollouts, self.run.tracker.warn)
        # Before the first step there is no checkpoint to mark as the best.
        if self.best is not None and step and self.best.consider(step, evaluations):
            self.run.tracker.best(self.best.record)
        return evaluations

    def save_checkpoint(self, *, in_background: bool = False) -> None:
        """Write a checkpoint of the last finished step, unless it exists; mark it if it is best.

        `in_background`: only begin to write the checkpoint.
        """
        step = self.finished_steps
        if in_background and self.checkpoints.pending == step:
            return
        self._finish_checkpoint(wait=True)  # at most one is being written
        if self.saved_step == step:
            self._mark_best(step)
            return
        with self.run.world.together("the run folder before a checkpoint", FolderGone):
            self.run.tracker.check_folder()
        state, rng = self.state_dict(), self._random_states
        with self.run.phase("checkpoint", step):
            if in_background:
                self.checkpoints.begin(self.policy, step=step, state=state, rng=rng)
                return
            path = self.checkpoints.save(self.policy, step=step, state=state, rng=rng)
        self._record_checkpoint(step, path)

    def _finish_checkpoint(self, *, wait: bool) -> None:
        """Complete the checkpoint that was begun in the background, if there is one.

        Without `wait`, a checkpoint that is still being written stays pending.
        """
        step = self.checkpoints.pending
        if step is None:
            return
        with self.run.phase("checkpoint", step):
            path = self.checkpoints.finish(self.run.world, wait=wait)
        if path is not None:
            self._record_checkpoint(step, path)

    def _record_checkpoint(self, step: int, path: Path) -> None:
        """Record a checkpoint; mark it if the best evaluation so far is of its step."""
        self.saved_step = step
        self.run.tracker.checkpoint(path)
        self._mark_best(step)

    def _mark_best(self, step: int) -> None:
        """Mark the checkpoint of a step if it is the best, of the run or of one of its sources."""
        if sources := self._sources_with_best_at(step):
            self.checkpoints.mark_best(self.policy, step, sources)

    def _sources_with_best_at(self, step: int) -> list[str]:
        """Return the sources whose best evaluation is of this step; "" is the run as a whole.

        Empty if no checkpoint is kept for the best evaluation, or before the first step.
        """
        if self.best is None or not self.config.checkpoint.keep_best or step == 0:
            return []
        return self.best.sources_at(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state of the loop. Policy and random states are saved apart."""
        return {
            "evaluated": self.evaluated_step,
            **self.stop_when.state_dict(),
            **self.source.state_dict(),
            **({} if self.guards is None else self.guards.state_dict()),
            **({} if self.best is None else {"best": self.best.record}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's state: `state_dict()` with `step` added."""
        self.finished_steps = self.saved_step = state["step"]
        self.evaluated_step = state["evaluated"]
        self.stop_when.load_state_dict(state)
        self.source.load_state_dict(state)
        if self.guards is not None:
            self.guards.load_state_dict(state)
        if self.best is not None:
            self.best.record = state["best"]


def train_policy(
    policy: Policy, groups: Sequence[Sequence[Rollout]], teacher: Teacher | None = None
) -> dict[str, float]:
    """Make all optimizer updates of one step and return their metrics.

    `groups` are in task order. Every process passes the same number of groups, an empty list for
    each that another process sampled, so that all processes cut the same minibatches. Rollouts
    without a reward are not trained on. Sets `advantages` of every trajectory, and
    `trainer_logprobs` and `entropies` of those that the policy scores. If a loss or gradient is
    not finite, raises BrokenUpdate in all processes before any weight changes. With
    `algorithm.teacher` a `teacher` is given.

    Metrics: `loss`, `grad_norm`, `lr`, `train/tokens` (sampled tokens per update), those of
    `metric_names` over the rollouts that had a gradient, and `MISMATCH_NAMES` (distance between the
    engine's and the trainer's logprobs before the first update).
    """
    groups = [sorted(group, key=lambda rollout: rollout.sample) for group in groups]
    metrics = Averages()
    sequences = policy.score(groups)  # with reference and old logprobs, if the algorithm uses them
    penalties, kl_parts = policy.kl_penalties(sequences)
    metrics.add(kl_parts)
    if teacher is not None:
        sequences = score_with(teacher, sequences, policy.world)
    # Sets `advantages` of the trajectories, which microbatches read when they are cut below. The
    # weights of rewards are passed because some normalizations come before the weighted sum.
    metrics.add(
        assign_advantages(
            groups,
            policy.algorithm,
            policy.world,
            penalties=penalties,
            reward_weights=policy.reward_weights,
        )
    )
    if teacher is not None:  # mixes the teacher's signal into the advantages
        metrics.add(add_teacher(groups, sequences, policy.algorithm))
    policy.begin_step()
    with policy.ready():
        for minibatch in policy.minibatches(sequences):  # epochs x minibatches, cut by group
            train_minibatch(policy, minibatch, metrics)
    return policy.end_step(metrics)


def train_minibatch(policy: Policy, minibatch: Minibatch, metrics: Averages) -> None:
    """Make one optimizer update. Raises BrokenUpdate as `train_policy` does."""
    for microbatch in policy.microbatches(minibatch):
        compute = partial(compute_gradient, policy, minibatch, microbatch)
        inputs, loss, parts = policy.with_enough_memory(compute)
        minibatch.record(microbatch, inputs, loss)  # for `optimizer_step`, below
        # A process that has no sequences left runs a dummy forward, so that collectives match. It
        # has no token and counts in no mean.
        metrics.add(parts, counted=inputs.logprobs_S.numel() > 0)
    metrics.add(policy.optimizer_step(minibatch))


def compute_gradient(
    policy: Policy, minibatch: Minibatch, microbatch: Microbatch
) -> tuple[LossInputs, Tensor, MetricParts]:
    """Add a microbatch's gradient; return the inputs of its loss, the loss, and metrics.

    S: the sampled tokens of the microbatch.
    """
    logprobs_S, entropy_S = policy.forward(microbatch)
    inputs = loss_inputs(microbatch, logprobs_S, entropy_S, minibatch, policy.algorithm)
    loss, parts = policy_loss(inputs, policy.algorithm)
    policy.backward(loss)
    return inputs, loss, {**parts, "entropy": mean_parts(entropy_S.detach())}
