"""A rollout as plain data: what `jmespath` expressions and judges see."""

from __future__ import annotations

from typing import Any

from agenttrain.rewards.answer import final_text
from agenttrain.types import Rollout


def rollout_view(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON-like data, its messages being those of its last trajectory.

    Example::

        {"task_id": "shop-17", "rollout_id": "train-3-0-1", "row": {"answer": "Oslo"},
         "messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}, …],
         "completion": [{"role": "assistant", …}, …],     # the messages after the prompt's
         "final": "It is Oslo.",                          # text of the last assistant message
         "tool_calls": [{"id": "c0", "name": "sql", "arguments": {"query": "…"},
                         "content": "Oslo", "error": None, "seconds": 0.01}],
         "stop_reason": "completed", "truncated": False, "turns": 2,
         "prompt_tokens": 61, "sampled_tokens": 43, "tokens": 127}

    `error` is None or a name of `ToolError`; a malformed call stands among the others, with the
    name "" when it has none.
    """
    first, last = rollout.trajectories[0], rollout.trajectories[-1]
    return {
        "task_id": rollout.task.task_id,
        "rollout_id": rollout.rollout_id,
        "row": dict(rollout.task.columns),
        "messages": last.messages,
        "completion": last.added_messages,
        "final": final_text(rollout),
        "tool_calls": [
            {
                "id": result.call.id,
                "name": result.call.name,
                "arguments": result.call.arguments,
                "content": result.content,
                "error": None if result.error is None else result.error.value,
                "seconds": result.seconds,
            }
            for result in rollout.tool_results
        ],
        "stop_reason": None if rollout.stop_reason is None else rollout.stop_reason.value,
        "truncated": rollout.truncated,
        "turns": rollout.turns,
        "prompt_tokens": first.prompt_length,
        "sampled_tokens": rollout.sampled_length,
        "tokens": rollout.length,
    }
