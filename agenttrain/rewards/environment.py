"""`environment`: what the environment's own `reward` method gave."""

from __future__ import annotations

from agenttrain.types import Rollout


def environment(rollout: Rollout) -> float | None:
    """The value of the environment's `reward(rollout)`; None where the class has none."""
    return rollout.environment_reward
