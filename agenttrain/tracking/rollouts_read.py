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
)

Record = Mapping[str, Any]


def completions(record: Record, stop_token_ids: Collection[int] = ()) -> list[Completion]:
    """The sampled completions of a record, by turn.

    `stop_token_ids` tell how a turn ended where the record, of an earlier version, does not say.
    """
    sampled = [span for span in record["spans"] if span["origin"] == Origin.sampled]
    turns = [list(spans) for _, spans in groupby(sampled, key=lambda span: span["turn"])]
    return [_completion(record, spans, stop_token_ids, last=spans is turns[-1]) for spans in turns]


def _completion(
    record: Record, spans: Sequence[Record], stop_token_ids: Collection[int], *, last: bool
) -> Completion:
    start, end = spans[0]["start"], spans[-1]["end"]
    token_ids = tuple(record["token_ids"][start:end])
    finish = spans[-1].get("finish")
    if finish is None:
        aborted = last and record["stop_reason"] == StopReason.aborted
        cut = Finish.abort if aborted else Finish.length
        finish = Finish.stop if token_ids[-1] in stop_token_ids else cut
    return Completion(
        token_ids=token_ids,
        logprobs=tuple(_number(value) for value in record["logprobs"][start:end]),
        finish=Finish(finish),
        versions=tuple((span["policy_version"], span["end"] - span["start"]) for span in spans),
    )


def _number(value: float | None) -> float:
    """JSON has no NaN; null stands for it."""
    return math.nan if value is None else value


def _scores(record: Record, name: str) -> array[float] | None:
    """Records of rollouts that were not trained on, and those of earlier versions, have none."""
    values = record.get(name)
    return None if values is None else array("f", map(_number, values))


def prompt_messages(record: Record) -> list[Message]:
    """The messages before the first sampled one: the row's, and those that a reset gave."""
    turns = len({s["turn"] for s in record["spans"] if s["origin"] == Origin.sampled})
    messages: list[Message] = record["messages"]
    spoken = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: spoken[-turns]] if turns and len(spoken) >= turns else messages


def tool_results(record: Record) -> list[ToolResult]:
    """What each call of a record was answered, in their order."""
    added = record["messages"][len(prompt_messages(record)) :]
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
    rollout = Rollout(
        task=replace(task, messages=tuple(prompt_messages(record))),
        rollout_id=record["rollout_id"],
        group_id=record["group_id"],
        sample=_sample(record["rollout_id"]),
        messages=[dict(message) for message in record["messages"]],
        tool_results=tool_results(record),
        stop_reason=None if record["stop_reason"] is None else StopReason(record["stop_reason"]),
        error=record.get("error"),
        environment_reward=_environment_reward(record),
        rewards=dict(record["rewards"]),
        reward=record["reward"],
        advantage=record["advantage"],
        trainer_logprobs=_scores(record, "trainer_logprobs"),
        entropies=_scores(record, "entropies"),
    )
    said = iter(completions(record, stop_token_ids))
    for (origin, _), spans in groupby(record["spans"], key=_turn_of):
        if origin == Origin.sampled:
            rollout.append_sampled(next(said), rollout.token_ids)
            continue
        for span in spans:
            ids = record["token_ids"][span["start"] : span["end"]]
            rollout.append_context(ids, Origin(span["origin"]))
    return rollout


def _turn_of(span: Record) -> tuple[str, int]:
    return span["origin"], span["turn"]


def _sample(rollout_id: str) -> int:
    """The sample's number ends a rollout's id: `train-3-1-0` is sample 0 of group `train-3-1`."""
    number = rollout_id.rpartition("-")[2]
    return int(number) if number.isdecimal() else 0
