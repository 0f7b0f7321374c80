"""The size of a run, in one vocabulary: tasks, groups, rollouts, tokens, updates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from agenttrain.config.row_file import known_rows
from agenttrain.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The sizes that follow from a configuration.

    Example: 12 tasks a step in groups of 8, 2 epochs of 3 minibatches and 80 steps are 96 rollouts
    a step, 32 rollouts an update, 6 updates a step and 480 updates a run.
    """

    steps: int
    tasks_per_step: int
    """Also the number of groups: each task has one."""
    group_size: int
    rollouts_per_step: int
    most_tasks_per_step: int
    """With over-sampling and all rounds of dynamic sampling."""
    rollouts_per_update: int
    updates_per_step: int
    """Optimizer updates: epochs x minibatches."""
    sampled_tokens_per_rollout: int
    """At most: limited by the turns and by the whole completion."""
    tokens_per_rollout: int
    """At most, sampled and tool tokens; the prompt comes on top."""
    evaluations: int
    rollouts_per_evaluation: int
    evaluation_is_exact: bool
    """The number of test rows is known; if not, rollouts_per_evaluation is the most."""

    @property
    def updates(self) -> int:
        """Optimizer updates of the run."""
        return self.steps * self.updates_per_step

    @property
    def tokens_per_step(self) -> int:
        """At most, sampled and tool tokens."""
        return self.rollouts_per_step * self.tokens_per_rollout

    def lines(self) -> list[str]:
        """Return the sizes as text, one line per noun."""
        resampled = self.most_tasks_per_step > self.tasks_per_step
        most = f"            at most {self.most_tasks_per_step:,} sampled for a step"
        return [
            f"tasks       {self.tasks_per_step:,} per step, {self.steps * self.tasks_per_step:,} "
            f"in {self.steps:,} steps",
            *([most] if resampled else []),
            f"groups      one per task, {self.group_size} rollouts each",
            f"rollouts    {self.rollouts_per_step:,} per step, "
            f"{self.steps * self.rollouts_per_step:,} in all",
            f"tokens      at most {self.sampled_tokens_per_rollout:,} sampled and "
            f"{self.tokens_per_rollout:,} with tool replies per rollout, beside the prompt",
            f"            at most {self.tokens_per_step:,} per step",
            f"updates     {self.updates_per_step:,} per step of {self.rollouts_per_update:,} "
            f"rollouts each, {self.updates:,} in all",
            f"evaluation  {self.evaluations} x {'' if self.evaluation_is_exact else 'at most '}"
            f"{self.rollouts_per_evaluation:,} rollouts",
        ]


def tasks_of_round(missing: int, oversample: float) -> int:
    """Return the number of tasks that are sampled for `missing` groups.

    Example: 10 missing groups and oversample 1.1 take 11 tasks.
    """
    # 10 * 1.1 is a little above 11 in floats.
    return math.ceil(round(missing * oversample, 6))


def arithmetic(config: RunConfig) -> Arithmetic:
    """Compute the sizes of a validated configuration."""
    rollout, algorithm, evaluation = config.rollout, config.algorithm, config.eval
    rollouts = config.tasks_per_step * algorithm.group_size
    during = (config.steps - 1) // evaluation.every if evaluation.every else 0
    held_out = config.data.test_fraction is not None
    rows = None if held_out else known_rows(config.data.test)
    questions = evaluation.questions if rows is None else min(evaluation.questions, rows)
    return Arithmetic(
        steps=config.steps,
        tasks_per_step=config.tasks_per_step,
        group_size=algorithm.group_size,
        rollouts_per_step=rollouts,
        most_tasks_per_step=tasks_of_round(config.tasks_per_step, algorithm.oversample)
        * (1 + algorithm.dynamic_sampling),
        rollouts_per_update=rollouts // algorithm.minibatches,
        updates_per_step=algorithm.num_epochs * algorithm.minibatches,
        sampled_tokens_per_rollout=min(
            rollout.max_turns * rollout.max_turn_tokens, rollout.max_completion_tokens
        ),
        tokens_per_rollout=rollout.max_completion_tokens,
        evaluations=2 + during if evaluation.questions else 0,
        rollouts_per_evaluation=questions * (evaluation.samples + evaluation.greedy),
        evaluation_is_exact=rows is not None,
    )
