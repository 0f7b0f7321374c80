"""SAPO: a sigmoid gate of the ratio in place of the clip."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput, by_sign
from agenttrain.algorithms.objectives.config import Ratio, objective
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number


@dataclass(config=SETTINGS)
class SapoSettings:
    """Steepness tau of the gate, a sigmoid of the ratio."""

    tau_pos: Number = Field(default=1.0, gt=0)
    """Steepness where the advantage is positive."""
    tau_neg: Number = Field(default=1.05, gt=0)
    """Steepness where the advantage is zero or negative."""
    ratio: Data[Ratio] = Ratio.token


@objective()
def sapo(inputs: ObjectiveInputs, settings: SapoSettings) -> ObjectiveOutput:
    """-sigmoid(tau (r - 1)) 4 / tau A: SAPO, https://arxiv.org/abs/2511.20347.

    tau is `tau_pos` where A > 0, else `tau_neg`. With the factor 4 / tau the gradient at
    r = 1 is -A, as with the other objectives.
    """
    ratio_S, advantages_S = inputs.ratio(settings.ratio), inputs.advantages_S
    tau_S = by_sign(advantages_S > 0, settings.tau_pos, settings.tau_neg, ratio_S)
    return ObjectiveOutput(loss_S=-(tau_S * (ratio_S - 1)).sigmoid() * 4 / tau_S * advantages_S)
