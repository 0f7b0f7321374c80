"""The end of a run before its last step: a metric's moving mean has passed a value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from agenttrain.health.config import StopWhenConfig


@dataclass(slots=True)
class StopWhen:
    """The last `patience` values of the metric, whose mean may end the run."""

    config: StopWhenConfig
    values: list[float] = field(default_factory=list)

    def add(self, value: float | None) -> None:
        """Add the value of a finished step. None and NaN mean that nothing was measured."""
        if value is not None and not math.isnan(value):
            self.values = [*self.values, value][-self.config.patience :]

    @property
    def record(self) -> dict[str, Any] | None:
        """Return the settings and the mean that end the run, for summary.json, or None.

        None means that the run goes on.
        Example: ``{"metric": "reward", "above": 0.93, "below": None, "patience": 5, "mean": 0.94}``
        """
        if not self.config.enabled or len(self.values) < self.config.patience:
            return None
        mean = math.fsum(self.values) / len(self.values)
        return {**asdict(self.config), "mean": mean} if self.config.passed(mean) else None

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state that later steps depend on."""
        values = self.values if self.config.enabled else []
        return {"stop_when": {"metric": self.config.metric, "values": values}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. The values of another metric do not count."""
        section = state["stop_when"]
        is_same_metric = section["metric"] == self.config.metric
        self.values = section["values"][-self.config.patience :] if is_same_metric else []
