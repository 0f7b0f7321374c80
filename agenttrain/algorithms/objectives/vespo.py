"""VESPO: a smooth weight of the whole sequence's ratio."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput, by_sign
from agenttrain.algorithms.objectives.config import objective
from agenttrain.utils.sections import SETTINGS, Number

LOG_RATIO_BOUND = 20.0
"""Bound of a token's log ratio, on either side."""
LOG_WEIGHT_BOUNDS = (-18.420680743952367, LOG_RATIO_BOUND)
"""Bounds of a logarithm of a sequence's ratio or of a correction: log(1e-8) and
`LOG_RATIO_BOUND`."""


@dataclass(config=SETTINGS)
class VespoSettings:
    """Shape of the weight e^l w^k e^(-l w) of a ratio w."""

    k_pos: Number = Field(default=2.0, gt=0)
    """k where the advantage is not negative."""
    lambda_pos: Number = Field(default=3.0, gt=0)
    """l where the advantage is not negative."""
    k_neg: Number = Field(default=3.0, gt=0)
    """k where the advantage is negative."""
    lambda_neg: Number = Field(default=2.0, gt=0)
    """l where the advantage is negative."""


@objective(
    metrics={"vespo/phi_seq_mean": "Mean weight that VESPO gives a trajectory."},
    stopped_ratio=True,  # the ratio carries no gradient
    whole_sequence=True,  # one weight and one advantage for a sequence
    applies_correction=True,
)
def vespo(inputs: ObjectiveInputs, settings: VespoSettings) -> ObjectiveOutput:
    """Return -weight(w) A log p of each token; the weight has no gradient.

    weight(w) = e^l w^k e^(-l w), which is 1 at w = 1: https://arxiv.org/abs/2602.10693. w is the
    product of the sequence's token ratios, times its correction trainer / engine if the run has
    one: a factor per token (`correction_S`) or one per sequence (`correction_B`), never both.
    All logarithms are bounded, as in TRL: those of factors before they are added up, and log w.
    """
    log_ratio_S = inputs.log_ratio_S.detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    log_w_B = inputs.sum(log_ratio_S)
    if inputs.correction_S is not None:
        log_w_B = log_w_B + inputs.sum(inputs.correction_S.log().clamp(*LOG_WEIGHT_BOUNDS))
    if inputs.correction_B is not None:
        log_w_B = log_w_B + inputs.correction_B.log().clamp(*LOG_WEIGHT_BOUNDS)
    log_w_B = log_w_B.clamp(*LOG_WEIGHT_BOUNDS)
    not_negative_B = inputs.advantages_B >= 0
    k_B = by_sign(not_negative_B, settings.k_pos, settings.k_neg, log_w_B)
    l_B = by_sign(not_negative_B, settings.lambda_pos, settings.lambda_neg, log_w_B)
    # The weight by its logarithm, l + k log w - l w, because w^k alone may overflow.
    log_weight_B = l_B + k_B * log_w_B - l_B * log_w_B.exp()
    weight_B = log_weight_B.exp()
    return ObjectiveOutput(
        loss_S=-weight_B[inputs.sequence_S] * inputs.advantages_S * inputs.logprobs_S,
        metrics={"vespo/phi_seq_mean": weight_B},
    )
