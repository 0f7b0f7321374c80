"""GMPO: the geometric mean of a sequence's clipped token ratios."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import (
    CLIP_METRICS,
    ObjectiveInputs,
    ObjectiveOutput,
    clip_metrics,
)
from agenttrain.algorithms.objectives.config import Ratio, objective
from agenttrain.utils.sections import SETTINGS, Number


@dataclass(config=SETTINGS)
class GeometricMeanSettings:
    """Bounds of a token's ratio."""

    low: Number = Field(default=0.4, ge=0)
    """A token's ratio is clipped at exp(-low)."""
    high: Number = Field(default=0.4, ge=0)
    """A token's ratio is clipped at exp(high)."""


@objective(metrics=CLIP_METRICS, whole_sequence=True)
def geometric_mean(inputs: ObjectiveInputs, settings: GeometricMeanSettings) -> ObjectiveOutput:
    """-A times the geometric mean of the sequence's clipped ratios: GMPO.

    https://arxiv.org/abs/2507.20673. A token's log ratio is at most `high` where A > 0 and at
    least `-low` where A < 0, so that one token cannot move its sequence without bound. All tokens
    of a sequence have one loss: algorithm.aggregation=sequence_mean takes the mean over sequences.
    """
    log_ratio_S, low, high = inputs.log_ratio_S, -settings.low, settings.high
    from_above_S, from_below_S = log_ratio_S.clamp(max=high), log_ratio_S.clamp(min=low)
    clipped_S = from_above_S.where(inputs.advantages_S > 0, from_below_S)
    ratio_S = inputs.mean(clipped_S).exp()[inputs.sequence_S]
    return ObjectiveOutput(
        loss_S=-ratio_S * inputs.advantages_S,
        # Logarithms of ratios and bounds: the same tokens are outside.
        metrics=clip_metrics(inputs, log_ratio_S, low, high, Ratio.token),
    )
