"""`environment`: the value of the environment's own `reward` method."""

from __future__ import annotations

from agenttrain.types import Rollout


def environment(rollout: Rollout) -> float | None:
    """Return the value of the environment's `reward(rollout)`; None where the class has none."""
    return rollout.environment_reward
