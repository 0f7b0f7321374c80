"""rollouts/step-000001.jsonl: one object per rollout, everything that the loss saw.

The keys are `task_id, group_id, rollout_id, messages, token_ids, spans, logprobs, stop_reason,
tool_calls, rewards, reward, advantage`, and where there is one `error` and `environment_reward`.
`trainer_logprobs` and `entropies` stand where the trainer computed them: it skips rollouts that
have no gradient, as all of a group whose rewards are equal. `rollouts_read.py` makes Rollouts of
them again.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agenttrain.tracking.json_lines import dumps, read_rows
from agenttrain.tracking.run_folder import write_atomically
from agenttrain.types import Message, Rollout, Span, ToolResult


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """A rollout as a JSON object.

    `spans` cover `token_ids` [T] exactly: each starts where the one before ends. `logprobs` [T] is
    0.0 where a token was not sampled; `trainer_logprobs` [S] and `entropies` [S] are of the sampled
    tokens alone, to 6 decimals. Example of a span: ``{"origin": "sampled", "start": 3,
    "end": 5, "turn": 0, "policy_version": 7, "finish": "stop"}``; `finish` stands on the last
    sampled span of a turn only.

    A tool call has its reply's text as `content` only where the messages do not hold it as it was:
    it was clipped, or the rollout ended before it. `done` says that it ended the episode, `stop`
    that it was a call to a stop tool.
    """
    shown = replies(rollout.messages[len(rollout.task.messages) :])
    record = {
        "task_id": rollout.task.task_id,
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "messages": rollout.messages,
        "token_ids": list(rollout.token_ids),
        "spans": _spans(rollout.spans),
        "logprobs": rollout.rollout_logprobs,
        "stop_reason": rollout.stop_reason,
        "tool_calls": [_tool_call(result, shown) for result in rollout.tool_results],
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "advantage": rollout.advantage,
    }
    if rollout.trainer_logprobs is not None and rollout.entropies is not None:
        record["trainer_logprobs"] = _rounded(rollout.trainer_logprobs)
        record["entropies"] = _rounded(rollout.entropies)
    if rollout.environment_reward is not None:
        record["environment_reward"] = rollout.environment_reward
    if rollout.error is not None:
        record["error"] = rollout.error
    return record


def _rounded(values: array[float]) -> list[float]:
    """The values without the digits that single precision does not have."""
    rounded: list[float] = np.asarray(values, dtype=np.float64).round(6).tolist()
    return rounded


def replies(messages: Sequence[Message]) -> dict[str, list[str]]:
    """The texts of the replies in messages by the id of their call, which turns may repeat."""
    found: dict[str, list[str]] = {}
    for message in messages:
        if "tool_call_id" in message:
            found.setdefault(message["tool_call_id"], []).append(message["content"])
    return found


def _spans(spans: Sequence[Span]) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    start = 0
    for span in spans:
        end = start + len(span.token_ids)
        record = {
            "origin": span.origin,
            "start": start,
            "end": end,
            "turn": span.turn,
            "policy_version": span.policy_version,
        }
        if span.finish is not None:
            record["finish"] = span.finish
        records.append(record)
        start = end
    return records


def _tool_call(result: ToolResult, shown: Mapping[str, list[str]]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "id": result.call.id,
        "name": result.call.name,
        "arguments": result.call.arguments,
        "error": result.error,
        "seconds": result.seconds,
    }
    texts = shown.get(result.call.id)
    if not texts or texts.pop(0) != result.content:
        record["content"] = result.content
    if result.done:
        record["done"] = True
    if result.stop:
        record["stop"] = True
    return record


def limit(setting: str) -> int | None:
    """How many rollouts of a step `tracker.rollouts` asks for; None: all of them.

    Raises ValueError unless it is `all`, `none` or a number.
    """
    if setting == "all":
        return None
    if setting == "none":
        return 0
    if setting.isdecimal():
        return int(setting)
    raise ValueError(f"tracker.rollouts={setting!r}: give `all`, `none` or a number like 8")


def in_order(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """By group, in the order in which the groups first appear, then by sample."""
    first: dict[str, int] = {}
    for rollout in rollouts:
        first.setdefault(rollout.group_id, len(first))
    return sorted(rollouts, key=lambda rollout: (first[rollout.group_id], rollout.sample))


def step_path(run_folder: Path, step: int) -> Path:
    """Where a step's rollouts lie: ``<run>/rollouts/step-000001.jsonl``."""
    return run_folder / "rollouts" / f"step-{step:06d}.jsonl"


def write_step(
    run_folder: Path, step: int, rollouts: Sequence[Rollout], most: int | None = None
) -> None:
    """Write the first `most` rollouts (None: all) of a step in one go; none: no file."""
    chosen = in_order(rollouts)[:most]
    if chosen:
        lines = [dumps(rollout_record(rollout)) + "\n" for rollout in chosen]
        path = step_path(run_folder, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(lines))


def read_step(run_folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """The records of a step; raises FileNotFoundError when none were written."""
    return read_rows(step_path(run_folder, step))
