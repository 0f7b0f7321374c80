"""Watches the figures of each step: what a run that goes wrong looks like before it is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agenttrain.algorithms.mismatch import likely_cause
from agenttrain.config.guards import GuardsConfig, OnTrip
from agenttrain.types import AgenttrainError, Rollout


class GuardTripped(AgenttrainError):
    """A guard of `guards.*` with action=stop; the message names the figure, its limit, the key."""


@dataclass(slots=True, kw_only=True)
class Guards:
    """The guards of a run. `streak` counts the last steps in a row that taught nothing."""

    config: GuardsConfig
    streak: int = 0
    _tripped: set[str] = field(default_factory=set)
    """Guards that were told and are still beyond their limit."""

    def look(
        self,
        step: int,
        metrics: Mapping[str, float],
        rollouts: Sequence[Rollout],
        warn: Callable[[str], None],
    ) -> None:
        """Watch a finished step; raises GuardTripped where a guard says stop.

        Example: ``kl`` 0.31 with ``guards.kl.limit=0.2`` warns: "step 40: kl is 0.31, above
        guards.kl.limit=0.2".
        """
        taught = any(rollout.advantage for rollout in rollouts)
        self.streak = 0 if taught else self.streak + 1
        guards, streak = self.config, self.config.no_variance
        gap = metrics.get("sampling/logprob_gap_max", math.nan)
        found = {
            "logprob_gap": _above("sampling/logprob_gap_max", gap, guards.logprob_gap.limit),
            "kl": _above("kl", metrics.get("kl", math.nan), guards.kl.limit),
            "entropy": _below("entropy", metrics.get("entropy", math.nan), guards.entropy.limit),
            "no_variance": self._streak(streak.limit),
        }
        for name, told in found.items():
            if told is None:
                self._tripped.discard(name)
                continue
            text = f"step {step}: {told} guards.{name}.limit={getattr(guards, name).limit:g}"
            if name == "logprob_gap" and (cause := likely_cause(metrics)):
                text += f"; likely cause: {cause}"
            if getattr(guards, name).action is OnTrip.stop:
                raise GuardTripped(f"{text}; guards.{name}.action=warn goes on")
            if name not in self._tripped:
                self._tripped.add(name)
                warn(f"guard: {text}")

    def _streak(self, limit: int | None) -> str | None:
        if limit is None or self.streak < limit:
            return None
        return f"no rollout had an advantage in {self.streak} steps in a row, as many as"


def _above(name: str, value: float, limit: float | None) -> str | None:
    """NaN, where nothing was measured, is neither above nor below."""
    return f"{name} is {value:.3g}, above" if limit is not None and value > limit else None


def _below(name: str, value: float, limit: float | None) -> str | None:
    return f"{name} is {value:.3g}, below" if limit is not None and value < limit else None
