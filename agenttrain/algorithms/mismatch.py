"""Gap between the engine's log-probabilities of the tokens it sampled and the trainer's.

The figures point to a cause (`likely_cause` reads them):

1. token error: the trainer scores other tokens than were sampled. The ledger prevents it and
   counts attempts (``rollout/ledger_breaks``).
2. stale weights: ``sampling/stale_tokens`` > 0, with a gap that the tokens of the trainer's own
   version do not have (``logprob_gap_stale`` beside ``logprob_gap_fresh``).
3. another sampling transform (temperature, filters): ``sampling/logprob_slope`` is not 1. At a
   temperature T that the trainer does not know it is near 1 / T; a filter moves the ends only.
4. numerics: none of the above. The slope is 1. Kernels of other precision give a gap that grows
   with the position (``logprob_gap_early`` … ``_late``), a wrong cache a gap after the first turn.

Shapes: S sampled tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.algorithms.config import KlEstimator
from agenttrain.algorithms.loss import MetricParts, mean_parts
from agenttrain.algorithms.losses import kl_estimate

GAP = "sampling/logprob_gap"
THIRDS = ("early", "middle", "late")
MISMATCH_NAMES = (
    GAP,
    f"{GAP}_max",
    *(f"{GAP}_{part}" for part in ("first_turn", "later_turns", *THIRDS, "fresh", "stale")),
    f"{GAP}_fresh_max",
    "sampling/kl",
    "sampling/logprob_slope",
    "sampling/stale_tokens",
)
"""Names of the parts that `mismatch` returns."""
ROUTE_NAMES = ("routing/equal", "routing/logprob_gap_replayed", "routing/logprob_gap_own")
"""Names of the parts that `route_mismatch` returns."""
LEAST_SPREAD = 1e-3
"""Standard deviation of the trainer's logprobs below which their slope means nothing."""
FAR = 3.0
"""Factor by which one gap is far above another."""
SLOPE_OFF = 0.1
"""Distance of a slope from 1 that rounding does not explain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origins:
    """Places of sampled tokens, and the weights they were sampled under."""

    turn_S: Tensor
    """Turn of the rollout, from 0."""
    third_S: Tensor
    """0, 1 or 2: the third of its trajectory's sampled tokens."""
    stale_S: Tensor
    """True: sampled under other weights than the trainer's at the start of the step."""


def mismatch(
    engine_S: Tensor, trainer_S: Tensor, origins: Origins, means: tuple[float, float]
) -> MetricParts:
    """Return the metrics of `MISMATCH_NAMES`, as parts that combine over processes.

    The gap of a token is |trainer's logprob - engine's|. Its mean is over all tokens and over those
    of the first turn, of later turns, of each third of their trajectory (early, middle, late),
    fresh (sampled under the weights that are trained) and stale (under older ones). ``kl`` is the
    k3 estimate of KL(engine || trainer). ``logprob_slope`` is that of the least-squares line
    through the points (trainer, engine).

    `means` are the mean logprobs of engine and trainer over the tokens of all processes. Sums
    around these means add up over the processes, so that the slope is that of all tokens.

    Example: engine [-1, -2], trainer [-1, -1.5], the second token of turn 1: mean 0.25, max 0.5,
    first_turn 0, later_turns 0.5, kl (0 + exp(0.5) - 1 - 0.5) / 2 = 0.0744.
    """
    gap_S = (trainer_S - engine_S).abs()
    first_turn_S = origins.turn_S == 0
    token_groups = {
        "first_turn": first_turn_S,
        "later_turns": ~first_turn_S,
        **{name: origins.third_S == index for index, name in enumerate(THIRDS)},
        "fresh": ~origins.stale_S,
        "stale": origins.stale_S,
    }
    # The slope is covariance / variance. A mean's part is (sum, count), and its value their
    # quotient; so the slope's part is (sum of products, sum of squares).
    engine_mean, trainer_mean = means
    centred_S = (trainer_S - trainer_mean).float()
    squares = centred_S.square().sum()
    least_squares = max(trainer_S.numel(), 1) * LEAST_SPREAD**2
    if squares <= least_squares:  # all tokens are about equally likely: a slope means nothing
        slope = trainer_S.new_zeros(2).float()
    else:
        products = (centred_S * (engine_S - engine_mean)).sum()
        slope = torch.stack((products, squares))
    return {
        GAP: mean_parts(gap_S),
        f"{GAP}_max": _largest(gap_S),
        **{f"{GAP}_{name}": mean_parts(gap_S[mask_S]) for name, mask_S in token_groups.items()},
        f"{GAP}_fresh_max": _largest(gap_S[token_groups["fresh"]]),
        "sampling/kl": mean_parts(kl_estimate(engine_S, trainer_S, KlEstimator.k3)),
        "sampling/logprob_slope": slope,
        "sampling/stale_tokens": mean_parts(origins.stale_S),
    }


def route_mismatch(
    engine_S: Tensor, replayed_S: Tensor, own_S: Tensor, equal: Tensor
) -> MetricParts:
    """Return the metrics of `ROUTE_NAMES`, as parts (sum, count): what replayed experts change.

    ``routing/equal`` is the share of pairs (position, layer) for which engine and trainer chose the
    same set of experts; `equal` is its part: these pairs, and all pairs. ``logprob_gap_replayed``
    and ``_own`` are the mean distances to the engine's logprobs of `replayed_S`, the trainer's
    with the engine's experts, and of `own_S`, the trainer's with its own.
    """
    replayed_gap = mean_parts((replayed_S - engine_S).abs())
    own_gap = mean_parts((own_S - engine_S).abs())
    return dict(zip(ROUTE_NAMES, (equal.float(), replayed_gap, own_gap), strict=True))


def _largest(gap_S: Tensor) -> Tensor:
    """Return the part of a metric that ends in ``max``; without a token -inf, which is neutral."""
    largest = gap_S.amax() if gap_S.numel() else gap_S.new_tensor(-torch.inf)
    return torch.stack((largest, largest)).float()


def likely_cause(metrics: Mapping[str, float]) -> str | None:
    """Return the likely cause of a step's gap, in words, or None if the gap was not measured.

    `metrics` are those of `mismatch`: the gap is the mean |trainer's logprob - engine's| in nats,
    the slope that of the engine's logprobs over the trainer's, 1 if both sample alike. The order
    of the cases matters: a wrong cache or stale weights bend the slope too.

    Example: slope 1.43 and nothing else: "another sampling transform …".
    """

    def metric(name: str) -> float:
        return metrics.get(name, math.nan)

    slope = metric("sampling/logprob_slope")
    fresh, stale = metric(f"{GAP}_fresh"), metric(f"{GAP}_stale")
    if math.isnan(metric(GAP)):
        return None
    if metric("rollout/ledger_breaks") > 0:  # attempts to train on tokens that were not sampled
        return "other tokens than were sampled (rollout/ledger_breaks)"
    # Not `stale >= …`: without a fresh token `fresh` is NaN, and all tokens are stale.
    if metric("sampling/stale_tokens") > 0 and not stale < FAR * fresh:
        return f"tokens sampled under older weights ({GAP}_stale is {stale:.3g})"
    # The first turn computes its prompt anew; later ones read the cache of the turns before.
    if metric(f"{GAP}_later_turns") > FAR * metric(f"{GAP}_first_turn"):
        return f"a wrong cache ({GAP}_later_turns is far above _first_turn)"
    if abs(slope - 1) > SLOPE_OFF:
        return (
            "another sampling transform, a temperature say, or other weights "
            f"(sampling/logprob_slope is {slope:.3g})"
        )
    return "numerics: other kernels or precision"
