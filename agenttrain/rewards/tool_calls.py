"""`tool_success` and `tool_penalty`: how well a rollout called its tools."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.types import Rollout, ToolResult


def tool_success(rollout: Rollout, *, only: Sequence[str] | None = None) -> float | None:
    """Return the share of calls without an error; None (not applicable) without calls.

    Malformed and unknown calls count as errors; `only` counts calls of these tools alone. Example:
    three calls of which one timed out give 2/3.
    """
    results = _of(rollout, only)
    if not results:
        return None
    return sum(result.error is None for result in results) / len(results)


class ToolPenalty:
    """Minus `per_error` for each call with an error and `per_call` for each call over `free_calls`.

    At least ``-at_most``. Example: ``ToolPenalty(per_call=0.1, free_calls=2)`` gives -0.1 to three
    calls without errors.
    """

    def __init__(
        self,
        *,
        per_error: float = 0.1,
        per_call: float = 0.0,
        free_calls: int = 0,
        at_most: float = 1.0,
        only: Sequence[str] | None = None,
    ) -> None:
        amounts = {"per_error": per_error, "per_call": per_call, "at_most": at_most}
        for name, value in {**amounts, "free_calls": free_calls}.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be 0 or more; the reward is its negative")
        if per_error == per_call == 0:
            raise ValueError("per_error=0: the penalty would always be 0; set per_call=… or this")
        self._per_error, self._per_call = per_error, per_call
        self._free_calls, self._at_most, self._only = free_calls, at_most, only

    def __call__(self, rollout: Rollout) -> float:
        results = _of(rollout, self._only)
        errors = sum(result.error is not None for result in results)
        over = max(len(results) - self._free_calls, 0)
        return -min(self._per_error * errors + self._per_call * over, self._at_most)


def _of(rollout: Rollout, only: Sequence[str] | None) -> list[ToolResult]:
    return [r for r in rollout.tool_results if only is None or r.call.name in only]
