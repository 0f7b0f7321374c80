"""Settings of the tracker: the dashboard, the rollouts on disk, the console."""

from __future__ import annotations

from enum import StrEnum

from pydantic import field_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import SETTINGS


class TrackerName(StrEnum):
    """Dashboard that the metrics of a run go to."""

    trackio = "trackio"
    """The local dashboard."""
    none = "none"


@dataclass(config=SETTINGS)
class TrackerConfig:
    """Settings of the outputs besides metrics.jsonl."""

    name: TrackerName = TrackerName.trackio
    """`trackio` (local dashboard) or `none`."""
    rollouts: str = "all"
    """Rollouts written per step: all, none, or a number."""
    console: bool = True
    """Live progress in the terminal."""

    @field_validator("rollouts")
    @classmethod
    def _names_a_number(cls, rollouts: str) -> str:
        if rollouts not in ("all", "none") and not rollouts.isdecimal():
            hint = did_you_mean(rollouts, ("all", "none"))
            raise ValueError(f"expected all, none, or a whole number{hint}")
        return rollouts
