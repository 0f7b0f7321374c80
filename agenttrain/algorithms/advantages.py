"""Rewards -> advantages: how much better a rollout did than its peers.

Shapes: P tasks of a step, G rollouts of a task, R = P x G, F reward functions, 1 an axis to
broadcast. NaN stands for "no reward applies".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agenttrain.algorithms.config import Advantage, Scale

EPSILON = 1e-4
"""Added to a standard deviation before dividing by it, as TRL does."""


def advantages(rewards_PG: Tensor, *, baseline: Advantage, scale: Scale) -> Tensor:
    """Return the advantage of every rollout, [P tasks, G rollouts]. NaN where the reward is NaN.

    A NaN reward is in no mean and in no deviation. Where all compared rewards are exactly equal the
    advantage is exactly 0, whatever the rounding of their mean. With baseline=none `scale` has no
    effect: without a baseline there is no deviation from it.

    GRPO (https://arxiv.org/abs/2402.03300): the group's mean is the baseline; RLOO
    (https://arxiv.org/abs/2402.14740): the mean of the group's others; REINFORCE++
    (https://arxiv.org/abs/2501.03262): the mean of the batch; none: the reward itself.
    Standard deviations are those of a sample (ddof=1).

    Example: ``[[1., 0., 0., 0.]]`` has [.75, -.25, -.25, -.25] over its mean, [1, -1/3, -1/3, -1/3]
    leave-one-out, and 1.4997 = .75 / (.5 + 1e-4) as the first of the scaled ones.
    """
    if baseline is Advantage.none:
        return rewards_PG
    if baseline is Advantage.batch:  # the batch is compared as one large group
        advantages_1R = advantages(rewards_PG.reshape(1, -1), baseline=Advantage.group, scale=scale)
        return advantages_1R.reshape(rewards_PG.shape)
    valid_PG = ~rewards_PG.isnan()
    count_P1 = valid_PG.sum(1, keepdim=True)
    mean_P1 = rewards_PG.nansum(1, keepdim=True) / count_P1.clamp(min=1)
    highest_P1 = rewards_PG.masked_fill(~valid_PG, -torch.inf).amax(1, keepdim=True)
    lowest_P1 = rewards_PG.masked_fill(~valid_PG, torch.inf).amin(1, keepdim=True)
    # The rounded mean of equal rewards may differ from them, and a deviation of 1e-8 would blow
    # that difference up: their advantage is set to 0 instead of computed.
    equal_PG = (highest_P1 == lowest_P1) & valid_PG
    centred_PG = (rewards_PG - mean_P1).masked_fill(equal_PG, 0.0)
    result_PG = centred_PG
    others_P1 = (count_P1 - 1).clamp(min=1)  # rollouts of the group besides one
    if baseline is Advantage.leave_one_out:
        # With n rewards: r - (sum - r) / (n - 1) = (r - mean) n / (n - 1). The product comes first,
        # because count / others, of two integer tensors, would be rounded to float32.
        result_PG = centred_PG * count_P1 / others_P1
    if scale is Scale.group:
        std_P1 = (centred_PG.square().nansum(1, keepdim=True) / others_P1).sqrt()
        result_PG = result_PG / (std_P1 + EPSILON)
    elif scale is Scale.batch:
        # GRPO divides by the deviation of the rewards, RLOO by that of the advantages (as TRL).
        scaling_PG = result_PG if baseline is Advantage.leave_one_out else rewards_PG
        result_PG = result_PG / (_std(scaling_PG) + EPSILON)
    return result_PG


def normalized_advantages(rewards_FPG: Tensor, weights: Sequence[float], *, scale: Scale) -> Tensor:
    """Return the weighted sum of the advantages by each of F reward functions, [P, G].

    Shapes: F reward functions, P tasks, G rollouts of a task.

    GDPO, https://arxiv.org/abs/2601.05242: each function's advantages are always normalised within
    the group first, so that one whose rewards spread little counts as much as one whose rewards
    spread widely. `scale` is about their sum: with scale=batch it is divided by its deviation over
    the batch (its mean is 0 already), as in the paper. With scale=none it is not divided; settings
    refuse scale=group. NaN where no function applies.

    Example: functions [1, 0] and [0, 10] of one group of two, of weights 1 and 0.5, are worth
    .707 - .354 to the first rollout, whatever the factor of ten.
    """
    normalized_FPG = torch.stack(
        [
            advantages(rewards, baseline=Advantage.group, scale=Scale.group)
            for rewards in rewards_FPG
        ]
    )
    weights_F11 = torch.tensor(weights, dtype=rewards_FPG.dtype)[:, None, None]
    unscored_PG = rewards_FPG.isnan().all(0)
    result_PG = (normalized_FPG * weights_F11).nansum(0).masked_fill(unscored_PG, torch.nan)
    if scale is Scale.batch:
        result_PG = result_PG / (_std(result_PG) + EPSILON)
    return result_PG


def _std(values: Tensor) -> Tensor:
    """Return the standard deviation (ddof=1) of the values that are not NaN. 0 below two values."""
    valid_N = values[~values.isnan()]
    return valid_N.std() if valid_N.numel() > 1 else values.new_zeros(())
