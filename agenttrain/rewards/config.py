"""The settings of a reward that stand beside its `_target_`, read from plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import isfinite
from typing import Any

from agenttrain.utils.names import did_you_mean


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


def reward_settings(key: str, section: Mapping[str, Any]) -> RewardSettings:
    """Read the settings of the section at `key`; raises ValueError with the first that is wrong."""
    for problem in reward_setting_problems(key, section):
        raise ValueError(problem)
    defaults = RewardSettings()
    weight, timeout_s = section.get("weight", defaults.weight), section.get("timeout_s")
    return RewardSettings(
        weight=float(weight),
        timeout_s=defaults.timeout_s if "timeout_s" not in section else timeout_s,
        concurrency=section.get("concurrency"),
        on_unavailable=OnUnavailable(section.get("on_unavailable", defaults.on_unavailable)),
    )


def reward_setting_problems(key: str, section: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the settings beside the `_target_` at `key`."""
    weight = section.get("weight", 1.0)
    if not _is_number(weight):
        yield f"{key}.weight={weight!r}: must be a finite number"
    timeout_s = section.get("timeout_s")
    if timeout_s is not None and not (_is_number(timeout_s) and timeout_s > 0):
        yield f"{key}.timeout_s={timeout_s}: must be a number above 0, or null for no limit"
    at_once = section.get("concurrency")
    if at_once is not None and not (
        _is_number(at_once) and isinstance(at_once, int) and at_once > 0
    ):
        yield f"{key}.concurrency={at_once}: must be a whole number of at least 1, or null"
    policy, known = section.get("on_unavailable", "stop"), [str(member) for member in OnUnavailable]
    if policy not in known:
        hint = did_you_mean(str(policy), known)
        yield f"{key}.on_unavailable={policy}: expected one of: {', '.join(known)}{hint}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
