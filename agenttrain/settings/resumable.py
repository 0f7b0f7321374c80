"""Sections of a saved run that may change. `--help` prints them, so nothing is imported."""

from __future__ import annotations

RESUMABLE = (
    *("steps", "eval", "checkpoint", "tracker", "engine", "guards", "distributed", "watchdog"),
    *("stop_when", "resume_changed", "servers", "roles", "cost"),
)
"""Sections that a resumed run may change: the others decide the result of its training. The models
of roles do too; their weights are compared (`runs/fingerprints.py`)."""
