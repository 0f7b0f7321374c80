"""Terms of the loss beside its objective: KL estimators, token weights, entropy.

Shapes: S sampled tokens of B sequences, N tokens of an optimizer update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.algorithms.config import Aggregation, AlgorithmConfig, KlEstimator


def kl_estimate(logprobs_S: Tensor, ref_logprobs_S: Tensor, estimator: KlEstimator) -> Tensor:
    """Return the estimated KL of each sampled token, [S].

    With d = logprobs - ref_logprobs: k1 = d (unbiased, either sign), k2 = d^2 / 2 (biased, low
    variance), k3 = exp(-d) - 1 + d (unbiased, never negative). John Schulman, "Approximating KL
    divergence", http://joschu.net/blog/kl-approx.html

    As a term of the loss, k1 has an expected gradient of zero: k1 belongs into the reward. In the
    loss it must be multiplied by the ratio, which gives it the gradient of the KL
    (https://arxiv.org/abs/2512.02556).
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
    """Return the weight of a token's loss for each sequence, [B]: all its tokens have the same.

    A sequence is a trajectory, one of perhaps several of its rollout. lengths_B is the number of
    sampled tokens of each sequence's rollout, all its trajectories together. `tokens` and
    `rollouts` count the whole optimizer update, including those without a gradient, so that the
    weighted sums of microbatches and processes add up to exactly its loss. `fixed_length` is the
    limit on a completion's tokens.

    token_mean: 1 / tokens (DAPO, https://arxiv.org/abs/2503.14476). sequence_mean:
    1 / (rollouts x length), the mean over rollouts of each one's mean (GRPO,
    https://arxiv.org/abs/2402.03300). sequence_sum: 1 / rollouts, so that a long rollout weighs as
    much more as it is longer (LUSPO, https://arxiv.org/abs/2602.05261). fixed_length:
    1 / (rollouts x fixed_length) (Dr. GRPO, https://arxiv.org/abs/2503.20783).

    Example: an update of lengths [3, 1], with fixed_length 10, has the weights [1/4, 1/4],
    [1/6, 1/2], [1/2, 1/2] or [1/20, 1/20].

    An objective of whole sequences gives all tokens of a sequence the same loss. Then sequence_mean
    is the mean over rollouts of this loss, as in RLOO.
    """
    # float64: the weights are rounded to float32 once, in the packed batch.
    lengths_B = lengths_B.double()
    if aggregation is Aggregation.token_mean:
        return lengths_B.new_full(lengths_B.shape, 1 / tokens)
    if aggregation is Aggregation.sequence_mean:
        return 1 / (rollouts * lengths_B.clamp(min=1))
    divisor = 1 if aggregation is Aggregation.sequence_sum else fixed_length
    return lengths_B.new_full(lengths_B.shape, 1 / (rollouts * divisor))


TIED = 1e-4
"""Nats within which two tokens' entropies count as equal: a token's entropy changes by some 1e-6
with the other sequences of its microbatch."""


def top_entropy_mask(entropy_N: Tensor, place_N: Tensor, share: float) -> Tensor:
    """Return True for the tokens among the top `share` by entropy, [N tokens].

    https://arxiv.org/abs/2506.01939. As many tokens are chosen as reach TRL's quantile if no two
    entropies are equal.

    `place_N` decides between tokens whose entropies are as good as equal (within `TIED`, 1e-4
    nats): those with the lowest places are chosen. A place is a number of the token's own, lower
    for tokens near the start of their sequence. Ties are usual, because the rollouts of a group
    have equal entropies until their texts differ. TRL leaves them to rounding, which changes with
    the microbatch.

    Example: of [0, 1, 2, 3, 4] the top half, .5, is [2, 3, 4]; of [1, 1, 1, 2, 0] with places 0 …
    4 it is the first two and the 2.
    """
    tokens = entropy_N.numel()
    if tokens == 0:
        return torch.zeros(0, dtype=torch.bool)
    # With the tokens ranked 0 … tokens - 1 by rising entropy, TRL keeps those from rank
    # (1 - share) (tokens - 1) on. 1e-9: a rank that is whole but for rounding is not rounded up.
    first_kept = math.ceil((1 - share) * (tokens - 1) - 1e-9)
    count = tokens - first_kept
    cutoff = entropy_N.float().sort(descending=True).values[count - 1]
    mask_N = entropy_N > cutoff + TIED
    (ties,) = ((entropy_N >= cutoff - TIED) & ~mask_N).nonzero(as_tuple=True)
    by_place = ties[place_N[ties].argsort()]
    mask_N[by_place[: count - int(mask_N.sum())]] = True  # fill up to `count`
    return mask_N


@dataclass(slots=True)
class EntropyBonus:
    """The weight of the entropy in the loss. Adaptive with `algorithm.entropy.adaptive`.

    Adaptive as in Skywork-OR1, https://arxiv.org/abs/2505.22312: after each update the coefficient
    rises by a step if the entropy is at or below its target, else it falls. The bonus acts only if
    the entropy of the last update was at or below the target.

    Example: target 1.0, step .01, coefficient .02: an update of entropy .8 makes it .03, one of
    entropy 1.2 makes it .02 again, and the bonus does not act.
    """

    coefficient: float
    last: float | None = None
    """Mean entropy of the last update. None before the first."""

    def weight(self, config: AlgorithmConfig) -> float:
        """Return the weight of the entropy in the loss of the next update."""
        adaptive, last = config.entropy.adaptive, self.last
        is_above_target = adaptive is not None and last is not None and last > adaptive.target
        return 0.0 if is_above_target else self.coefficient

    def observe(self, entropy: float, config: AlgorithmConfig) -> None:
        """Record the mean entropy of an update, over the tokens that the bonus acts on."""
        self.last = entropy
        if (adaptive := config.entropy.adaptive) is not None:
            step = adaptive.step if entropy <= adaptive.target else -adaptive.step
            self.coefficient = min(max(self.coefficient + step, 0.0), adaptive.max)
