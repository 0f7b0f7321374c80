"""Settings of a saved run that may change. `--help` prints them, so nothing is imported."""

from __future__ import annotations

from collections.abc import Sequence

RESUMABLE = (
    *("steps", "eval", "checkpoint", "tracker", "engine", "guards", "distributed", "watchdog"),
    *("stop_when", "resume_changed", "servers", "roles", "cost"),
    "training.activation_checkpointing",
)
"""Sections, and keys of other sections, that a resumed run may change: the others decide the result
of its training. The models of roles do too; their weights are compared (`runs/fingerprints.py`)."""


def may_change(key: str, allowed: Sequence[str]) -> bool:
    """Return True if `allowed` has a key, or the section of that key."""
    return key in allowed or key.partition(".")[0] in allowed
