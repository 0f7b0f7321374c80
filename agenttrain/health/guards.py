"""Guards over the figures of each step: they warn of a run that goes wrong, or stop it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agenttrain.algorithms.mismatch import likely_cause
from agenttrain.health.config import GuardsConfig, OnTrip, ToolFailures
from agenttrain.types import AgenttrainError, Rollout, ToolError


class GuardTripped(AgenttrainError):
    """A guard of `guards.*` with action=stop; the message names the figure, its limit, the key."""


NOT_THE_TOOLS = (ToolError.malformed, ToolError.unknown_tool, ToolError.limit, ToolError.parallel)
"""Errors that say nothing about a tool; arguments that do not fit its schema may: a wrong schema.
"""


@dataclass(slots=True)
class Calls:
    """Calls of one tool that are not judged yet."""

    made: int = 0
    failed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Error messages that the model read."""

    def failing(self, tool: str, config: ToolFailures) -> str | None:
        """Say what is wrong with these calls, if they are enough to judge."""
        assert config.limit is not None
        if self.made < config.calls or self.failed < config.limit * self.made:
            return None
        often = self.reasons.most_common(1)
        reason = f"; most often: {often[0][0]}" if often else ""
        return (
            f"{self.failed} of {self.made} calls of the tool {tool} failed, which is not below "
            f"guards.tool_failures.limit={config.limit:g}{reason}"
        )


@dataclass(slots=True, kw_only=True)
class Guards:
    """The guards of a run. `streak` counts the last steps in a row that taught nothing."""

    config: GuardsConfig
    streak: int = 0
    _tripped: set[str] = field(default_factory=set)
    """Guards that were warned of and are still beyond their limit."""
    _calls: dict[str, Calls] = field(default_factory=dict)

    def check_step(
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
        guards, no_variance = self.config, self.config.no_variance.limit
        # NaN, where nothing was measured, is neither above nor below.
        gap = metrics.get("sampling/logprob_gap_max", math.nan)
        kl, entropy = metrics.get("kl", math.nan), metrics.get("entropy", math.nan)
        problems: dict[str, str | None] = dict.fromkeys(
            ("logprob_gap", "kl", "entropy", "no_variance")
        )
        if guards.logprob_gap.limit is not None and gap > guards.logprob_gap.limit:
            problems["logprob_gap"] = f"sampling/logprob_gap_max is {gap:.3g}, above"
        if guards.kl.limit is not None and kl > guards.kl.limit:
            problems["kl"] = f"kl is {kl:.3g}, above"
        if guards.entropy.limit is not None and entropy < guards.entropy.limit:
            problems["entropy"] = f"entropy is {entropy:.3g}, below"
        if no_variance is not None and self.streak >= no_variance:
            problems["no_variance"] = (
                f"no rollout had an advantage in {self.streak} steps in a row, as many as"
            )
        for name, problem in problems.items():
            if problem is not None:
                problem = f"{problem} guards.{name}.limit={getattr(guards, name).limit:g}"
                if name == "logprob_gap" and (cause := likely_cause(metrics)):
                    problem += f"; likely cause: {cause}"
            self._report(name, name, problem, f"step {step}", warn)
        if guards.tool_failures.limit is None:
            return
        _count(rollouts, self._calls)
        enough = guards.tool_failures.calls
        judged = [tool for tool, calls in self._calls.items() if calls.made >= enough]
        # All are taken out before one of them stops the run: a later step counts anew.
        failing = {t: self._calls.pop(t).failing(t, guards.tool_failures) for t in judged}
        for tool, problem in failing.items():
            self._report("tool_failures", f"tool_failures {tool}", problem, f"step {step}", warn)

    def check_evaluation(
        self, label: str, rollouts: Sequence[Rollout], warn: Callable[[str], None]
    ) -> None:
        """Warn of tools that fail in an evaluation; nothing stops one."""
        if self.config.tool_failures.limit is None:
            return
        calls: dict[str, Calls] = {}
        _count(rollouts, calls)
        for tool, counted in calls.items():
            key = f"tool_failures {tool}"
            problem = counted.failing(tool, self.config.tool_failures)
            if problem is not None and key not in self._tripped:
                self._tripped.add(key)
                warn(f"guard: {label}: {problem}")

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the guards of later steps depend on; JSON."""
        calls = {tool: [calls.made, calls.failed] for tool, calls in self._calls.items()}
        return {"streak": self.streak, "tool_calls": calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict()`; older checkpoints know no calls."""
        self.streak = state["streak"]
        self._calls = {tool: Calls(*counts) for tool, counts in state.get("tool_calls", {}).items()}

    def _report(
        self, name: str, key: str, problem: str | None, when: str, warn: Callable[[str], None]
    ) -> None:
        """Warn or stop as the guard `name` says; `key` is warned of once while it is beyond."""
        if problem is None:
            self._tripped.discard(key)
            return
        if getattr(self.config, name).action is OnTrip.stop:
            raise GuardTripped(f"{when}: {problem}; guards.{name}.action=warn goes on")
        if key not in self._tripped:
            self._tripped.add(key)
            warn(f"guard: {when}: {problem}")


def _count(rollouts: Sequence[Rollout], calls: dict[str, Calls]) -> None:
    """Add the rollouts' calls by tool; a row's own tool counts as the one that does its work."""
    for rollout in rollouts:
        for result in rollout.tool_results:
            if result.error in NOT_THE_TOOLS:
                continue
            counted = calls.setdefault(result.executor or result.call.name, Calls())
            counted.made += 1
            if result.error is not None:
                counted.failed += 1
                counted.reasons[f"{result.error}: {result.content[:200]}"] += 1
