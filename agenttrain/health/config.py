"""Settings of the guards, which act on signs of a run that goes wrong, and of the watchdog.

The watchdog ends a run with evidence after so many seconds without progress.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class OnTrip(StrEnum):
    """Action of a guard."""

    warn = "warn"
    """Say so, once until the figure is back on its side."""
    stop = "stop"
    """Stop the run after the step, whose metrics and rollouts are on disk."""


@dataclass
class Guard:
    """A figure of metrics.jsonl and how far it may go."""

    limit: float | None = None
    """None: not watched."""
    action: OnTrip = OnTrip.warn


@dataclass
class Streak:
    """Steps in a row that may teach nothing."""

    limit: int | None = 20
    """Steps; None: not watched."""
    action: OnTrip = OnTrip.warn


@dataclass
class ToolFailures:
    """Calls of one tool that may fail, by an error of the tool's or for arguments it refuses."""

    limit: float | None = 0.9
    """Share of the calls; None: not watched."""
    calls: int = 32
    """Calls that are judged together, at least; a tool with fewer in a step is judged later."""
    action: OnTrip = OnTrip.warn


@dataclass
class GuardsConfig:
    """Figures watched after every step. Values that are not finite always stop the run."""

    logprob_gap: Guard = field(default_factory=lambda: Guard(limit=1.0))
    """Most that `sampling/logprob_gap_max` may be: one token's distance between the engine's and
    the trainer's logprobs, before the step's first update. 1.0 is a probability off by e."""
    kl: Guard = field(default_factory=Guard)
    """Most that `kl` to the reference may be; needs algorithm.beta."""
    entropy: Guard = field(default_factory=Guard)
    """Least that `entropy` of the sampled tokens may be, in nats."""
    no_variance: Streak = field(default_factory=Streak)
    """Steps in a row in which no rollout had an advantage: all rewards of each group were equal."""
    tool_failures: ToolFailures = field(default_factory=ToolFailures)
    """Least share of failed calls at which a tool is named. Evaluations are watched too, and never
    stopped."""


def guard_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with the `guards` of a RunConfig."""
    guards: GuardsConfig = config.guards
    for name in ("logprob_gap", "kl", "entropy"):
        limit = getattr(guards, name).limit
        if limit is not None and not limit > 0:
            yield f"guards.{name}.limit={limit}: must be more than 0; null: not watched"
    if guards.no_variance.limit is not None and guards.no_variance.limit < 1:
        yield f"guards.no_variance.limit={guards.no_variance.limit}: must be at least 1"
    failures = guards.tool_failures
    if failures.limit is not None and not 0 < failures.limit <= 1:
        yield f"guards.tool_failures.limit={failures.limit}: a share: more than 0 and at most 1"
    if failures.calls < 1:
        yield f"guards.tool_failures.calls={failures.calls}: must be at least 1"
    for name in ("kl", "entropy"):
        guard = getattr(guards, name)
        if guard.limit is None and guard.action is OnTrip.stop:
            yield f"guards.{name}.action=stop: at what? add guards.{name}.limit=…"
    if guards.kl.limit is not None and not config.algorithm.beta:
        yield (
            f"guards.kl.limit={guards.kl.limit}: there is no KL with algorithm.beta=0; set beta, "
            "or leave the guard out"
        )


@dataclass
class WatchdogConfig:
    """Seconds that a phase may pass without any progress; None: as long as it likes.

    Progress is a completion asked for or had, a rollout that ended, a forward pass of the policy,
    and the beginning of the phase. A process that waits for another one is not judged: that one is,
    by its own watchdog. Time in which the whole process is stopped does not count.
    """

    load_s: float | None = 3600.0
    """Data, tools, weights and the engine, up to the first phase."""
    rollout_s: float | None = 3600.0
    """Rollouts and their rewards; of `agenttrain sft`: making rollouts of the rows."""
    train_s: float | None = 3600.0
    """Advantages and updates."""
    sync_s: float | None = 3600.0
    """The engine takes the new weights."""
    evaluation_s: float | None = 3600.0
    checkpoint_s: float | None = 3600.0
    heartbeat_s: float = 5.0
    """Seconds between two writings of <run>/heartbeat.json."""

    def deadline_of(self, phase: str | None) -> tuple[str, float | None]:
        """Return the setting that limits a phase, and its value; ``("", None)`` for others."""
        name = f"{'rollout' if phase == 'data' else phase}_s"
        return (name, getattr(self, name)) if hasattr(self, name) else ("", None)
