"""Guards over the metrics of each step: they warn of a run that goes wrong, or stop it."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from agenttrain.algorithms.mismatch import GAP, likely_cause
from agenttrain.health.config import GuardsConfig, OnTrip, ToolFailures
from agenttrain.health.reward_hacking import Alarm, RewardWatch
from agenttrain.types import AgenttrainError, Rollout, ToolError


class GuardTripped(AgenttrainError):
    """A guard with action=stop was tripped. The message names metric, limit and key."""


NOT_THE_TOOLS = (ToolError.malformed, ToolError.unknown_tool, ToolError.limit, ToolError.parallel)
"""Errors that are not a tool's fault. Invalid arguments may be: its schema may be wrong."""


@dataclass(slots=True)
class Calls:
    """Calls of one tool since it was last judged."""

    count: int = 0
    failures: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of each error text that the model read."""

    def problem(self, tool: str, config: ToolFailures) -> str | None:
        """Return the problem with these calls, or None if there is none or they are too few."""
        assert config.limit is not None
        if self.count < config.calls or self.failures < config.limit * self.count:
            return None
        most_common = self.reasons.most_common(1)
        reason = f"; most often: {most_common[0][0]}" if most_common else ""
        return (
            f"{self.failures} of {self.count} calls of the tool {tool} failed, which is not below "
            f"guards.tool_failures.limit={config.limit:g}{reason}"
        )


@dataclass(slots=True, kw_only=True)
class Guards:
    """The guards of a run. The training loop calls them after every step and every evaluation.

    `_report` warns of a problem once, or stops the run, as the guard's `action` says.
    """

    config: GuardsConfig
    asynchronous: bool = False
    """Rollouts may be sampled under older weights. `logprob_gap` then judges only the tokens that
    were sampled under the weights of the step, if there are any."""
    folder: Path | None = None
    """The run's folder, which an alarm's command names; None: it names no command."""
    on_alarm: Callable[[Mapping[str, Any]], None] | None = None
    """Records an alarm, whose rollouts `agenttrain view` lists."""
    streak: int = 0
    """Latest steps in a row in which no rollout had an advantage other than 0."""
    _tripped: set[str] = field(default_factory=set)
    """Guards (``kl``), and tools (``tool_failures search``), that have warned and whose problem
    lasts: they do not warn again."""
    _calls: dict[str, Calls] = field(default_factory=dict)
    """Calls by tool, until there are enough of them to judge."""
    _watches: dict[str, RewardWatch] = field(default_factory=dict)
    """Watches by source of a mixture; other runs have one, "". Together, the sources' rewards and
    answers would change whenever their parts of a step do."""
    _evaluation_alarm: str | None = None
    """Text of an evaluation's alarm since the last step. With action=stop the next step raises it,
    because an evaluation is never stopped."""

    def check_step(
        self,
        step: int,
        metrics: Mapping[str, float],
        rollouts: Sequence[Rollout],
        warn: Callable[[str], None],
    ) -> None:
        """Check a finished step. Warn, or raise GuardTripped for a guard with action=stop.

        Example: ``kl`` 0.31 with ``guards.kl.limit=0.2`` warns: "step 40: kl is 0.31, above
        guards.kl.limit=0.2".
        """
        # An advantage of 0 has no gradient, and teaches as little as none.
        has_advantage = any(
            any(trajectory.advantages or ())
            for rollout in rollouts
            for trajectory in rollout.trajectories
        )
        self.streak = 0 if has_advantage else self.streak + 1
        guards, no_variance = self.config, self.config.no_variance.limit
        # The gap between the engine's and the trainer's logprobs, by its name among the metrics. In
        # asynchronous training only that of fresh tokens: those sampled under older weights differ
        # anyway. NaN (nothing was measured) is neither above nor below a limit.
        gap_name = f"{GAP}_fresh_max" if self.asynchronous else f"{GAP}_max"
        gap = metrics.get(gap_name, math.nan)
        kl, entropy = metrics.get("kl", math.nan), metrics.get("entropy", math.nan)
        # Beginnings of messages by guard, "kl is 0.31, above"; the limit is appended below.
        problems: dict[str, str | None] = dict.fromkeys(
            ("logprob_gap", "kl", "entropy", "no_variance")
        )
        if guards.logprob_gap.limit is not None and gap > guards.logprob_gap.limit:
            problems["logprob_gap"] = f"{gap_name} is {gap:.3g}, above"
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
                # Not in an asynchronous step: the cause is judged by means over all tokens, and
                # those sampled under older weights would decide it.
                if name == "logprob_gap" and not self.asynchronous:
                    cause = likely_cause(metrics)
                    problem += f"; likely cause: {cause}" if cause else ""
            # Without a problem too: the guard may then warn again later.
            self._report(name, problem, f"step {step}", warn)
        if guards.tool_failures.limit is not None:
            self._check_tools(step, rollouts, warn)
        if guards.reward_hacking.limit is not None:
            self._check_reward_hacking(step, rollouts, warn)

    def _check_tools(
        self, step: int, rollouts: Sequence[Rollout], warn: Callable[[str], None]
    ) -> None:
        """Judge the tools that have enough calls since they were last judged."""
        guards = self.config
        _add_calls(rollouts, self._calls)
        min_calls = guards.tool_failures.calls
        tools = [tool for tool, calls in self._calls.items() if calls.count >= min_calls]
        # Take all of them out before one stops the run: a later step counts from 0.
        tool_problems = {t: self._calls.pop(t).problem(t, guards.tool_failures) for t in tools}
        for tool, problem in tool_problems.items():
            key = f"tool_failures {tool}"
            self._report("tool_failures", problem, f"step {step}", warn, key=key)

    def _check_reward_hacking(
        self, step: int, rollouts: Sequence[Rollout], warn: Callable[[str], None]
    ) -> None:
        """Warn of new signs of reward hacking; raise GuardTripped with action=stop.

        An alarm of an evaluation since the last step raises too: `check_evaluation` only warned.
        Each alarm is warned of, and the error has the text of the last one.
        """
        # The text of the alarm that an error would show; None: there is none. It begins as that of
        # `check_evaluation`, which is taken so that it raises once.
        text, self._evaluation_alarm = self._evaluation_alarm, None
        for source, rollouts_of_source in _by_source(rollouts).items():
            alarm = self._watch_of(source).check_step(step, rollouts_of_source)
            if alarm is not None:
                text = self._record_alarm(source, alarm)
                warn(f"guard: step {step}: {text}")
        if text is not None and self.config.reward_hacking.action is OnTrip.stop:
            remedy = "set guards.reward_hacking.action=warn to continue"
            raise GuardTripped(f"step {step}: {text}; {remedy}")

    def _watch_of(self, source: str) -> RewardWatch:
        """Return the watch of a source of a mixture, or of the run for ""."""
        if source not in self._watches:
            self._watches[source] = RewardWatch(config=self.config.reward_hacking)
        return self._watches[source]

    def _record_alarm(self, source: str, alarm: Alarm) -> str:
        """Record an alarm; return its text with the rollouts to look at and the command."""
        if source:
            alarm = replace(alarm, text=f"data.sources.{source}: {alarm.text}")
        if self.on_alarm is not None:
            self.on_alarm({"guard": "reward_hacking", **asdict(alarm)})
        ids = ", ".join(rollout_id for _, rollout_id in alarm.rollouts)
        text = f"{alarm.text} (guards.reward_hacking); look at {ids}"
        if self.folder is not None:
            text += f": agenttrain view {shlex.quote(str(self.folder))}"
        return text

    def check_evaluation(
        self, label: str, rollouts: Sequence[Rollout], warn: Callable[[str], None]
    ) -> None:
        """Warn of tools that fail in an evaluation, and of a reward that falls in it.

        `label` is the step and the name of the evaluation: ``step-20/sampled``. An evaluation is
        never stopped. If its reward falls while that of training rises, and action=stop, the run
        stops after the next step (`_evaluation_alarm`).
        """
        if self.config.reward_hacking.limit is not None:
            name = label.partition("/")[2]
            for source, rollouts_of_source in _by_source(rollouts).items():
                if self._has_left_training(source):  # its fall is no sign of hacking
                    continue
                alarm = self._watch_of(source).check_evaluation(name, rollouts_of_source)
                if alarm is not None:
                    self._evaluation_alarm = self._record_alarm(source, alarm)
                    warn(f"guard: {label}: {self._evaluation_alarm}")
        if self.config.tool_failures.limit is None:
            return
        calls_by_tool: dict[str, Calls] = {}
        _add_calls(rollouts, calls_by_tool)
        for tool, calls in calls_by_tool.items():
            key = f"tool_failures {tool}"
            problem = calls.problem(tool, self.config.tool_failures)
            # Not by `_report`: it could stop the run. It would also forget that training has warned
            # of this tool, where the tool has no problem here.
            if problem is not None and key not in self._tripped:
                self._tripped.add(key)
                warn(f"guard: {label}: {problem}")

    def _has_left_training(self, source: str) -> bool:
        """Return True if the latest `window` steps had no task of a source of the mixture.

        The policy may then get worse at this source without any rise of its training reward, so a
        fall in its evaluation is no sign of hacking.
        """
        latest_steps = {
            name: watch.tallies[-1].step for name, watch in self._watches.items() if watch.tallies
        }
        window = self.config.reward_hacking.window
        return (
            source in latest_steps and latest_steps[source] <= max(latest_steps.values()) - window
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON state that later steps' guards depend on."""
        calls = {
            tool: [calls.count, calls.failures, dict(calls.reasons)]
            for tool, calls in self._calls.items()
        }
        return {
            "streak": self.streak,
            "tripped": sorted(self._tripped),
            "tool_calls": calls,
            "reward_watches": {
                source: watch.state_dict() for source, watch in self._watches.items()
            },
            "held_out": self._evaluation_alarm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.streak = state["streak"]
        # Checkpoints of 0.1 lack what came later: guards that have warned, reasons of failures, and
        # watches with their alarm.
        self._tripped = set(state.get("tripped", ()))
        self._calls = {}
        for tool, counts in state["tool_calls"].items():
            count, failures = counts[:2]
            reasons = counts[2] if len(counts) > 2 else {}
            self._calls[tool] = Calls(count, failures, Counter(reasons))
        if "reward_watches" in state:
            for source, watch_state in state["reward_watches"].items():
                self._watch_of(source).load_state_dict(watch_state)
            self._evaluation_alarm = state["held_out"]

    def _report(
        self,
        name: str,
        problem: str | None,
        when: str,
        warn: Callable[[str], None],
        *,
        key: str | None = None,
    ) -> None:
        """Warn, or stop the run, as the action of the guard `name` says.

        `key` names the thing that is judged, if it is not the guard but one tool. Each key gives
        one warning, and another one only after a call without a problem (None).
        """
        key = name if key is None else key
        if problem is None:
            self._tripped.discard(key)
            return
        if getattr(self.config, name).action is OnTrip.stop:
            raise GuardTripped(f"{when}: {problem}; set guards.{name}.action=warn to continue")
        if key not in self._tripped:
            self._tripped.add(key)
            warn(f"guard: {when}: {problem}")


def _by_source(rollouts: Sequence[Rollout]) -> dict[str, list[Rollout]]:
    """Return the rollouts of each source of a mixture that has any; "" is that of other runs."""
    by_source: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        by_source.setdefault(rollout.task.source, []).append(rollout)
    return by_source


def _add_calls(rollouts: Sequence[Rollout], calls_by_tool: dict[str, Calls]) -> None:
    """Add the rollouts' calls to the counts of their tools.

    A row may have a tool of its own: a name and schema for the model, and as `executor` the run's
    tool that does the work. Its calls count for the executor.
    """
    for rollout in rollouts:
        for result in rollout.tool_results:
            if result.error in NOT_THE_TOOLS:  # the model's fault, such as an unknown name
                continue
            tool = result.executor or result.call.name
            calls = calls_by_tool.setdefault(tool, Calls())
            calls.count += 1
            if result.error is not None:
                calls.failures += 1
                calls.reasons[f"{result.error}: {result.content[:200]}"] += 1
