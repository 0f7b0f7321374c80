"""Rollouts that reward tests score: made by hand, nothing is sampled."""

from __future__ import annotations

import asyncio
from typing import Any

from agenttrain.rewards.rubric import Rubric
from agenttrain.types import (
    Completion,
    Finish,
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
)

QUESTION = {"role": "user", "content": "What is it?"}


def called(name: str, error: ToolError | None = None, **arguments: Any) -> ToolResult:
    """The outcome of one call."""
    call = ToolCall(id=f"c-{name}", name=name, arguments=arguments)
    return ToolResult(call=call, content="ok", error=error, seconds=0.5)


def made(
    text: str | None = "",
    *results: ToolResult,
    reasoning: str | None = None,
    sampled: int = 0,
    tool_tokens: int = 0,
    stop: StopReason = StopReason.completed,
    **columns: Any,
) -> Rollout:
    """A finished rollout: a prompt of two tokens, `sampled` tokens, `tool_tokens` of a reply."""
    task = Task(task_id="t", messages=(QUESTION,), columns=columns)
    rollout = Rollout(task=task, rollout_id="r", tool_results=list(results), stop_reason=stop)
    (trajectory,) = rollout.trajectories
    trajectory.messages, trajectory.prompt_messages = [QUESTION], 1
    if text is not None:
        message = {"role": "assistant", "content": text}
        trajectory.messages.append(
            message if reasoning is None else {**message, "reasoning_content": reasoning}
        )
    trajectory.append_context([5, 6], Origin.prompt)
    if sampled:
        completion = Completion(
            token_ids=(8,) * sampled,
            logprobs=(-0.5,) * sampled,
            finish=Finish.stop,
            versions=((0, sampled),),
        )
        trajectory.append_sampled(completion, [5, 6])
    trajectory.append_context([9] * tool_tokens, Origin.tool)
    return rollout


def reward(function: Any, rollout: Rollout) -> float | None:
    """What a rubric of this one function makes of the rollout."""
    asyncio.run(Rubric({"it": function}).score([rollout]))
    return rollout.reward
