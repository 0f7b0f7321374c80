"""Every setting of agenttrain, typed. Hydra checks names and types, `validate.py` combinations.

Sections become constructor arguments of the components that they configure: a component gets its
own section and never the whole. OmegaConf takes enum members by name, so names equal values.
"""

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
