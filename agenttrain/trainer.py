"""The training loop: collect rollouts, update the policy, give the engine its weights, record.

This is the file to read first, with `types.py` and `rollout/loop.py`. In a run of several processes
each has a Trainer, and they do the same steps: each samples its share of a step's tasks alone and
trains on it together with the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agenttrain.clock import Clock
from agenttrain.config.schema import RunConfig
from agenttrain.crash import Evidence
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.source import TaskSource
from agenttrain.evaluate import Best, Evaluation, evaluate
from agenttrain.guards import Guards, GuardTripped
from agenttrain.rollout.collect import Collected, Collector, NoRewards, unrewarded
from agenttrain.rollout.deal import Costs
from agenttrain.rollout.figures import step_figures
from agenttrain.rollout.peers import merge
from agenttrain.rollout.resample import Drawn, draw
from agenttrain.signals import StopRequest
from agenttrain.tracking.run_folder import FolderGone
from agenttrain.tracking.tracker import Tracker
from agenttrain.training.blame import check_logprobs, check_weights
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.policy import Policy
from agenttrain.training.random_states import random_states, set_random_states
from agenttrain.training.weight_sync import Probed, rest, sync
from agenttrain.training.world import World
from agenttrain.types import Rollout, Sampling
from agenttrain.watchdog import Watchdog


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
    stop: StopRequest = field(default_factory=StopRequest)
    watchdog: Watchdog = field(default_factory=Watchdog)
    best: Best = field(default_factory=Best)
    curriculum: Curriculum | None = None
    """Which of the train_tasks are drawn; None: in their order."""
    done: int = 0
    cursor: int = 0
    probed: Probed | None = None
    """What the last weight sync found, of an engine with weights of its own."""
    saved: int = 0
    """Step of the newest checkpoint."""
    evaluated: int = 0
    """Last step after which there was an evaluation."""
    world: World = field(default_factory=World)
    costs: Costs = field(default_factory=Costs)
    """Of finished rollouts: which process gets which task is the same after a resume."""
    _states: dict[str, Any] = field(default_factory=random_states)
    """Of the random generators after the last finished step."""
    _clock: Clock = field(default_factory=Clock)

    async def train(self) -> None:
        """The steps that are left, with evaluations and checkpoints on the way.

        Raises Preempted between two steps, or where rollouts were cut short: what the last finished
        step left is then untouched.
        """
        self.tracker.begin()
        await self._between()
        while self.done < self.config.steps:
            metrics, collected = await self.step(self.done + 1)
            self.done += 1
            self._states = random_states()
            self.tracker.step(self.done, metrics, collected.rollouts)
            self._guard(metrics, collected)
            await self._between()

    async def _between(self) -> None:
        """What is due after a step, or was still due where the run was stopped."""
        if self._due(self.config.eval.every) and self.evaluated < self.done:
            await self.evaluate(f"step-{self.done}")
            self.evaluated = self.done
        if self._due(self.config.checkpoint.every) or self._is_best:
            self.keep()
        self.stop.check()

    def _guard(self, metrics: dict[str, float], collected: Collected) -> None:
        """The main process has seen all rollouts: what it says goes for all."""
        with self.world.together(f"the guards after step {self.done}", GuardTripped):
            if self.world.is_main:
                self.guards.look(self.done, metrics, collected.rollouts, self.tracker.warn)

    async def step(self, number: int) -> tuple[dict[str, float], Collected]:
        """One step: rollouts, advantages and updates, weight sync; its metrics.

        The main process gets the rollouts and metrics of all processes, another its own rollouts.
        Raises NotFinite and RewardError, with the evidence in the run's folder; NoRewards.
        """
        self._clock = clock = Clock(partial(self.watchdog.phase, step=number))
        with self.evidence.of(number) as seen:
            check_weights(self.policy.model, f"before step {number}", self.world)
            costs = self.costs.copy()
            self.tracker.phase("rollout")
            with clock("rollout"):
                drawn = await self._draw(number, costs)
            seen.rollouts = drawn.collected.rollouts
            self._check_rewards(number, seen.rollouts)
            check_logprobs(seen.rollouts, self.world)
            self.tracker.phase("train")
            with clock("train"):
                await rest(self.collector.engine)
                with self.world.collective(f"the update of step {number}"):
                    training = self.policy.update(drawn.trained)
            check_weights(self.policy.model, f"after the update of step {number}", self.world)
        with clock("sync"), self.world.collective(f"the weight sync of step {number}"):
            await self._sync(number)
        self.cursor += drawn.tasks
        self.costs = costs
        if self.curriculum is not None:
            mine = self.curriculum.results(drawn.collected.groups)
            self.curriculum.learn(self.cursor, self.world.gather(mine, "a step's results"))
        return self._told(drawn, training, clock)

    def _check_rewards(self, number: int, rollouts: Sequence[Rollout]) -> None:
        """Raise NoRewards on all processes where none has a rollout with a reward."""
        reasons = self.world.gather([unrewarded(rollouts)], "the rewards of a step")
        if None not in reasons:
            reason = next(filter(None, reasons), "no rollout ended well")
            raise NoRewards(
                f"step {number}: not one rollout has a reward, so that there is nothing to learn; "
                f"the first: {reason}",
                Collected(),
            )

    async def _sync(self, number: int) -> None:
        self.probed = await sync(
            self.policy,
            self.collector.engine,
            number,
            self.config.weight_sync,
            self.probed,
            # Quantised weights may stay the same where the policy's changed a little.
            moves=self.config.engine.vllm.quantization is None,
        )

    async def _draw(self, number: int, costs: Costs) -> Drawn:
        source = self.curriculum or self.train_tasks
        return await draw(
            self.collector,
            lambda start, count: source.tasks(self.cursor + start, count),
            count=self.config.tasks_per_step,
            config=self.config.algorithm,
            sampling=Sampling(temperature=self.config.rollout.temperature),
            seed_path=(self.config.seed, "train", number),
            peers=self.world,
            costs=costs,
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
        figures = step_figures(self.collector, collected, seconds)
        metrics = {**figures, **training, **self.policy.kernel_metrics()}
        metrics["tools/stuck"] = sum(stuck)
        if self.probed is not None:
            metrics |= self.probed.gap.metrics()
        if self.curriculum is not None:
            metrics |= self.curriculum.metrics()
        if self.config.algorithm.resamples:
            metrics |= drawn.metrics()
        return metrics, collected

    async def evaluate(self, label: str) -> list[Evaluation]:
        """Evaluate on the first `eval.questions` test tasks; empty if there are to be none.

        Whatever tools and rewards draw at random, training goes on as if they had not.
        """
        questions = min(self.config.eval.questions, len(self.test_tasks))
        if questions == 0:
            return []
        self.tracker.phase(f"evaluation {label}")
        tasks = self.test_tasks.tasks(0, questions)
        with self.watchdog.phase("evaluation", self.done):
            evaluations = await evaluate(
                self.collector,
                tasks,
                self.config.eval,
                seed=self.config.seed,
                world=self.world,
                costs=self.costs.copy(),
            )
        set_random_states(self._states)
        for evaluation in evaluations:
            name = f"{label}/{evaluation.label}"
            self.tracker.evaluation(name, self.done, evaluation.metrics())
            self.guards.look_at_evaluation(name, evaluation.rollouts, self.tracker.warn)
        # Before the first step there is no checkpoint that could be kept for it.
        if self.done and self.best.look(self.done, evaluations):
            self.tracker.best(self.best.found)
        return evaluations

    def _due(self, every: int | None) -> bool:
        return every is not None and self.done % every == 0 and self.done < self.config.steps

    def keep(self) -> None:
        """Write a checkpoint of the last finished step, unless there is one."""
        if self.saved < self.done:
            self._check_folder()
            with self.watchdog.phase("checkpoint", self.done):
                path = self.checkpoints.save(
                    self.policy, step=self.done, state=self.state_dict(), rng=self._states
                )
            self.saved = self.done
            self.tracker.checkpoint(path)
        if self._is_best:
            self.checkpoints.mark_best(self.policy, self.done)

    def _check_folder(self) -> None:
        with self.world.together("the run folder before a checkpoint", FolderGone):
            self.tracker.check_folder()

    @property
    def _is_best(self) -> bool:
        """Whether the policy as it is now is the one to keep."""
        return self.config.checkpoint.keep_best and 0 < self.done == self.best.step

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on besides the policy and the random states; JSON."""
        return {
            "cursor": self.cursor,
            "evaluated": self.evaluated,
            **self.guards.state_dict(),
            "best": self.best.found,
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "costs": self.costs.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, as a checkpoint of step `state["step"]` has it."""
        self.done = self.saved = state["step"]
        self.cursor = state["cursor"]
        self.evaluated = state["evaluated"]
        self.guards.load_state_dict(state)
        self.best.found = state["best"]
        if self.curriculum is not None:
            self.curriculum.load_state_dict(state["curriculum"])
        self.costs.load_state_dict(state["costs"])
