"""Inputs and output of an objective, and the functions that several objectives share.

Composition imports these files for the settings classes and must not import torch: torch is
imported for its types only, and tensors' methods do the work.

Shapes: S sampled tokens of B sequences, one sequence after the other; sequence_S is the index of
each token's sequence. A sequence is a trajectory: all that a rollout sampled, or a part of it where
the context was rewritten or a sub-agent has one of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agenttrain.algorithms.objectives.config import Ratio, ratio_level

if TYPE_CHECKING:
    from torch import Tensor

CLIP_METRICS = {
    "clip_ratio/low_mean": "Share of tokens clipped from below (advantage under 0).",
    "clip_ratio/low_min": "The smallest such share of a trajectory.",
    "clip_ratio/high_mean": "Share of tokens clipped from above (advantage over 0).",
    "clip_ratio/high_max": "The largest such share of a trajectory.",
    "clip_ratio/region_mean": "Share of tokens clipped on either side.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveInputs:
    """Inputs of an objective: the sampled tokens of a microbatch.

    Shapes: S sampled tokens, B sequences (trajectories).
    """

    logprobs_S: Tensor
    """Logprobs under the policy being trained. They carry the gradient."""
    behaviour_S: Tensor
    """Denominator of the ratio: the engine's logprobs, or the policy's before the first update."""
    advantages_S: Tensor
    sequence_S: Tensor
    """Index of the token's sequence, 0 … B-1."""
    sequences: int
    """B. A sequence may have no token."""
    rollout_tokens_B: Tensor | None = None
    """Number of sampled tokens of the rollout that each sequence belongs to. `ratio` scales
    gradients by it, so that splitting a rollout into sequences does not change them. None: each
    sequence is all of its rollout."""
    token_advantages: bool = False
    """True if the advantages of a sequence's tokens may differ (credit per turn, a teacher)."""
    correction_S: Tensor | None = None
    """Factor trainer / engine of each token (`algorithm.correction.level=token`). Set only for an
    objective that multiplies its ratio by the factor itself (`applies_correction`). The losses of
    others are multiplied by it later."""
    correction_B: Tensor | None = None
    """Factor of each sequence, likewise, with another `algorithm.correction.level`."""

    @property
    def log_ratio_S(self) -> Tensor:
        """Return log(policy / behaviour) of each token."""
        return self.logprobs_S - self.behaviour_S

    @property
    def advantages_B(self) -> Tensor:
        """Return each sequence's advantage, which all its tokens share. 0 if it has no token."""
        return self.advantages_S.new_zeros(self.sequences).scatter(
            0, self.sequence_S, self.advantages_S
        )

    def ratio(self, level: Ratio | str) -> Tensor:
        """Return the ratio of probabilities policy / behaviour, [S].

        `level` is ``token`` (each token's own ratio), ``sequence_mean`` (the geometric mean over
        its sequence's tokens) or ``sequence_sum`` (their product). On the last two, a sequence's
        tokens have one value. If tokens have advantages of their own (`token_advantages`), its
        gradient at a token still goes to this token alone: otherwise the token's advantage would
        train all tokens of the sequence.

        Example: ``inputs.ratio("sequence_mean")``. Raises ValueError for another name.
        """
        return importance_ratio(
            self.log_ratio_S,
            self.sequence_S,
            self.sequences,
            level,
            token_gradient=self.token_advantages,
            rollout_tokens_B=self.rollout_tokens_B,
        )

    def sum(self, values_S: Tensor) -> Tensor:
        """Return the sum over each sequence's tokens, [B]."""
        return sequence_sums(values_S, self.sequence_S, self.sequences)

    def mean(self, values_S: Tensor) -> Tensor:
        """Return the mean over each sequence's tokens, [B]. 0 for a sequence without tokens."""
        return sequence_means(values_S, self.sequence_S, self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveOutput:
    """Loss of each sampled token, and the metrics of a microbatch."""

    loss_S: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Name -> values of any shape and without a gradient. Their mean over an update is the metric,
    or for a name that ends in ``min`` or ``max`` the least or the greatest."""


def _with_gradient(value_S: Tensor, source_S: Tensor, scale_S: Tensor | None = None) -> Tensor:
    """Return `value_S` with `scale_S` times the gradient of `source_S` in place of its own."""
    zero_S = source_S - source_S.detach()  # 0, with the gradient of `source_S`
    if scale_S is not None:
        zero_S = zero_S * scale_S
    return value_S.detach() + zero_S


def importance_ratio(
    log_ratio_S: Tensor,
    sequence_S: Tensor,
    sequences: int,
    level: Ratio | str,
    *,
    token_gradient: bool = False,
    rollout_tokens_B: Tensor | None = None,
) -> Tensor:
    """Return the ratio of probabilities policy / behaviour, [S].

    `sequence_S` is the index of each token's sequence, 0 … `sequences` - 1. Above token level all
    tokens of a sequence have one value.

    token: PPO and GRPO. sequence_mean: the geometric mean over a sequence's tokens, GSPO
    (https://arxiv.org/abs/2507.18071). sequence_sum: of the whole sequence, RLOO.

    Example: log ratios [.1, .3] of one sequence give exp([.1, .3]), exp([.2, .2]), exp([.4, .4]).

    Above token level each value depends on all tokens of its sequence. With `token_gradient` the
    gradient of a token's value goes to this token alone, so that a token's advantage reaches no
    other (GSPO-token, section 4.3 of GSPO's paper). If all tokens of a sequence have one advantage,
    both gradients are equal.

    `rollout_tokens_B` counts the sampled tokens of the rollout that each sequence belongs to; None:
    each sequence is all of its rollout. With sequence_sum it scales the gradient, so that a rollout
    in one sequence and the same rollout split into several train a token equally. Example: at a
    ratio of 1 a token's gradient in the sum of its sequence's ratios is 6 in a rollout of 6 tokens,
    also if its sequence has only 2 of them.

    A ratio too large for its type is infinite and has no gradient. Otherwise a clip that removes
    its gradient would multiply 0 by the infinite derivative of exp, which is NaN.
    """
    import torch  # at the top, composition would import it

    level = ratio_level(level)
    if level is Ratio.sequence_mean:
        means_S = sequence_means(log_ratio_S, sequence_S, sequences)[sequence_S]
        log_ratio_S = _with_gradient(means_S, log_ratio_S) if token_gradient else means_S
    elif level is Ratio.sequence_sum:
        log_ratio_S = _log_ratio_sums(
            log_ratio_S,
            sequence_S,
            sequences,
            token_gradient=token_gradient,
            rollout_tokens_B=rollout_tokens_B,
        )
    large = log_ratio_S > math.log(torch.finfo(log_ratio_S.dtype).max) - 1
    return log_ratio_S.masked_fill(large, 0.0).exp().masked_fill(large, math.inf)


def _log_ratio_sums(
    log_ratio_S: Tensor,
    sequence_S: Tensor,
    sequences: int,
    *,
    token_gradient: bool,
    rollout_tokens_B: Tensor | None,
) -> Tensor:
    """Return for each token the sum of its sequence's log ratios, [S], with a scaled gradient.

    The sum stands at each of the sequence's n tokens. So the gradient of all these sums reaches a
    token n times. With `rollout_tokens_B` it is scaled to the number of the rollout's tokens in
    place of n (`importance_ratio` says why). Example: the gradient is 2 for a token of a sequence
    of 2, and 6 if its rollout has 6 tokens.
    """
    sums_S = sequence_sums(log_ratio_S, sequence_S, sequences)[sequence_S]
    tokens_B = token_counts(sequence_S, sequences)
    if token_gradient:  # a token's own log ratio is the source, which the gradient reaches once
        times_B = tokens_B if rollout_tokens_B is None else rollout_tokens_B
        return _with_gradient(sums_S, log_ratio_S, times_B[sequence_S])
    if rollout_tokens_B is None:
        return sums_S
    scale_B = rollout_tokens_B.to(log_ratio_S.dtype) / tokens_B.clamp(min=1)
    return _with_gradient(sums_S, sums_S, scale_B[sequence_S])


def clip_metrics(
    inputs: ObjectiveInputs, ratio_S: Tensor, low: float, high: float, level: Ratio | str
) -> dict[str, Tensor]:
    """Return the values of TRL's metrics clip_ratio/*: tokens that lose their gradient to a clip.

    The values are not reduced yet: later, each name ending in ``mean``, ``min`` or ``max`` gets
    this figure of its values over the update. Ratios are clipped to low … high. On token level
    ``_mean`` has one flag per token, [S], and the extremes the share of clipped tokens of each
    sequence, [B], NaN for one without tokens. Above token level all have a value per sequence, [B].
    """
    ratio_S, level = ratio_S.detach(), ratio_level(level)
    low_S = (ratio_S < low) & (inputs.advantages_S < 0)
    high_S = (ratio_S > high) & (inputs.advantages_S > 0)
    flags = {"low": low_S, "high": high_S, "region": low_S | high_S}
    # Share of each sequence's tokens, [B]. Above token level a sequence's tokens have one ratio,
    # so that its share is 0 or 1.
    shares = {name: inputs.mean(flag_S.float()) for name, flag_S in flags.items()}
    averaged = flags if level is Ratio.token else shares
    if level is Ratio.token:
        # A sequence without tokens has the share 0, which would be the least. NaN counts in no
        # minimum or maximum, and unlike a selection its shape is known without the values.
        is_empty_B = token_counts(inputs.sequence_S, inputs.sequences) == 0
        shares = {n: share_B.masked_fill(is_empty_B, math.nan) for n, share_B in shares.items()}
    return {
        **{f"clip_ratio/{name}_mean": values for name, values in averaged.items()},
        "clip_ratio/low_min": shares["low"],
        "clip_ratio/high_max": shares["high"],
    }


def by_sign(positive: Tensor, value: float, otherwise: float, like: Tensor) -> Tensor:
    """Return `value` where `positive`, else `otherwise`, in the precision of `like`."""
    # `new_full`, not `new_tensor`: a copy from the host waits for all work queued on a GPU.
    return like.new_full((), value).where(positive, like.new_full((), otherwise))


def sequence_sums(values_S: Tensor, sequence_S: Tensor, sequences: int) -> Tensor:
    """Return the sum over each sequence's tokens, [B].

    Example: values [1, 2, 5] of sequences [0, 0, 2], of 3, make [3, 0, 5].
    """
    return values_S.new_zeros(sequences).index_add(0, sequence_S, values_S)


def token_counts(sequence_S: Tensor, sequences: int) -> Tensor:
    """Return the number of tokens of each sequence, int64 [B].

    On a GPU `bincount` would wait for all queued work, to know how many counts there are.

    Example: tokens of sequences [0, 0, 2], of 3, make [2, 0, 1].
    """
    return sequence_sums(sequence_S.new_ones(sequence_S.shape), sequence_S, sequences)


def sequence_means(values_S: Tensor, sequence_S: Tensor, sequences: int) -> Tensor:
    """Return the mean over each sequence's tokens, [B]. 0 for a sequence without tokens."""
    tokens_B = token_counts(sequence_S, sequences).clamp(min=1)
    return sequence_sums(values_S, sequence_S, sequences) / tokens_B
