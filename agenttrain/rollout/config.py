"""Settings of rollouts and of evaluation, and the number of tasks of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class OnBreak(StrEnum):
    """Consequence of a broken ledger invariant."""

    error = "error"
    """Stop the run."""
    drop = "drop"
    """Drop the rollout's group, count it (`rollout/dropped`), go on."""


class OnMalformedCall(StrEnum):
    """Consequence of a call that cannot be parsed."""

    reply = "reply"
    """The model reads what was wrong."""
    stop = "stop"
    """The rollout ends (`max_invalid_calls`)."""
    ignore = "ignore"
    """The call counts as not written."""


class OnParallelCalls(StrEnum):
    """Consequence of several calls in a turn where the chat template renders only one."""

    error_reply = "error_reply"
    """The first is run; the reply to it says so of the others."""
    stop = "stop"
    """The rollout ends (`max_tool_calls`)."""


class OnToolFailure(StrEnum):
    """Consequence of a fault of a tool's infrastructure, once it has been retried in vain."""

    drop = "drop"
    """The rollout ends as `error`, is not scored and counted (`rollout/dropped`)."""
    error = "error"
    """Stop the run."""


@dataclass
class RolloutConfig:
    """Limits and behaviour of a rollout."""

    max_turns: int = 8
    """Sampled completions."""
    max_turn_tokens: int = 512
    """Sampled tokens of one turn."""
    max_completion_tokens: int = 2048
    """Sampled and tool tokens after the prompt."""
    max_result_tokens: int = 512
    """Tokens of one tool result; a longer one is clipped with a visible marker."""
    max_tool_calls: int | None = None
    """Calls of a rollout; None: no limit."""
    max_invalid_calls: int | None = None
    """Malformed, unknown or badly typed calls of a rollout; None: no limit."""
    max_repeated_calls: int | None = None
    """Times in a row the same call with the same arguments may be made; None: no limit."""
    timeout_s: float | None = None
    """Wall-clock seconds of one rollout; None: no limit."""
    max_stuck_calls: int = 32
    """Calls of blocking tools that still run past their time limit; more stop the run."""
    max_loop_lag_s: float = 1.0
    """Seconds the event loop may stand still before a warning names the tool that holds it."""
    concurrency: int = 512
    """Rollouts in flight; no effect with engine=transformers and rollout.deterministic."""
    deterministic: bool | None = None
    """The same batch at every decode step, so that a run repeats; None: where the engine can
    (transformers)."""
    temperature: float = 1.0
    structured_calls: bool = False
    """A call that the model opens can only become one that fits its tool's schema: a grammar rules
    the other tokens out. Needs engine=vllm, and for training algorithm.correction."""
    on_break: OnBreak = OnBreak.error
    on_tool_failure: OnToolFailure = OnToolFailure.drop
    on_malformed_call: OnMalformedCall = OnMalformedCall.reply
    on_parallel_calls: OnParallelCalls = OnParallelCalls.error_reply
    """Only where the chat template renders one call per turn (`agenttrain templates` says so)."""


@dataclass
class EvalConfig:
    """Evaluation on the test rows."""

    every: int | None = None
    """Steps between evaluations while training; None: before and after only."""
    questions: int = 200
    """Rows of one evaluation; 0: no evaluation."""
    samples: int = 1
    """Sampled rollouts per row (k of pass@k)."""
    greedy: bool = True
    """Also evaluate at temperature 0."""
    group_by: str | None = None
    """Column by whose values the reward is broken down, e.g. `family`."""
    tools: list[str] | None = None
    """Those of the run's tools that evaluated rollouts have, e.g. [search]; None: all."""
    max_turns: int | None = None
    """None: as rollout.max_turns; the two below likewise."""
    max_turn_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0


def tasks_of_round(missing: int, oversample: float) -> int:
    """Return the number of tasks that are sampled for `missing` groups.

    Example: 10 missing groups and oversample 1.1 take 11 tasks.
    """
    # 10 * 1.1 is a little above 11 in floats.
    return math.ceil(round(missing * oversample, 6))
