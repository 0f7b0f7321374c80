"""Reward functions and their weights: rollouts -> rewards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from agenttrain.config.suggest import did_you_mean
from agenttrain.rewards.base import RewardFunction
from agenttrain.rewards.scorer import Scorer
from agenttrain.types import Rollout


class Rubric:
    """A rollout's reward is the weighted sum over the functions that apply to it.

    Example: with weights ``{"exact": 1.0, "short": 0.5}`` and rewards ``{"exact": 1.0, "short":
    0.2}`` it is 1.1; with ``{"exact": None, "short": 0.2}`` 0.1; None when both are None.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction | Scorer],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """Weights default to 1. Raises ValueError for a weight of no function, or not finite."""
        weights = weights or {}
        for name, weight in weights.items():
            if name not in functions:
                hint = did_you_mean(name, functions)
                raise ValueError(f"reward.{name}.weight={weight}: no such function{hint}")
            if not math.isfinite(weight):
                raise ValueError(f"reward.{name}.weight={weight}: expected a finite number")
        self.names = tuple(functions)
        self.weights = {name: float(weights.get(name, 1.0)) for name in functions}
        self._scorers = [
            function if isinstance(function, Scorer) else Scorer(name, function)
            for name, function in functions.items()
        ]

    async def score(self, rollouts: Sequence[Rollout]) -> None:
        """Fill `rewards` and `reward` of every rollout, one function after the other.

        Raises RewardError, and then leaves all rollouts as they were, when a function raises or
        returns what is no finite number.
        """
        columns = {scorer.name: await scorer.score(rollouts) for scorer in self._scorers}
        for index, rollout in enumerate(rollouts):
            rollout.rewards = {name: values[index] for name, values in columns.items()}
            rollout.reward = self._sum(rollout.rewards)

    def _sum(self, rewards: Mapping[str, float | None]) -> float | None:
        applicable = [self.weights[n] * value for n, value in rewards.items() if value is not None]
        return math.fsum(applicable) if applicable else None
