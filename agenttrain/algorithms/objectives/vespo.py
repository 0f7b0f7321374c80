"""VESPO: a smooth weight of the whole sequence's ratio."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput, by_sign
from agenttrain.algorithms.objectives.config import objective
from agenttrain.utils.sections import SETTINGS, Number

LOG_RATIO_BOUND = 20.0
LOG_WEIGHT_BOUNDS = (-18.420680743952367, LOG_RATIO_BOUND)
"""log(1e-8) and `LOG_RATIO_BOUND`."""


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
    stopped_ratio=True,
    whole_sequence=True,
    applies_correction=True,
)
def vespo(inputs: ObjectiveInputs, settings: VespoSettings) -> ObjectiveOutput:
    """-e^l w^k e^(-l w) A log p, the weight without a gradient: https://arxiv.org/abs/2602.10693.

    w is the product of the sequence's token ratios, times its factors trainer / engine where there
    are any. The weight is 1 at w = 1. log w is bounded, as in TRL.
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
    # In logarithms, because w^k alone may overflow.
    weight_B = (l_B + k_B * log_w_B - l_B * log_w_B.exp()).exp()
    return ObjectiveOutput(
        loss_S=-weight_B[inputs.sequence_S] * inputs.advantages_S * inputs.logprobs_S,
        metrics={"vespo/phi_seq_mean": weight_B},
    )
