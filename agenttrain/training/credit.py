"""Which rollout did well: rewards of groups -> `Rollout.advantage`, and each token's weight.

Shapes: F reward functions, P groups, G rollouts of the largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from accelerate.state import PartialState
from accelerate.utils import gather_object
from torch import Tensor

from agenttrain.algorithms.advantages import advantages, normalized_advantages
from agenttrain.algorithms.aggregate import token_weights
from agenttrain.config.algorithm import Advantage, AlgorithmConfig, Rewards, Scale
from agenttrain.training.batch import Row
from agenttrain.types import Rollout

Column = dict[str, float | None]
"""What a rollout was given, by reward function; one entry where they are summed."""


def assign_advantages(
    groups: Sequence[Sequence[Rollout]],
    config: AlgorithmConfig,
    penalties: Mapping[str, float],
    reward_weights: Mapping[str, float] | None = None,
) -> None:
    """Set `advantage` of every rollout: None where it has no reward.

    `penalties` (rollout_id -> KL over its sampled tokens) are taken off the rewards, times beta,
    before the baseline; rollouts that are not named have none. `reward_weights` are those of the
    rubric, 1 for a function without one. Statistics of the batch are over all processes.
    """
    columns = [[_column(rollout, config, penalties) for rollout in group] for group in groups]
    before, everyone = _gathered(columns, config)
    weights = {"": 1.0, **(reward_weights or {})}
    advantages_PG = _advantages(everyone, config, weights)[before : before + len(groups)]
    for group, values in zip(groups, advantages_PG.tolist(), strict=True):
        for rollout, value in zip(group, values, strict=False):
            # NaN with a reward: none of the functions that are looked at gave it.
            rollout.advantage = None if math.isnan(value) else value


def _column(rollout: Rollout, config: AlgorithmConfig, penalties: Mapping[str, float]) -> Column:
    if config.rewards is Rewards.normalize_each:
        return dict(rollout.rewards)
    if rollout.reward is None:
        return {"": None}
    return {"": rollout.reward - config.beta * penalties.get(rollout.rollout_id, 0.0)}


def _gathered(
    groups: list[list[Column]], config: AlgorithmConfig
) -> tuple[int, list[list[Column]]]:
    """The groups of all processes where they share statistics, and how many are before ours."""
    shared = config.scale is Scale.batch or config.advantage is Advantage.batch
    if not shared or PartialState().num_processes == 1:
        return 0, groups
    counts = gather_object([len(groups)])
    return sum(counts[: PartialState().process_index]), gather_object(groups)


def _advantages(
    groups: list[list[Column]], config: AlgorithmConfig, weights: Mapping[str, float]
) -> Tensor:
    """Of every rollout, [P, G]."""
    names = sorted({name for group in groups for column in group for name in column}) or [""]
    width = max((len(group) for group in groups), default=0) or 1
    rewards_FPG = torch.full((len(names), len(groups), width), torch.nan, dtype=torch.float64)
    for f, name in enumerate(names):
        for p, group in enumerate(groups):
            for g, column in enumerate(group):
                value = column.get(name)
                rewards_FPG[f, p, g] = torch.nan if value is None else value
    if config.rewards is Rewards.normalize_each:
        each = [weights.get(name, 1.0) for name in names]
        return normalized_advantages(rewards_FPG, each, scale=config.scale)
    return advantages(rewards_FPG[0], baseline=config.advantage, scale=config.scale)


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
    return row.weight > 0 and (row.advantage != 0 or config.kl_in_loss or config.has_bonus)
