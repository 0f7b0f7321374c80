"""Which rollout did well: rewards of groups -> `Rollout.advantage`, and each token's weight.

Shapes: P groups, G rollouts of the largest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from agenttrain.algorithms.advantages import advantages
from agenttrain.algorithms.aggregate import token_weights
from agenttrain.config.schema import AlgorithmConfig, KlIn
from agenttrain.training.batch import Row
from agenttrain.types import Rollout


def assign_advantages(
    groups: Sequence[Sequence[Rollout]], config: AlgorithmConfig, penalties: Mapping[str, float]
) -> None:
    """Set `advantage` of every rollout: None where it has no reward.

    `penalties` (rollout_id -> KL over its sampled tokens) are taken off the rewards, times beta,
    before the baseline; rollouts that are not named have none.
    """
    width = max((len(group) for group in groups), default=1)
    rewards_PG = torch.full((len(groups), width), torch.nan, dtype=torch.float64)
    for p, group in enumerate(groups):
        for g, rollout in enumerate(group):
            if rollout.reward is not None:
                penalty = config.beta * penalties.get(rollout.rollout_id, 0.0)
                rewards_PG[p, g] = rollout.reward - penalty
    advantages_PG = advantages(rewards_PG, baseline=config.advantage, scale=config.scale)
    for group, values in zip(groups, advantages_PG.tolist(), strict=True):
        for rollout, value in zip(group, values, strict=False):
            rollout.advantage = None if rollout.reward is None else value


def weigh(
    rows: Sequence[Row], config: AlgorithmConfig, *, tokens: int, rollouts: int, fixed_length: int
) -> list[Row]:
    """Rows of one optimizer update with the weight of their tokens in its loss.

    `tokens` and `rollouts` count the whole update over all processes. Truncated rollouts that are
    masked count like any other and weigh nothing, so that the others' weight does not depend on
    how many there are.
    """
    weights_B = token_weights(
        torch.tensor([row.sampled_length for row in rows]),
        config.aggregation,
        tokens=tokens,
        rollouts=rollouts,
        fixed_length=fixed_length,
    )
    return [
        replace(row, weight=0.0 if config.mask_truncated and row.rollout.truncated else weight)
        for row, weight in zip(rows, weights_B.tolist(), strict=True)
    ]


def has_gradient(row: Row, config: AlgorithmConfig) -> bool:
    """Whether the row changes the policy; rows that do not need no forward pass."""
    in_loss = config.beta > 0 and config.kl_in is KlIn.loss
    return row.weight > 0 and (row.advantage != 0 or in_loss)
