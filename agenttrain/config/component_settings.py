"""Settings of ours that stand beside a `_target_`: of tools, environments and rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Isolation(StrEnum):
    """Where the calls of a tool run."""

    thread = "thread"
    """In this process; a call that takes too long is left behind."""
    process = "process"
    """In worker processes of the tool's own; a call that takes too long is killed."""


@dataclass
class ToolLimits:
    """Limits of one tool; they stand beside its `_target_`."""

    timeout_s: float = 10.0
    """Seconds a call may take before the model reads a timeout error."""
    concurrency: int = 64
    """Calls of this tool at once, over all rollouts; isolation=process: at most as many workers."""
    max_calls: int | None = None
    """Calls of this tool in a rollout, one more is answered with an error; None: no limit."""
    max_result_tokens: int | None = None
    """Tokens of one of its results; None: rollout.max_result_tokens."""
    retries: int = 2
    """Times a call is made again after a fault of the infrastructure; then the rollout fails."""
    retry_on: list[str] = field(default_factory=list)
    """Errors that are such faults besides ToolUnavailable, e.g. [builtins.ConnectionError]."""
    retry_backoff_s: float = 0.5
    """Seconds before a call is made again, doubled each time."""
    isolation: Isolation = Isolation.thread


@dataclass
class ToolSettings(ToolLimits):
    """Settings of one tool, beside its `_target_`."""

    stop: bool = False
    """A call to it ends the rollout, as one to a tool that `stop_tools` names; where the section
    makes several tools, a call to any of them."""


@dataclass
class EnvironmentSettings(ToolLimits):
    """Settings of an environment, beside its `_target_`; the limits are those of its tools."""

    retries: int = 0
    """None: a method may have changed the state before it failed."""
    hook_timeout_s: float = 60.0
    """Seconds that constructing and resetting together may take; `user`, `reward`, `close` each."""
    pooled: bool | None = None
    """Instances are used again after a reset; None: as the class declares (`pooled`), or no."""


class OnUnavailable(StrEnum):
    """Consequence of a reward that could not be had (its judge is down, it took too long)."""

    stop = "stop"
    """Stop the run."""
    drop = "drop"
    """Leave the rollout out of its group, count it (`rollout/dropped`), go on."""


@dataclass
class RewardSettings:
    """Settings of one reward; they stand beside its `_target_`."""

    weight: float = 1.0
    """Factor in the rollout's reward, which is the sum; may be negative."""
    timeout_s: float | None = 300.0
    """Seconds that one call may take; None: no limit."""
    concurrency: int | None = None
    """Calls at once; None: one after the other for a sync function, all for an async one."""
    on_unavailable: OnUnavailable = OnUnavailable.stop
