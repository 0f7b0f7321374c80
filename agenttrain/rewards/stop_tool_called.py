"""`stop_tool_called`: the model ended the rollout itself, with a stop tool."""

from __future__ import annotations

from agenttrain.types import Rollout, StopReason


def stop_tool_called(rollout: Rollout) -> float:
    """Return 1 if a stop tool that ran without an error ended the rollout, else 0.

    A call that cannot be parsed, does not fit the tool's schema, or makes the tool fail ends the
    rollout too, and earns nothing.
    """
    if rollout.stop_reason is not StopReason.stop_tool:
        return 0.0
    # Files of earlier versions do not mark calls to stop tools; the last call was one.
    calls = [result for result in rollout.tool_results if result.stop] or rollout.tool_results[-1:]
    return float(not calls or any(result.error is None for result in calls))
