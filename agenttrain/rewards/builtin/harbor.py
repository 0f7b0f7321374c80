"""Rewards that a task's own tests have written."""

from __future__ import annotations

from agenttrain.types import Rollout
from agenttrain.utils.data_fields import Data

REWARD = "reward"


def harbor(rollout: Rollout, *, name: Data[str | None] = None) -> float | None:
    """Return the reward `name` of a Harbor task's tests; None if the task has no tests.

    Without `name` it is the only reward that the tests wrote or, of several, the one named
    `reward`. Raises ValueError if they wrote none of this name. Each further reward of a task takes
    a section of its own, `reward.<name>.name=…`.
    """
    grades = rollout.grades
    if not grades:
        return None
    if name is None:
        name = next(iter(grades)) if len(grades) == 1 else REWARD
    if name not in grades:
        raise ValueError(
            f"name={name}: the tests of task {rollout.task.task_id} wrote {', '.join(grades)}; "
            f"add reward.<name>._target_=agenttrain.rewards.builtin.harbor.harbor with its name"
        )
    return grades[name]
