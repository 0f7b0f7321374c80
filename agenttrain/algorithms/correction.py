"""Corrections for an engine whose probabilities are not exactly the trainer's.

Engines compute in other kernels and precisions, or hold weights that are an update old. Shapes: S
sampled tokens of B sequences, which are trajectories; sequence_S is the index of each token's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agenttrain.algorithms.config import CorrectionLevel, CorrectionMode
from agenttrain.algorithms.objectives.base import sequence_means, sequence_sums


def correction_ratio(
    trainer_S: Tensor,
    engine_S: Tensor,
    sequence_S: Tensor,
    *,
    sequences: int,
    level: CorrectionLevel,
) -> Tensor:
    """Return the ratio of probabilities trainer / engine: of tokens, [S], or of sequences, [B].

    token: the token's ratio. Truncated it is TIS (Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training"), masked it is IcePop (https://arxiv.org/abs/2510.18855).
    sequence: the product of these over a sequence. geometric: their geometric mean, whose spread
    does not grow with the length.

    Example: log ratios [.1, .3] of one sequence give exp([.1, .3]), exp(.4), exp(.2).
    """
    difference_S = (trainer_S - engine_S).detach()
    if level is CorrectionLevel.token:
        return difference_S.exp()
    reduce = sequence_sums if level is CorrectionLevel.sequence else sequence_means
    return reduce(difference_S, sequence_S, sequences).exp()


def bound_ratio(
    ratio: Tensor, mode: CorrectionMode, *, low: float | None, high: float | None
) -> Tensor:
    """Return the ratio, replaced outside [low, high] by the bound (truncate) or by 0 (mask).

    Example: [.5, 1, 3] in [.8, 2] becomes [.8, 1, 2] or [0, 1, 0].
    """
    if mode is CorrectionMode.truncate:
        return ratio.clamp(min=low, max=high)
    outside = torch.zeros_like(ratio, dtype=torch.bool)
    if low is not None:
        outside = outside | (ratio < low)
    if high is not None:
        outside = outside | (ratio > high)
    return ratio.masked_fill(outside, 0.0)


def off_policy_keep(
    logprobs_S: Tensor,
    engine_S: Tensor,
    advantages_B: Tensor,
    sequence_S: Tensor,
    threshold: float,
) -> Tensor:
    """Return True for each sequence that keeps its gradient, [B].

    A sequence keeps it if A >= 0, or if its mean of log p(engine) - log p(policy) is not above the
    threshold: DeepSeek-V3.2, https://arxiv.org/abs/2512.02556. A sequence that the policy has
    become less likely to sample is not pushed further down.
    """
    difference_S = engine_S - logprobs_S.detach()
    drift_B = sequence_means(difference_S, sequence_S, advantages_B.numel())
    return (advantages_B >= 0) | (drift_B <= threshold)
