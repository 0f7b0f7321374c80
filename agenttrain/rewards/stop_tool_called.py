"""`stop_tool_called`: the model ended the rollout itself, with a stop tool."""

from __future__ import annotations

from agenttrain.types import Rollout, StopReason


def stop_tool_called(rollout: Rollout) -> float:
    """1 if a called stop tool ended the rollout, else 0."""
    return float(rollout.stop_reason is StopReason.stop_tool)
