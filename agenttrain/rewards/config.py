"""The settings of a reward that stand beside its `_target_`, read from plain data."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Whole


class OnUnavailable(StrEnum):
    """Consequence of a reward that is unavailable: its judge is down, or it took too long."""

    stop = "stop"
    """Stop the run."""
    drop = "drop"
    """Leave the rollout out of its group, count it (`rollout/dropped`), go on."""


@dataclass(config=SETTINGS)
class RewardSettings:
    """Settings of one reward, beside its `_target_`."""

    weight: Number = 1.0
    """Factor of this reward in the rollout's reward, the weighted sum; may be negative."""
    timeout_s: Number | None = Field(default=300.0, gt=0)
    """Seconds that one call may take; None: no limit."""
    concurrency: Whole | None = Field(default=None, ge=1)
    """Calls at once; None: one after the other for a sync function, all for an async one."""
    on_unavailable: Data[OnUnavailable] = OnUnavailable.stop
    """Consequence of an unavailable reward: stop the run, or drop the rollout."""
