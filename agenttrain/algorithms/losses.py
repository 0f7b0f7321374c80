"""Terms of the loss: the ratio and its surrogates, KL estimators, token weights, entropy.

A surrogate returns the loss of each token, [S]; `token_weights` says how these become one number.
Shapes: S sampled tokens of B rollouts, one rollout after the other; row_S names each token's. N
tokens of an optimizer update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.algorithms.config import Aggregation, AlgorithmConfig, KlEstimator, Ratio

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


def kl_estimate(logprobs_S: Tensor, ref_logprobs_S: Tensor, estimator: KlEstimator) -> Tensor:
    """KL of each sampled token, [S].

    With d = logprobs - ref_logprobs: k1 = d (unbiased, either sign), k2 = d^2 / 2 (biased, low
    variance), k3 = exp(-d) - 1 + d (unbiased, never negative). John Schulman, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html

    As a term of the loss, the expected gradient of k1 is zero: it belongs into the reward, or times
    the ratio, with which its gradient is that of the KL (https://arxiv.org/abs/2512.02556).
    """
    difference_S = logprobs_S - ref_logprobs_S
    if estimator is KlEstimator.k1:
        return difference_S
    if estimator is KlEstimator.k2:
        return difference_S.square() / 2
    return (-difference_S).expm1() + difference_S


def token_weights(
    lengths_B: Tensor, aggregation: Aggregation, *, tokens: int, rollouts: int, fixed_length: int
) -> Tensor:
    """Weight of each token of rollout b in the loss, [B].

    The weights depend on the whole optimizer update, over all microbatches and processes, so that
    the weighted sums of the parts add up to exactly the loss of the whole.

    lengths_B counts sampled tokens; `tokens` and `rollouts` count the whole update, with those that
    have no gradient; `fixed_length` is the limit on a completion's tokens.

    token_mean: 1 / tokens (DAPO, https://arxiv.org/abs/2503.14476). sequence_mean:
    1 / (rollouts x length): the mean over rollouts of each one's mean (GRPO,
    https://arxiv.org/abs/2402.03300). sequence_sum: 1 / rollouts, so that a long rollout weighs as
    much more as it is longer (LUSPO, https://arxiv.org/abs/2602.05261). fixed_length:
    1 / (rollouts x fixed_length) (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Example: lengths [3, 1] that are the whole update, with fixed_length 10, weigh [1/4, 1/4],
    [1/6, 1/2], [1/2, 1/2] or [1/20, 1/20].

    A loss on the level of sequences is the same number at each of a rollout's tokens, so that
    sequence_mean makes it the mean over rollouts, as in RLOO.
    """
    lengths_B = lengths_B.double()
    if aggregation is Aggregation.token_mean:
        return lengths_B.new_full(lengths_B.shape, 1 / tokens)
    if aggregation is Aggregation.sequence_mean:
        return 1 / (rollouts * lengths_B.clamp(min=1))
    of_each = 1 if aggregation is Aggregation.sequence_sum else fixed_length
    return lengths_B.new_full(lengths_B.shape, 1 / (rollouts * of_each))


TIED = 1e-4
"""Nats within which two tokens' entropies are equal: a token's own changes by some 1e-6 with what
shares its microbatch."""


def top_entropy_mask(entropy_N: Tensor, place_N: Tensor, share: float) -> Tensor:
    """Mask of the tokens among the top `share` by entropy, [N] of bool.

    https://arxiv.org/abs/2506.01939. As many tokens as reach TRL's quantile if no two are equal.
    Of tokens that are equal to the last one kept (`TIED`) those of the lowest `place_N` are kept,
    where TRL keeps all that rounding puts above: rollouts of a group have the same entropy where
    their texts do not differ yet, and rounding is another in other microbatches.

    Example: of [0, 1, 2, 3, 4] the top half, .5, is [2, 3, 4]; of [1, 1, 1, 2, 0] with places 0 …
    4 it is the first two and the 2.
    """
    tokens = entropy_N.numel()
    count = tokens - math.ceil((1 - share) * (tokens - 1) - 1e-9)
    if tokens == 0:
        return torch.zeros(0, dtype=torch.bool)
    cutoff = entropy_N.float().sort(descending=True).values[count - 1]
    kept_N = entropy_N > cutoff + TIED
    (tied,) = ((entropy_N >= cutoff - TIED) & ~kept_N).nonzero(as_tuple=True)
    kept_N[tied[place_N[tied].argsort()[: count - int(kept_N.sum())]]] = True
    return kept_N


@dataclass(slots=True)
class EntropyBonus:
    """The weight of the entropy in the loss; adaptive with `entropy_target`.

    Adaptive as in Skywork-OR1, https://arxiv.org/abs/2505.22312: after each update the coefficient
    rises by a step while the entropy is not above its target, else it falls; and it acts only while
    the entropy of the last update was not above the target.

    Example: target 1.0, step .01, at coefficient .02: an update of entropy .8 makes it .03, one of
    entropy 1.2 makes it .02 again, which does not act.
    """

    coefficient: float
    last: float | None = None
    """Mean entropy of the last update; None before the first."""

    def weight(self, config: AlgorithmConfig) -> float:
        """Weight of the entropy in the loss of the next update."""
        target = config.entropy_target
        above = target is not None and self.last is not None and self.last > target
        return 0.0 if above else self.coefficient

    def observe(self, entropy: float, config: AlgorithmConfig) -> None:
        """Record the mean entropy of an update, over the tokens that the bonus acts on."""
        self.last = entropy
        if config.entropy_target is not None:
            up = entropy <= config.entropy_target
            step = config.entropy_bonus_step if up else -config.entropy_bonus_step
            self.coefficient = min(max(self.coefficient + step, 0.0), config.entropy_bonus_max)


def row_sum(values_S: Tensor, row_S: Tensor, rollouts: int) -> Tensor:
    """Sum over each rollout's tokens, [B].

    Example: values [1, 2, 5] of rows [0, 0, 2] and 3 rollouts make [3, 0, 5].
    """
    return values_S.new_zeros(rollouts).index_add(0, row_S, values_S)


def row_mean(values_S: Tensor, row_S: Tensor, rollouts: int) -> Tensor:
    """Mean over each rollout's tokens, [B]; 0 for a rollout without one."""
    count_B = torch.bincount(row_S, minlength=rollouts).clamp(min=1)
    return row_sum(values_S, row_S, rollouts) / count_B
