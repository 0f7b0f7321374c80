"""Rewards -> advantages: how much better a rollout did than its peers.

Shapes: P tasks of a step, G rollouts of a task. NaN stands for "no reward applies".
"""

from __future__ import annotations

import torch
from torch import Tensor

from agenttrain.config.schema import Advantage, Scale

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


def advantages(rewards_PG: Tensor, *, baseline: Advantage, scale: Scale) -> Tensor:
    """Advantage of every rollout, [P, G]; NaN where the reward is NaN.

    A NaN reward is in no mean and in no deviation. A group whose rewards are all exactly equal has
    advantage 0 exactly, whatever the rounding of its mean.

    GRPO (https://arxiv.org/abs/2402.03300): the group's mean is the baseline; RLOO
    (https://arxiv.org/abs/2402.14740): the mean of the group's others. Deviations have one degree
    of freedom taken (ddof=1).

    Example: ``[[1., 0., 0., 0.]]`` has [.75, -.25, -.25, -.25] over its mean, [1, -1/3, -1/3, -1/3]
    leave-one-out, and 1.4997 = .75 / (.5 + 1e-4) as the first of the scaled ones.
    """
    valid_PG = ~rewards_PG.isnan()
    count_P1 = valid_PG.sum(1, keepdim=True)
    centred_PG = _centred(rewards_PG, valid_PG, count_P1)
    result_PG = centred_PG
    if baseline is Advantage.leave_one_out:
        # r - (sum - r) / (n - 1) = (r - mean) n / (n - 1)
        result_PG = centred_PG * (count_P1 / (count_P1 - 1).clamp(min=1))
    if scale is Scale.group:
        square_P1 = centred_PG.square().nansum(1, keepdim=True)
        result_PG = result_PG / ((square_P1 / (count_P1 - 1).clamp(min=1)).sqrt() + EPSILON)
    elif scale is Scale.batch:
        # GRPO divides by the deviation of the rewards, RLOO by that of the advantages (as TRL).
        leave_one_out = baseline is Advantage.leave_one_out
        spread_N = (result_PG if leave_one_out else rewards_PG)[valid_PG]
        deviation = spread_N.std() if spread_N.numel() > 1 else spread_N.new_zeros(())
        result_PG = result_PG / (deviation + EPSILON)
    return result_PG


def _centred(rewards_PG: Tensor, valid_PG: Tensor, count_P1: Tensor) -> Tensor:
    mean_P1 = rewards_PG.nansum(1, keepdim=True) / count_P1.clamp(min=1)
    highest_P1 = rewards_PG.masked_fill(~valid_PG, -torch.inf).amax(1, keepdim=True)
    lowest_P1 = rewards_PG.masked_fill(~valid_PG, torch.inf).amin(1, keepdim=True)
    equal_PG = (highest_P1 == lowest_P1) & valid_PG
    return (rewards_PG - mean_P1).masked_fill(equal_PG, 0.0)
