"""Settings of the curriculum: which tasks are drawn, by what was measured of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any


@dataclass
class CurriculumConfig:
    """Draws tasks by their success so far; those that are sometimes solved teach most."""

    enabled: bool = False
    """False: tasks are drawn in the order of the rows, or of `data.shuffle`."""
    low: float = 0.2
    """Least share of successful rollouts of a task in the band."""
    high: float = 0.8
    """Largest share of them."""
    explore: float = 0.5
    """Share of tasks that were never drawn, while there are any, in the order of the rows."""
    floor: float = 0.1
    """How often a task outside the band is drawn, compared with one in it: no task is lost."""
    revisit: int = 50
    """Steps after which a measure is too old: such a task is drawn as if it were in the band."""
    memory: float = 0.5
    """Share of the earlier measures in a new one; 0: only the last group counts."""
    success: float = 1.0
    """Reward from which on a rollout has succeeded."""


def curriculum_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with `data.curriculum` of a RunConfig."""
    curriculum: CurriculumConfig = config.data.curriculum
    if not curriculum.enabled:
        default = CurriculumConfig()
        for field in fields(curriculum):
            value = getattr(curriculum, field.name)
            if value != getattr(default, field.name):
                yield (
                    f"data.curriculum.{field.name}={value}: has no effect without "
                    "data.curriculum.enabled=true"
                )
        return
    if not 0 <= curriculum.low <= curriculum.high <= 1:
        yield (
            f"data.curriculum.low={curriculum.low}: needs 0 <= low <= high <= 1, and "
            f"data.curriculum.high={curriculum.high}"
        )
    for name in ("explore", "floor"):
        value = getattr(curriculum, name)
        if not 0 < value <= 1:
            yield f"data.curriculum.{name}={value}: must be above 0 and at most 1"
    if not 0 <= curriculum.memory < 1:
        yield f"data.curriculum.memory={curriculum.memory}: must be at least 0 and below 1"
    if curriculum.revisit < 1:
        yield f"data.curriculum.revisit={curriculum.revisit}: must be at least 1"
