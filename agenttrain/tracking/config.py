"""Settings of the tracker: the dashboard, the rollouts on disk, the console."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TrackerConfig:
    """Where metrics go besides metrics.jsonl."""

    name: str = "trackio"
    """`trackio` (local dashboard) or `none`."""
    rollouts: str = "all"
    """Rollouts written per step: all, none, or a number."""
    console: bool = True
    """Live progress in the terminal."""
