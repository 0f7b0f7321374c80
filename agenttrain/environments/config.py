"""Settings of an environment that stand beside its `_target_`."""

from __future__ import annotations

from dataclasses import dataclass

from agenttrain.tools.config import ToolLimits


@dataclass
class EnvironmentSettings(ToolLimits):
    """Settings of an environment, beside its `_target_`; the limits are those of its tools."""

    retries: int = 0
    """None: a method may have changed the state before it failed."""
    hook_timeout_s: float = 60.0
    """Seconds that constructing and resetting together may take; `user`, `reward`, `close` each."""
    pooled: bool | None = None
    """Instances are used again after a reset; None: as the class declares (`pooled`), or no."""
