"""PPO's clip: GRPO, DAPO, GSPO, RLOO and their kin differ in its bounds and its ratio."""

from __future__ import annotations

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.algorithms.objectives.base import (
    CLIP_METRICS,
    ObjectiveInputs,
    ObjectiveOutput,
    clip_metrics,
)
from agenttrain.algorithms.objectives.config import Ratio, objective
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, InvalidSettings, Number


@dataclass(config=SETTINGS)
class ClipSettings:
    """Bounds of the ratio."""

    low: Number = Field(default=0.2, ge=0, lt=1)
    """The ratio is clipped at 1 - low."""
    high: Number = Field(default=0.2, ge=0)
    """The ratio is clipped at 1 + high."""
    dual: Number | None = None
    """The ratio is at most this, also where the advantage is negative; null: unbounded there."""
    ratio: Data[Ratio] = Ratio.token

    @model_validator(mode="after")
    def _check(self) -> ClipSettings:
        """Refuse a dual bound that would also act on positive advantages.

        The loss is -min(min(r, dual) A, clamp(r, 1 - low, 1 + high) A). With A > 0 the second term
        is at most (1 + high) A, so that a `dual` above 1 + high never makes the first the smaller.
        """
        if self.dual is not None and self.dual <= 1 + self.high:
            raise InvalidSettings(
                f"algorithm.objective.dual={self.dual}: must be above 1 + "
                f"algorithm.objective.high={1 + self.high:g}: it bounds what the other clip "
                "leaves; 3 is usual"
            )
        return self


@objective(metrics=CLIP_METRICS)
def clip(inputs: ObjectiveInputs, settings: ClipSettings) -> ObjectiveOutput:
    """-min(min(r, dual) A, clamp(r, 1 - low, 1 + high) A): PPO, https://arxiv.org/abs/1707.06347.

    Asymmetric bounds: DAPO, https://arxiv.org/abs/2503.14476. `dual` bounds the loss where A < 0:
    dual-clip PPO, https://arxiv.org/abs/1912.09729. ratio=sequence_mean is GSPO,
    https://arxiv.org/abs/2507.18071; ratio=sequence_sum RLOO, https://arxiv.org/abs/2402.14740,
    with a clip, as in TRL, which the paper has not.
    """
    ratio_S, low, high = inputs.ratio(settings.ratio), 1 - settings.low, 1 + settings.high
    bounded_S = ratio_S if settings.dual is None else ratio_S.clamp(max=settings.dual)
    unclipped_S = bounded_S * inputs.advantages_S
    clipped_S = ratio_S.clamp(low, high) * inputs.advantages_S
    return ObjectiveOutput(
        loss_S=-unclipped_S.minimum(clipped_S),
        metrics=clip_metrics(inputs, ratio_S, low, high, settings.ratio),
    )
