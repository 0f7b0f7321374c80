"""REINFORCE: no ratio, for one update per step."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import ObjectiveInputs, ObjectiveOutput
from agenttrain.algorithms.objectives.config import objective
from agenttrain.utils.sections import SETTINGS


@dataclass(config=SETTINGS)
class ReinforceSettings:
    """There are none."""


@objective(single_update=True)
def reinforce(inputs: ObjectiveInputs, settings: ReinforceSettings) -> ObjectiveOutput:
    """-A log p: REINFORCE, for tokens sampled from the policy as it is.

    With A = 1 it is the cross entropy of supervised learning.
    """
    return ObjectiveOutput(loss_S=-inputs.advantages_S * inputs.logprobs_S)
