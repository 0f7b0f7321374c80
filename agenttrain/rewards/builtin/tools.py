"""Rewards for the course of a rollout: its tool calls, its end, its environment, its length."""

from __future__ import annotations

from collections.abc import Sequence

from agenttrain.types import Rollout, StopReason, ToolResult
from agenttrain.utils.data_fields import Data


def tool_success(rollout: Rollout, *, only: Data[Sequence[str] | None] = None) -> float | None:
    """Return the share of calls without an error, or None (not applicable) if there are no calls.

    Malformed and unknown calls count as errors. With `only`, only calls of these tools count.
    Example: three calls, one of which timed out, give 2/3.
    """
    results = _select(rollout.tool_results, only)
    if not results:
        return None
    return sum(result.error is None for result in results) / len(results)


class ToolPenalty:
    """Minus `per_error` for each call with an error and `per_call` for each call over `free_calls`.

    The penalty is at most `at_most`. Example: ``ToolPenalty(per_call=0.1, free_calls=2)`` gives
    -0.1 to three calls without errors.
    """

    def __init__(
        self,
        *,
        per_error: Data[float] = 0.1,
        per_call: Data[float] = 0.0,
        free_calls: Data[int] = 0,
        at_most: Data[float] = 1.0,
        only: Data[Sequence[str] | None] = None,
    ) -> None:
        """Check the amounts of the penalty. `only` lists the tools whose calls count; None: all."""
        amounts = {"per_error": per_error, "per_call": per_call, "at_most": at_most}
        for name, value in {**amounts, "free_calls": free_calls}.items():
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value}: must be 0 or more; the reward is its negative")
        if per_error == per_call == 0:
            raise ValueError("per_error=0: the penalty would always be 0; set per_call=… or this")
        self._per_error, self._per_call = per_error, per_call
        self._free_calls, self._at_most, self._only = free_calls, at_most, only

    def __call__(self, rollout: Rollout) -> float:
        results = _select(rollout.tool_results, self._only)
        errors = sum(result.error is not None for result in results)
        over = max(len(results) - self._free_calls, 0)
        return -min(self._per_error * errors + self._per_call * over, self._at_most)


def _select(results: Sequence[ToolResult], only: Sequence[str] | None) -> list[ToolResult]:
    """Return the results of the tools `only`, or all for None."""
    return [result for result in results if only is None or result.call.name in only]


def stop_tool_called(rollout: Rollout) -> float:
    """Return 1 if a stop tool that ran without an error ended the rollout, else 0.

    A call that is malformed, does not fit the tool's schema, or makes the tool fail ends the
    rollout too and gets 0.
    """
    if rollout.stop_reason is not StopReason.stop_tool:
        return 0.0
    return float(any(result.stop and result.error is None for result in rollout.tool_results))


def environment(rollout: Rollout) -> float | None:
    """Return the value of the environment's `reward(rollout)`, or None if it has no such hook."""
    return rollout.environment_reward


def agent(rollout: Rollout) -> float | None:
    """Return the reward that an outside agent gave, or None if it gave none."""
    return rollout.environment_reward


def turn_rewards(rollout: Rollout) -> list[float]:
    """Return each turn's `TurnReward` of tools and environment, 0 for a turn without one."""
    return [
        trajectory.turn_rewards.get(turn, 0.0)
        for trajectory in rollout.trajectories
        for turn in range(trajectory.turns)
    ]


class LengthPenalty:
    """0 up to `free_tokens` sampled tokens, then linearly down to -1 at `full_tokens`.

    Tool results and template glue are not counted. With ``free_tokens`` at 80 % of the limit it is
    DAPO's soft overlong punishment (https://arxiv.org/abs/2503.14476, equation 13). Example:
    ``LengthPenalty(full_tokens=100, free_tokens=60)`` gives -0.25 to 70 sampled tokens.
    """

    def __init__(self, *, full_tokens: Data[int], free_tokens: Data[int] = 0) -> None:
        if not 0 <= free_tokens < full_tokens:
            raise ValueError(
                f"free_tokens={free_tokens}: must be 0 or more, and below full_tokens={full_tokens}"
            )
        self._free, self._full = free_tokens, full_tokens

    def __call__(self, rollout: Rollout) -> float:
        over = max(rollout.sampled_length - self._free, 0)
        return -min(over / (self._full - self._free), 1.0)
