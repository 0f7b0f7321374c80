"""The steps of a Harbor task: one container, an instruction for each, and tests after each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agenttrain.runtimes.harbor.task import HarborTask


@dataclass(slots=True, kw_only=True)
class Progress:
    """A rollout's way through the steps of its task.

    `Machines` prepares a step and counts it in `begun`. When the step ends, its tests are run and
    its rewards appended to `grades`. So `begun` equals the ended steps while the next is prepared.
    """

    task: HarborTask
    begun: int = 0
    """Steps that are prepared: files copied, setup run, health check passed."""
    grades: list[dict[str, float]] = field(default_factory=list)
    """Rewards of the steps that have ended."""

    @property
    def current(self) -> HarborTask:
        """The first step that has not ended."""
        return self.task.steps[len(self.grades)]

    @property
    def is_over(self) -> bool:
        """True if no step follows: the last has ended, or one earned less than `min_rewards`."""
        ended = len(self.grades)
        if ended == 0:
            return False
        if ended == len(self.task.steps):
            return True
        last_ended = self.task.steps[ended - 1].step_details
        assert last_ended is not None, "only a whole task has no details of a step"
        return is_below(self.grades[-1], last_ended.min_rewards)

    def rewards(self) -> dict[str, float]:
        """Return the task's rewards, as Harbor derives them: means over the steps, or the last.

        Example: ``{"reward": 1.0}`` and ``{"reward": 0.0, "style": 1.0}`` have the means
        ``{"reward": 0.5, "style": 0.5}``. Steps that were never reached do not count.
        """
        if self.task.takes_last_step:
            return dict(self.grades[-1])
        names = dict.fromkeys(name for grades in self.grades for name in grades)
        count = len(self.grades)
        return {
            name: sum(grades.get(name, 0.0) for grades in self.grades) / count for name in names
        }


def is_below(grades: Mapping[str, float], least: Mapping[str, float]) -> bool:
    """Return True if a reward is missing or less than it has to be."""
    return any(grades.get(name, float("-inf")) < reward for name, reward in least.items())
