"""rollouts/step-000001.jsonl: one object per rollout, everything that the loss saw.

The keys are `task_id, group_id, rollout_id, stop_reason, tool_calls, rewards, reward, columns,
trajectories`, and where there is one `error` and `environment_reward`. Those of a trajectory are
`role, parent, messages, token_ids, spans, logprobs`; `trainer_logprobs` and `entropies` stand where
the trainer computed them: it skips rollouts that have no gradient, as all of a group whose rewards
are equal.

`read_rollout` makes a Rollout of an object again, `completions` and `tool_results` what the engine
and the tools had said.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from agenttrain.tracking.run_folder import write_atomically
from agenttrain.types import (
    MAIN,
    Completion,
    Finish,
    Message,
    Origin,
    Rollout,
    Span,
    StopReason,
    Task,
    ToolCall,
    ToolError,
    ToolResult,
    Trajectory,
)
from agenttrain.utils.json_lines import dumps, read_rows

OF_A_TRAJECTORY = ("messages", "token_ids", "spans", "logprobs", "trainer_logprobs", "entropies")
"""Keys that stood in the rollout itself in files of the first edition."""


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as a JSON object.

    The `spans` of a trajectory cover its `token_ids` [T] exactly: each starts where the one before
    ends. `logprobs` [T] is 0.0 where a token was not sampled; `trainer_logprobs` [S] and
    `entropies` [S] are of the sampled tokens alone, to 6 decimals. Example of a span: ``{"origin":
    "sampled", "start": 3, "end": 5, "turn": 0, "policy_version": 7, "advantage": 0.5, "finish":
    "stop"}``; `advantage` is null where nothing was sampled or no reward applies, `finish` stands
    on the last sampled span of a turn only.

    `columns` are the task's; a value that JSON does not have stands there as its text.

    A tool call has its reply's text as `content` only where the messages do not hold it as it was:
    it was clipped, or the rollout ended before it. `done` says that it ended the episode, `stop`
    that it was a call to a stop tool.
    """
    shown = replies([m for trajectory in rollout.trajectories for m in trajectory.added_messages])
    record: dict[str, Any] = {
        "task_id": rollout.task.task_id,
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "stop_reason": rollout.stop_reason,
        "tool_calls": [_tool_call(result, shown) for result in rollout.tool_results],
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "columns": _plain(rollout.task.columns),
        "trajectories": [_trajectory_record(t, rollout.advantage) for t in rollout.trajectories],
    }
    if rollout.environment_reward is not None:
        record["environment_reward"] = rollout.environment_reward
    if rollout.error is not None:
        record["error"] = rollout.error
    return record


def _trajectory_record(trajectory: Trajectory, advantage: float | None) -> dict[str, Any]:
    record = {
        "role": trajectory.role,
        "parent": trajectory.parent,
        "messages": trajectory.messages,
        "token_ids": list(trajectory.token_ids),
        "spans": _spans(trajectory.spans, advantage),
        "logprobs": trajectory.rollout_logprobs,
    }
    if trajectory.trainer_logprobs is not None and trajectory.entropies is not None:
        record["trainer_logprobs"] = _rounded(trajectory.trainer_logprobs)
        record["entropies"] = _rounded(trajectory.entropies)
    return record


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)


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


def _spans(spans: Sequence[Span], advantage: float | None) -> list[dict[str, Any]]:
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
            "advantage": advantage if span.origin is Origin.sampled else None,
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


def rollout_limit(setting: str) -> int | None:
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
    """Return the records of a step, those of older files as today's.

    Raises FileNotFoundError when none were written.
    """
    return map(_as_today, read_rows(step_path(run_folder, step)))


def _as_today(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of the first edition, whose rollouts were one trajectory, as one of today.

    Its `columns` are null: they were not written.
    """
    if "trajectories" in record:
        return record
    advantage = record.pop("advantage")
    for span in record["spans"]:
        span["advantage"] = advantage if span["origin"] == Origin.sampled else None
    names = [name for name in OF_A_TRAJECTORY if name in record]
    trajectory = {"role": MAIN, "parent": None, **{name: record.pop(name) for name in names}}
    return {**record, "columns": None, "trajectories": [trajectory]}


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
    """Return the results of a record's calls, in their order."""
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
