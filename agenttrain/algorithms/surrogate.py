"""Policy-gradient surrogates and the ratio that they read.

Every function returns the loss of each token, [S]. Shapes: S sampled tokens of B rollouts, one
rollout after the other; row_S names each token's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from agenttrain.algorithms.rows import row_mean, row_sum
from agenttrain.config.algorithm import Ratio

LOG_RATIO_BOUND = 20.0
LEAST_LOG_WEIGHT = -18.420680743952367
"""log(1e-8)"""


def importance_ratio(
    logprobs_S: Tensor, behaviour_S: Tensor, row_S: Tensor, *, rollouts: int, level: Ratio
) -> Tensor:
    """policy / behaviour probability, [S]; above token level the same for a rollout's tokens.

    token: PPO and GRPO. sequence_mean: the geometric mean over a rollout's tokens, GSPO
    (https://arxiv.org/abs/2507.18071). sequence_sum: of the whole rollout, RLOO.

    Example: log ratios [.1, .3] of one rollout give exp([.1, .3]), exp([.2, .2]), exp([.4, .4]).

    A ratio too large for its type is infinite and has no gradient: where a clip takes its gradient
    away, exp's own would be 0 times infinity.
    """
    log_ratio_S = logprobs_S - behaviour_S
    if level is Ratio.token:
        return _exp(log_ratio_S)
    reduce = row_mean if level is Ratio.sequence_mean else row_sum
    return _exp(reduce(log_ratio_S, row_S, rollouts))[row_S]


def _exp(values: Tensor) -> Tensor:
    large = values > math.log(torch.finfo(values.dtype).max) - 1
    return values.masked_fill(large, 0.0).exp().masked_fill(large, torch.inf)


def clipped_surrogate(
    ratio_S: Tensor, advantages_S: Tensor, low: float, high: float, dual: float | None = None
) -> Tensor:
    """-min(min(r, dual) A, clamp(r, 1 - low, 1 + high) A): PPO, https://arxiv.org/abs/1707.06347.

    Asymmetric bounds: DAPO, https://arxiv.org/abs/2503.14476. `dual` bounds the loss where A < 0:
    dual-clip PPO, https://arxiv.org/abs/1912.09729.
    """
    clipped_S = ratio_S.clamp(1 - low, 1 + high)
    bounded_S = ratio_S if dual is None else ratio_S.clamp(max=dual)
    return -torch.minimum(bounded_S * advantages_S, clipped_S * advantages_S)


def cispo_surrogate(
    ratio_S: Tensor, logprobs_S: Tensor, advantages_S: Tensor, high: float
) -> Tensor:
    """-stop_gradient(min(r, 1 + high)) A log p: CISPO, https://arxiv.org/abs/2506.13585.

    No token loses its gradient; only its weight is bounded.
    """
    return -ratio_S.detach().clamp(max=1 + high) * advantages_S * logprobs_S


def sapo_surrogate(ratio_S: Tensor, advantages_S: Tensor, tau_pos: float, tau_neg: float) -> Tensor:
    """-sigmoid(tau (r - 1)) 4 / tau A: SAPO, https://arxiv.org/abs/2511.20347.

    tau is `tau_pos` where A > 0, else `tau_neg`. At r = 1 the gradient is -A, as everywhere.
    """
    tau_S = _by_sign(advantages_S > 0, tau_pos, tau_neg, ratio_S)
    return -torch.sigmoid(tau_S * (ratio_S - 1)) * 4 / tau_S * advantages_S


def geometric_mean_surrogate(
    log_ratio_S: Tensor, advantages_S: Tensor, row_S: Tensor, rollouts: int, low: float, high: float
) -> Tensor:
    """-A times the geometric mean of the rollout's clipped ratios: GMPO.

    https://arxiv.org/abs/2507.20673. A token's log ratio is at most `high` where A > 0 and at
    least `-low` where A < 0, so that one token cannot move its rollout without bound. The same at
    each token of a rollout: sequence_mean makes it the mean over rollouts.
    """
    clipped_S = torch.where(
        advantages_S > 0, log_ratio_S.clamp(max=high), log_ratio_S.clamp(min=-low)
    )
    return -row_mean(clipped_S, row_S, rollouts).exp()[row_S] * advantages_S


def reinforce_surrogate(logprobs_S: Tensor, advantages_S: Tensor) -> Tensor:
    """-A log p: REINFORCE, for tokens sampled from the policy as it is."""
    return -advantages_S * logprobs_S


def vespo_weight(
    log_ratio_S: Tensor,
    advantages_B: Tensor,
    row_S: Tensor,
    *,
    log_correction_B: Tensor | None,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """e^l w^k e^(-l w) of each rollout's ratio w, [B], without gradient; 1 at w = 1.

    VESPO, https://arxiv.org/abs/2602.10693; its loss is -weight A log p. `positive` is (k, l) where
    A >= 0, `negative` where A < 0. w is the product of the rollout's token ratios, times its factor
    trainer / engine where there is one.
    """
    rollouts = advantages_B.numel()
    log_ratio_S = log_ratio_S.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_w_B = row_sum(log_ratio_S, row_S, rollouts)
    if log_correction_B is not None:
        log_w_B = log_w_B + log_correction_B
    log_w_B = log_w_B.clamp(LEAST_LOG_WEIGHT, LOG_RATIO_BOUND)
    k_B = _by_sign(advantages_B >= 0, positive[0], negative[0], log_w_B)
    l_B = _by_sign(advantages_B >= 0, positive[1], negative[1], log_w_B)
    return (l_B + k_B * log_w_B - l_B * log_w_B.exp()).exp()


def _by_sign(chosen: Tensor, value: float, other: float, like: Tensor) -> Tensor:
    """`value` where chosen, else `other`, in the precision of `like`."""
    return torch.where(chosen, like.new_tensor(value), like.new_tensor(other))
