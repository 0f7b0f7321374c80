"""CISPO: the bounded ratio as a weight, so that no token loses its gradient to a clip."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.algorithms.objectives.config import Ratio, objective
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number


@dataclass(config=SETTINGS)
class CispoSettings:
    """Bound of the weight."""

    high: Number = Field(default=4.0, ge=0)
    """The ratio is at most 1 + high; 4 as ScaleRL recommends, https://arxiv.org/abs/2510.13786."""
    ratio: Data[Ratio] = Ratio.token


@objective(
    metrics={"cispo_clip_ratio": "Share of tokens whose weight CISPO bounds."}, stopped_ratio=True
)
def cispo(inputs: ObjectiveInputs, settings: CispoSettings) -> ObjectiveOutput:
    """-stop_gradient(min(r, 1 + high)) A log p: CISPO, https://arxiv.org/abs/2506.13585.

    No token loses its gradient. Only its weight is bounded. The paper's lower bound, which it
    leaves out of its experiments, is left out.
    """
    ratio_S, bound = inputs.ratio(settings.ratio).detach(), 1 + settings.high
    # A ratio above the bound at a negative advantage is bounded too, but not counted, as in TRL.
    bounded = (ratio_S > bound) & (inputs.advantages_S > 0)
    if settings.ratio is not Ratio.token:
        # All tokens of a sequence have its ratio: count sequences, as TRL does.
        bounded = inputs.mean(bounded.float())
    return ObjectiveOutput(
        loss_S=-ratio_S.clamp(max=bound) * inputs.advantages_S * inputs.logprobs_S,
        metrics={"cispo_clip_ratio": bounded},
    )
