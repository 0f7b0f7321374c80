"""The clipped policy-gradient surrogate and its ratio.

Shapes: S sampled tokens of B rollouts, one rollout after the other; row_S names each token's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agenttrain.config.schema import Ratio


def importance_ratio(
    logprobs_S: Tensor, behaviour_S: Tensor, row_S: Tensor, *, rollouts: int, level: Ratio
) -> Tensor:
    """policy / behaviour probability, [S]; above token level the same for a rollout's tokens.

    token: PPO and GRPO. sequence_mean: the geometric mean over a rollout's tokens, GSPO
    (https://arxiv.org/abs/2507.18071). sequence_sum: of the whole rollout, RLOO.

    Example: log ratios [.1, .3] of one rollout give exp([.1, .3]), exp([.2, .2]), exp([.4, .4]).
    """
    log_ratio_S = logprobs_S - behaviour_S
    if level is Ratio.token:
        return log_ratio_S.exp()
    sum_B = log_ratio_S.new_zeros(rollouts).index_add(0, row_S, log_ratio_S)
    if level is Ratio.sequence_mean:
        sum_B = sum_B / torch.bincount(row_S, minlength=rollouts).clamp(min=1)
    return sum_B.exp()[row_S]


def clipped_surrogate(ratio_S: Tensor, advantages_S: Tensor, low: float, high: float) -> Tensor:
    """-min(r A, clamp(r, 1 - low, 1 + high) A), [S]: PPO, https://arxiv.org/abs/1707.06347.

    Asymmetric bounds: DAPO, https://arxiv.org/abs/2503.14476.
    """
    clipped_S = ratio_S.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio_S * advantages_S, clipped_S * advantages_S)
