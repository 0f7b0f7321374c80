"""Estimators of KL(policy || reference) from sampled tokens.

John Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

from torch import Tensor

from agenttrain.config.algorithm import KlEstimator


def kl_estimate(logprobs_S: Tensor, ref_logprobs_S: Tensor, estimator: KlEstimator) -> Tensor:
    """KL of each sampled token, [S].

    With d = logprobs - ref_logprobs: k1 = d (unbiased, either sign), k2 = d^2 / 2 (biased, low
    variance), k3 = exp(-d) - 1 + d (unbiased, never negative).

    As a term of the loss, the expected gradient of k1 is zero: it belongs into the reward, or times
    the ratio, with which its gradient is that of the KL (https://arxiv.org/abs/2512.02556).
    """
    difference_S = logprobs_S - ref_logprobs_S
    if estimator is KlEstimator.k1:
        return difference_S
    if estimator is KlEstimator.k2:
        return difference_S.square() / 2
    return (-difference_S).expm1() + difference_S
