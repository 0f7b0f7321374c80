"""`StepBatch`: the rollouts of a step, in one process or on their way to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agenttrain.rollout.collector import Collected
from agenttrain.rollout.sharing import Costs, Group
from agenttrain.types import Rollout


@dataclass(slots=True, kw_only=True)
class StepBatch:
    """One process's rollouts of a step, and what all processes know about the step.

    Example: a process has the groups at places 0 and 3, and the groups 0, 2 and 3 are trained.
    Then ``collected.places`` is [0, 3], ``trained`` (0, 2, 3), and ``groups`` has the rollouts of
    group 0, an empty list, and those of group 3.
    """

    collected: Collected
    """All rollouts of this process, also those not trained on, and counts of those left out."""
    trained: tuple[int, ...] = ()
    """Places of the groups to train on, whichever process has them, in task order."""
    tasks: int = 0
    """Tasks that all processes took: the data cursor moves by as many."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the groups of all processes; later also the curriculum's."""
    ahead: bool = False
    """The rollouts were also sampled while earlier steps were trained."""
    idle_s: float | None = None
    """Seconds of the rollout phase in which this process's engine had no request; None: the
    rollouts were also sampled at other times, or by another process."""
    stuck: int = 0
    """Abandoned tool calls of this process that still run."""
    costs: Costs | None = None
    """Expected tokens of a rollout by kind of task, this step's included. The source takes them
    over in `finish`, to spread later tasks evenly over processes. None: the source has no costs."""
    state: dict[str, Any] = field(default_factory=dict)
    """State of the source after this step, if another process has the source. The trainer saves it
    in checkpoints, and sends it to a process that replaces that one."""

    @property
    def groups(self) -> list[Group]:
        """Groups to train on, in task order; an empty list for each that another process has."""
        group_at = dict(zip(self.collected.places, self.collected.groups, strict=True))
        return [group_at.get(place, []) for place in self.trained]

    @property
    def rollouts(self) -> list[Rollout]:
        """All rollouts of this process in (task, sample) order."""
        return self.collected.rollouts
