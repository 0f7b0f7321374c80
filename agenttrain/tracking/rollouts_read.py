"""Objects of a rollouts file -> Rollouts, and what the engine and the tools had said."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from agenttrain.tracking.rollouts_file import replies
from agenttrain.types import (
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    StopReason,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
)

Record = Mapping[str, Any]


def completions(record: Record, stop_token_ids: Collection[int] = ()) -> list[Completion]:
    """The sampled completions of a record, by trajectory and turn.

    `stop_token_ids` tell how a turn ended where the record, of an earlier version, does not say.
    """
    aborted = record["stop_reason"] == StopReason.aborted
    return [
        completion
        for trajectory in record["trajectories"]
        for completion in _completions(trajectory, stop_token_ids, aborted=aborted)
    ]


def _completions(
    trajectory: Record, stop_token_ids: Collection[int], *, aborted: bool
) -> list[Completion]:
    turns = [list(spans) for _, spans in groupby(_sampled(trajectory), key=lambda s: s["turn"])]
    return [
        _completion(trajectory, spans, stop_token_ids, aborted=aborted and spans is turns[-1])
        for spans in turns
    ]


def _sampled(trajectory: Record) -> list[Record]:
    return [span for span in trajectory["spans"] if span["origin"] == Origin.sampled]


def _completion(
    trajectory: Record, spans: Sequence[Record], stop_token_ids: Collection[int], *, aborted: bool
) -> Completion:
    start, end = spans[0]["start"], spans[-1]["end"]
    token_ids = tuple(trajectory["token_ids"][start:end])
    finish = spans[-1].get("finish")
    if finish is None:
        cut = Finish.abort if aborted else Finish.length
        finish = Finish.stop if token_ids[-1] in stop_token_ids else cut
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(_number(value) for value in trajectory["logprobs"][start:end]),
        finish=Finish(finish),
        versions=tuple((span["policy_version"], span["end"] - span["start"]) for span in spans),
    )


def _number(value: float | None) -> float:
    """JSON has no NaN; null stands for it."""
    return math.nan if value is None else value


def _scores(trajectory: Record, name: str) -> array[float] | None:
    """Return None for rollouts that were not trained on, and those of earlier versions."""
    values = trajectory.get(name)
    return None if values is None else array("f", map(_number, values))


def prompt_messages(trajectory: Record) -> list[Message]:
    """The messages before the first sampled one: the row's, and those that a reset gave."""
    turns = len({span["turn"] for span in _sampled(trajectory)})
    messages: list[Message] = trajectory["messages"]
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: spoken[-turns]] if turns and len(spoken) >= turns else messages


def tool_results(record: Record) -> list[ToolResult]:
    """What each call of a record was answered, in their order."""
    added = [m for t in record["trajectories"] for m in t["messages"][len(prompt_messages(t)) :]]
    shown, written = replies(added), _written(added)
    results = []
    for made in record["tool_calls"]:
        text = (shown.get(made["id"]) or [""]).pop(0)
        results.append(
            ToolResult(
                call=_call(made, (written.get(made["id"]) or [{}]).pop(0)),
                content=made.get("content", text),
                error=None if made["error"] is None else ToolError(made["error"]),
                seconds=made["seconds"],
                done=made.get("done", False),
                stop=made.get("stop", False),
            )
        )
    return results


def _written(messages: Sequence[Message]) -> dict[str, list[Mapping[str, Any]]]:
    """The `function` of every call in the messages, by the call's id, which turns may repeat."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for message in messages:
        for call in message.get("tool_calls", ()):
            found.setdefault(call["id"], []).append(call["function"])
    return found


def _call(made: Record, written: Mapping[str, Any]) -> ToolCall:
    return ToolCall(
        id=made["id"],
        name=made["name"],
        arguments=made["arguments"],
        malformed=written.get("malformed"),
        text=written.get("text", ""),
    )


def _environment_reward(record: Record) -> float | None:
    """Without an environment's reward nothing stands there; null is NaN, which JSON has not."""
    if "environment_reward" not in record:
        return None
    value: float | None = record["environment_reward"]
    return math.nan if value is None else value


def read_rollout(record: Record, task: Task, stop_token_ids: Collection[int] = ()) -> Rollout:
    """The rollout of a record; its task is not in the file.

    Unknown are `seconds` of the whole, and the text of a call that was parsed.
    """
    prompt = prompt_messages(record["trajectories"][0])
    return Rollout(
        task=replace(task, messages=tuple(prompt)),
        rollout_id=record["rollout_id"],
        group_id=record["group_id"],
        sample=_sample(record["rollout_id"]),
        trajectories=[
            _trajectory(record, index, stop_token_ids)
            for index in range(len(record["trajectories"]))
        ],
        tool_results=tool_results(record),
        stop_reason=None if record["stop_reason"] is None else StopReason(record["stop_reason"]),
        error=record.get("error"),
        environment_reward=_environment_reward(record),
        rewards=dict(record["rewards"]),
        reward=record["reward"],
        advantage=next((s["advantage"] for t in record["trajectories"] for s in _sampled(t)), None),
    )


def _trajectory(record: Record, index: int, stop_token_ids: Collection[int]) -> Trajectory:
    written = record["trajectories"][index]
    trajectory = Trajectory(
        rollout_id=record["rollout_id"],
        index=index,
        role=written["role"],
        messages=[dict(message) for message in written["messages"]],
        prompt_messages=len(prompt_messages(written)),
        trainer_logprobs=_scores(written, "trainer_logprobs"),
        entropies=_scores(written, "entropies"),
    )
    aborted = record["stop_reason"] == StopReason.aborted
    sampled = iter(_completions(written, stop_token_ids, aborted=aborted))
    for (origin, _), spans in groupby(written["spans"], key=_turn_of):
        if origin == Origin.sampled:
            trajectory.append_sampled(next(sampled), trajectory.token_ids)
            continue
        for span in spans:
            ids = written["token_ids"][span["start"] : span["end"]]
            trajectory.append_context(ids, Origin(span["origin"]))
    return trajectory


def _turn_of(span: Record) -> tuple[str, int]:
    return span["origin"], span["turn"]


def _sample(rollout_id: str) -> int:
    """The sample's number ends a rollout's id: `train-3-1-0` is sample 0 of group `train-3-1`."""
    number = rollout_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
