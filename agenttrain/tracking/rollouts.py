"""rollouts/step-000001.jsonl: one object per rollout, with everything that the loss uses.

The keys are `task_id, group_id, rollout_id, stop_reason, tool_calls, rewards, reward, columns,
trajectories`, and `error`, `untrained` (conversations of an outside agent that are not trained:
`model, frozen, turns, sampled_length, messages`), `environment_reward`, `turn_scores`, `staleness`
(updates between the oldest weights that sampled it and those that it trains), the row's own `tools`
and its `source` in a mixture if there are any. A trajectory has the keys `role, parent, messages,
token_ids, spans, logprobs`; `number`, `turn_rewards` and `states` if there are any; and
`trainer_logprobs` and `entropies` if the trainer computed them. It does not for rollouts without a
gradient, such as those of a group whose rewards are equal. A record may have its lists per token in
a file beside it (`record_arrays.py`); `read_step` yields them in their places.

`read_rollout` makes a Rollout of an object; `completions` and `tool_results` give the outputs of
the engine and the tools.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from agenttrain.tracking.pictures import placed_images, recorded_messages, shown_text, write_images
from agenttrain.tracking.record_arrays import (
    ARRAYS,
    MOST_TOKENS,
    ArrayReader,
    remove_former_arrays,
    take_arrays,
    write_arrays,
)
from agenttrain.types import (
    Completion,
    ConfigError,
    Delegation,
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
    UntrainedConversation,
)
from agenttrain.utils.content import images_in, parts
from agenttrain.utils.files import write_atomically
from agenttrain.utils.json_lines import dumps, read_rows
from agenttrain.utils.turns import turns_in_time

Record = Mapping[str, Any]


def rollout_record(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as a JSON object, with the keys that the module's docstring lists.

    `columns` are the task's. A value of a type that JSON does not have becomes a text.
    """
    exchanges = exchanges_of([trajectory.added_messages for trajectory in rollout.trajectories])
    record: dict[str, Any] = {
        **({"source": rollout.task.source} if rollout.task.source else {}),
        "task_id": rollout.task.task_id,
        "group_id": rollout.group_id,
        "rollout_id": rollout.rollout_id,
        "stop_reason": rollout.stop_reason,
        "tool_calls": [_tool_call(result, exchanges) for result in rollout.tool_results],
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "columns": _plain(rollout.task.columns),
        "trajectories": [_trajectory_record(trajectory) for trajectory in rollout.trajectories],
    }
    if rollout.task.tools is not None:
        record["tools"] = [
            tool if isinstance(tool, str) else _plain(asdict(tool)) for tool in rollout.task.tools
        ]
    if rollout.turn_scores:  # reward function -> its values by turn
        record["turn_scores"] = rollout.turn_scores
    if rollout.grades:  # results of the task's own tests
        record["grades"] = rollout.grades
    if rollout.environment_reward is not None:
        record["environment_reward"] = rollout.environment_reward
    if rollout.counts:  # events in an outside agent
        record["counts"] = rollout.counts
    if rollout.untrained:  # an outside agent's conversations that are no part of the rollout
        record["untrained"] = [
            {**asdict(conversation), "messages": recorded_messages(conversation.messages)}
            for conversation in rollout.untrained
        ]
    if rollout.error is not None:
        record["error"] = rollout.error
    return record


def _trajectory_record(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as a JSON object.

    O are its own tokens, S the sampled ones of these. Its `spans` cover its `token_ids` [O]
    exactly, one after the other. A trajectory with a `parent` (index, position) begins with the
    first `position` tokens of that trajectory, which are not repeated. `logprobs` [O] is 0.0 at
    tokens that were not sampled; `trainer_logprobs` [S] and `entropies` [S] are those of the
    sampled tokens, to 6 decimals.

    Trajectories of a sub-agent have a `delegation`, e.g. ``{"caller": [0, 1], "call_id":
    "call_1_0", "schemas": [], "max_turns": 4, "max_tokens": 512}``.
    """
    written: dict[str, Any] = {
        "role": trajectory.role,
        "parent": trajectory.parent,
        "messages": recorded_messages(trajectory.messages),
        "token_ids": list(trajectory.own_ids),
        "spans": _span_records(trajectory),
        "logprobs": trajectory.rollout_logprobs,
    }
    if trajectory.number is not None:  # its index before other trajectories were removed
        written["number"] = trajectory.number
    if trajectory.delegation is not None:
        written["delegation"] = asdict(trajectory.delegation)
    if trajectory.schemas is not None:
        written["schemas"] = trajectory.schemas
    if trajectory.turn_rewards:
        written["turn_rewards"] = {str(t): v for t, v in trajectory.turn_rewards.items()}
    if trajectory.states:  # digests of the environment's state before each turn
        written["states"] = trajectory.states
    if trajectory.trainer_logprobs is not None and trajectory.entropies is not None:
        for name in ("trainer_logprobs", "entropies"):
            # Drop the digits that single precision does not have.
            scores = np.asarray(getattr(trajectory, name), dtype=np.float64)
            written[name] = scores.round(6).tolist()
    return written


def _plain(value: Any) -> Any:
    """Return a value as JSON data; one of another type becomes a text."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)


@dataclass(slots=True, kw_only=True)
class Exchange:
    """A call in a message of the assistant, and its reply in the same conversation."""

    function: Mapping[str, Any] = field(default_factory=dict)
    """Name, arguments and, of a malformed call, its fault and text."""
    text: str | None = None
    """Text of the reply; None: there is no reply."""
    parts: tuple[Any, ...] = ()
    """Parts of a reply with images."""


def exchanges_of(conversations: Iterable[Sequence[Message]]) -> dict[str, list[Exchange]]:
    """Map each call id to its exchanges, a call with its reply. Several calls may have one id.

    A call whose reply is in a later conversation (its context was rewritten in between) has two
    exchanges: one without a reply, and one without the call's function.
    """
    exchanges: dict[str, list[Exchange]] = defaultdict(list)
    for messages in conversations:
        last: dict[str, Exchange] = {}  # call id -> its last exchange in this conversation
        for message in messages:
            for call in message.get("tool_calls", ()):
                last[call["id"]] = Exchange(function=call["function"])
                exchanges[call["id"]].append(last[call["id"]])
            if "tool_call_id" not in message:
                continue
            call_id, content = message["tool_call_id"], message["content"]
            if call_id not in last:  # the call is in an earlier conversation
                last[call_id] = Exchange()
                exchanges[call_id].append(last[call_id])
            last[call_id].text = content if isinstance(content, str) else shown_text(content)
            if any(images_in([message])):
                last[call_id].parts = tuple(parts(content))
    return exchanges


def _fitting(exchanges: Mapping[str, list[Exchange]], call: ToolCall) -> list[Exchange]:
    """Return the exchanges that may be a call's: those with its id, name and arguments."""
    same_id = exchanges.get(call.id, [])
    name_and_arguments = (call.name, call.arguments)
    same_call = [
        e
        for e in same_id
        if (e.function.get("name"), e.function.get("arguments")) == name_and_arguments
    ]
    # If the call is in the messages of an earlier trajectory, and its reply is in a later one, the
    # exchange of the later one has no function, and fits by its id alone.
    return same_call or list(same_id)


def _take(exchanges: Mapping[str, list[Exchange]], call: ToolCall, content: str | None) -> Exchange:
    """Remove the exchange of a call and return it; an empty one if none fits.

    The first fitting one whose text is `content` is taken; if there is none, or `content` is None,
    the first fitting one.
    """
    fitting = _fitting(exchanges, call)
    if not fitting:
        return Exchange()
    same_text = (e for e in fitting if content is not None and e.text == content)
    taken = next(same_text, fitting[0])
    # In place: changes `exchanges`.
    exchanges[call.id][:] = [e for e in exchanges[call.id] if e is not taken]
    return taken


def _span_records(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the spans of a trajectory as JSON objects.

    Example: ``{"origin": "sampled", "start": 3, "end": 5, "turn": 0, "policy_version": 7,
    "advantage": 0.5, "finish": "stop"}``. `advantage` is null for other origins or without a
    reward, and a list where the tokens of a span differ (`algorithm.teacher`). Only the last
    sampled span of a turn has `finish`.
    """
    records: list[dict[str, Any]] = []
    start = sampled = 0  # tokens, and sampled tokens, of the spans before
    for span in trajectory.spans:
        end = start + len(span.token_ids)
        advantage: float | list[float] | None = None
        if span.origin is Origin.sampled:
            if trajectory.advantages is not None:
                values = trajectory.advantages[sampled : sampled + len(span.token_ids)].tolist()
                # One number if all tokens have the same; by `repr`, as NaN does not equal NaN.
                advantage = values if len(set(map(repr, values))) > 1 else values[0]
            sampled += len(span.token_ids)
        record = {
            "origin": span.origin,
            "start": start,
            "end": end,
            "turn": span.turn,
            "policy_version": span.policy_version,
            "advantage": advantage,
        }
        if span.finish is not None:
            record["finish"] = span.finish
        if span.images:
            record["images"] = [
                {"start": placed.start, "grid": placed.grid, "sha256": placed.image.sha256}
                for placed in span.images
            ]
        records.append(record)
        start = end
    return records


def _tool_call(result: ToolResult, exchanges: Mapping[str, list[Exchange]]) -> dict[str, Any]:
    """Return the record of a tool call.

    `content`, the text of its reply, is left out if a message holds it unchanged. A message may
    lack it, because it was clipped or the rollout ended before it. `done` means that the call ended
    the episode, `stop` that it called a stop tool.

    `exchanges` maps call ids to the calls and replies in the recorded messages. The one of this
    call is removed, so that the next call with the same id gets the next exchange.
    """
    record: dict[str, Any] = {
        "id": result.call.id,
        "name": result.call.name,
        "arguments": result.call.arguments,
        "error": result.error,
        "seconds": result.seconds,
    }
    # A reader of a record without `content` takes the first fitting exchange, and its text. So
    # `content` is left out only if this is the call's exchange, with the whole text of the reply.
    fitting = _fitting(exchanges, result.call)
    exchange = _take(exchanges, result.call, result.content)
    reader_takes_it = bool(fitting) and exchange is fitting[0]
    if not reader_takes_it or exchange.text != result.content:
        record["content"] = result.content
    record |= {key: True for key in ("done", "stop") if getattr(result, key)}
    if result.reward is not None:
        record["reward"] = result.reward
    return record


def rollout_limit(setting: str) -> int | None:
    """Return the number of rollouts per step that `tracker.rollouts` asks for; None: all."""
    if setting == "all":
        return None
    return 0 if setting == "none" else int(setting)


def in_order(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Sort rollouts by group, in the order in which groups first appear, then by sample."""
    first: dict[str, int] = {}
    for rollout in rollouts:
        first.setdefault(rollout.group_id, len(first))
    return sorted(rollouts, key=lambda rollout: (first[rollout.group_id], rollout.sample))


def step_path(run_folder: Path, step: int) -> Path:
    """Return the path of a step's rollouts: ``<run>/rollouts/step-000001.jsonl``."""
    return run_folder / "rollouts" / f"step-{step:06d}.jsonl"


def written_steps(run_folder: Path, command: str) -> list[int]:
    """Return the steps with recorded rollouts; raises ConfigError if there are none."""
    paths = sorted((run_folder / "rollouts").glob("step-*.jsonl"))
    if not paths:
        raise ConfigError(f"{command}: the run has written no rollouts (tracker.rollouts)")
    return [int(path.stem.removeprefix("step-")) for path in paths]


def written_step(run_folder: Path, step: int | None, command: str) -> int:
    """Return the step, the last one for None; raises ConfigError if it has no recorded rollouts."""
    steps = written_steps(run_folder, command)
    if step is not None and step not in steps:
        recorded = f"there are {steps[0]} to {steps[-1]}"
        raise ConfigError(f"{command} --step {step}: no rollouts of that step; {recorded}")
    return steps[-1] if step is None else step


def write_step(
    run_folder: Path,
    step: int,
    rollouts: Sequence[Rollout],
    most: int | None = None,
    arrays_above: int | None = None,
) -> None:
    """Write the first `most` rollouts (None: all) of a step atomically; no file for none.

    They are in the order of their groups, and of the samples in a group. The lists per token of
    rollouts of more than `arrays_above` tokens go to a file of arrays, which is smaller and faster
    than JSON (`record_arrays.py`). None: no rollout has such a file.
    """
    chosen = in_order(rollouts)[:most]
    if chosen:
        path = step_path(run_folder, step)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_images(path.parent, chosen)
        records = (_step_record(rollout, step) for rollout in chosen)
        write_records(path, records, arrays_above)


def write_records(path: Path, records: Iterable[dict[str, Any]], arrays_above: int | None) -> None:
    """Write the records of a step atomically, each a line; `arrays_above` as in `write_step`.

    Changes long records: their lists become references to arrays (`take_arrays`). A process that is
    killed at any moment leaves the former lines with their arrays, or the new ones with theirs: the
    new arrays get a file of a new name, and the former one is removed last.
    """
    arrays: dict[str, np.ndarray] = {}
    # Texts of lines, and records that are to name the file of arrays, which is written after all.
    lines: list[str | dict[str, Any]] = []
    for number, record in enumerate(records):
        tokens = sum(len(trajectory["token_ids"]) for trajectory in record["trajectories"])
        # Readers refuse arrays of more than MOST_TOKENS tokens.
        takes_arrays = arrays_above is not None and arrays_above < tokens <= MOST_TOKENS
        taken = take_arrays(record, number) if takes_arrays else {}
        arrays |= taken
        lines.append(record if taken else dumps(record))
    file = write_arrays(path, arrays) if arrays else None
    texts = (line if isinstance(line, str) else dumps({**line, ARRAYS: file}) for line in lines)
    # After the arrays: no line names a file that is not there.
    write_atomically(path, "".join(f"{text}\n" for text in texts))
    remove_former_arrays(path, file)


def staleness(rollout: Rollout, step: int) -> int | None:
    """Return the number of updates between a rollout's oldest weights and those of its step.

    Step n trains version n - 1. None if no token of the rollout has a version.
    """
    versions = policy_versions([rollout])
    return step - 1 - min(versions) if versions else None


def policy_versions(rollouts: Iterable[Rollout]) -> set[int]:
    """Return the policy versions that sampled tokens of these rollouts."""
    return {
        span.policy_version
        for rollout in rollouts
        for trajectory in rollout.trajectories
        for span in trajectory.spans
        if span.policy_version is not None
    }


def _step_record(rollout: Rollout, step: int) -> dict[str, Any]:
    """Return the record of a rollout of a step; step 0 is an evaluation."""
    record = rollout_record(rollout)
    age = staleness(rollout, step) if step else None
    return record if age is None else {**record, "staleness": age}


def read_step(run_folder: Path, step: int) -> Iterator[dict[str, Any]]:
    """Yield the records of a step, their arrays as lists.

    Raises FileNotFoundError if the step has no file, ArraysMissing without a file of arrays.
    """
    path = step_path(run_folder, step)
    with closing(ArrayReader()) as arrays:
        for record in read_rows(path):
            yield arrays.with_arrays(record, path.parent)


def completions(record: Record) -> list[Completion]:
    """Return the sampled completions of a record, in the order in which they were sampled."""
    sampled = list(map(_completions, record["trajectories"]))  # by trajectory and turn
    # The caller of a sub-agent's trajectory is the (trajectory, turn) whose tool call began it; of
    # others it is None. All turns of a sub-agent come between its caller's turn and the next one.
    delegations = map(_delegation, record["trajectories"])
    callers = (None if delegation is None else delegation.caller for delegation in delegations)
    turn_counts = map(len, sampled)
    order = turns_in_time([*zip(callers, turn_counts, strict=True)])
    return [sampled[trajectory][turn] for trajectory, turn in order]


def _delegation(written: Record) -> Delegation | None:
    recorded = written.get("delegation")
    if recorded is None:
        return None
    caller, schemas = tuple(recorded["caller"]), tuple(recorded["schemas"])
    return Delegation(**{**recorded, "caller": caller, "schemas": schemas})


def _completions(trajectory: Record) -> list[Completion]:
    """Return the completion of each turn of a recorded trajectory."""
    result = []
    for _, group in groupby(_sampled(trajectory), key=lambda span: span["turn"]):
        spans = list(group)  # one for each policy version that sampled the turn
        start, end = spans[0]["start"], spans[-1]["end"]
        result.append(
            Completion(
                token_ids=tuple(trajectory["token_ids"][start:end]),
                logprobs=tuple(_number(value) for value in trajectory["logprobs"][start:end]),
                finish=Finish(spans[-1]["finish"]),
                versions=tuple((s["policy_version"], s["end"] - s["start"]) for s in spans),
            )
        )
    return result


def _sampled(trajectory: Record) -> list[Record]:
    return [span for span in trajectory["spans"] if span["origin"] == Origin.sampled]


def _number(value: float | None) -> float:
    """Read a number; null stands for NaN, which JSON does not have."""
    return math.nan if value is None else value


def prompt_messages(trajectory: Record) -> list[Message]:
    """Return the messages before the first sampled one: the row's and those of a reset."""
    turns = len({span["turn"] for span in _sampled(trajectory)})
    messages: list[Message] = trajectory["messages"]
    # Of the assistant's messages only the last `turns` are sampled: others may be in the prompt.
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    return messages[: answers[-turns]] if turns and len(answers) >= turns else messages


def added_messages(record: Record) -> list[Message]:
    """Return the messages after the prompts of a record's trajectories."""
    return [message for messages in _conversations(record) for message in messages]


def _conversations(record: Record) -> list[list[Message]]:
    """Return the messages after the prompt, of each trajectory."""
    return [t["messages"][len(prompt_messages(t)) :] for t in record["trajectories"]]


def tool_results(record: Record) -> list[ToolResult]:
    """Return the results of a record's calls, in their order.

    `tool_calls` of a record has what messages do not hold. The rest is in the recorded messages:
    a malformed call's fault and text, and the reply's text and images. `_take` finds the call and
    the reply there, among several with one id by the content, if it is recorded.
    """
    exchanges = exchanges_of(_conversations(record))
    results = []
    for call_record in record["tool_calls"]:
        call = ToolCall(
            id=call_record["id"], name=call_record["name"], arguments=call_record["arguments"]
        )
        exchange = _take(exchanges, call, call_record.get("content"))
        results.append(
            ToolResult(
                call=replace(
                    call,
                    malformed=exchange.function.get("malformed"),
                    text=exchange.function.get("text", ""),
                ),
                content=call_record.get("content", exchange.text or ""),
                error=None if call_record["error"] is None else ToolError(call_record["error"]),
                seconds=call_record["seconds"],
                done=call_record.get("done", False),
                stop=call_record.get("stop", False),
                reward=call_record.get("reward"),
                parts=exchange.parts,
            )
        )
    return results


def read_rollout(record: Record, task: Task) -> Rollout:
    """Return the rollout of a record; its task is not in the file.

    A record lacks the rollout's `seconds` and the raw text of well-formed calls.
    """
    # A rollout's id ends with its sample: `train-3-1-0` is sample 0 of group `train-3-1`.
    sample = record["rollout_id"].rpartition("-")[2]
    environment_reward: float | None = None
    if "environment_reward" in record:
        environment_reward = _number(record["environment_reward"])
    prompt = prompt_messages(record["trajectories"][0])
    trajectories: list[Trajectory] = []
    for index in range(len(record["trajectories"])):
        trajectories.append(_trajectory(record, index, trajectories))
    return Rollout(
        task=replace(task, messages=tuple(prompt)),
        rollout_id=record["rollout_id"],
        group_id=record["group_id"],
        sample=int(sample) if sample.isdecimal() else 0,
        trajectories=trajectories,
        tool_results=tool_results(record),
        stop_reason=None if record["stop_reason"] is None else StopReason(record["stop_reason"]),
        error=record.get("error"),
        grades={name: _number(value) for name, value in record.get("grades", {}).items()},
        environment_reward=environment_reward,
        rewards=dict(record["rewards"]),
        turn_scores={n: tuple(values) for n, values in record.get("turn_scores", {}).items()},
        counts=dict(record.get("counts", {})),
        untrained=tuple(
            UntrainedConversation(**{**conversation, "messages": tuple(conversation["messages"])})
            for conversation in record.get("untrained", ())
        ),
        reward=record["reward"],
    )


def _trajectory(record: Record, index: int, before: Sequence[Trajectory]) -> Trajectory:
    """Rebuild trajectory `index` of a record; `before` are the rollout's earlier trajectories."""
    written = record["trajectories"][index]
    scores = {
        name: array("f", map(_number, written[name]))
        for name in ("trainer_logprobs", "entropies")
        if written.get(name) is not None
    }
    trajectory = Trajectory(
        rollout_id=record["rollout_id"],
        index=index,
        role=written["role"],
        parent=None if written["parent"] is None else tuple(written["parent"]),
        delegation=_delegation(written),
        schemas=None if written.get("schemas") is None else tuple(written["schemas"]),
        messages=[dict(message) for message in written["messages"]],
        prompt_messages=len(prompt_messages(written)),
        number=written.get("number"),
        turn_rewards={int(t): v for t, v in written.get("turn_rewards", {}).items()},
        states=list(written.get("states", ())),
        trainer_logprobs=scores.get("trainer_logprobs"),
        entropies=scores.get("entropies"),
    )
    # Begin with the parent's tokens that this trajectory continues.
    trajectory._ids = trajectory.context(before)
    completions_left = iter(_completions(written))  # one for each sampled turn
    # A turn sampled under several policy versions has several spans, but is one completion.
    for (origin, _), spans in groupby(written["spans"], key=lambda s: (s["origin"], s["turn"])):
        if origin == Origin.sampled:
            # `sent`: the engine was sent all ids before the turn.
            trajectory.append_sampled(next(completions_left), sent=trajectory.token_ids)
            continue
        for span in spans:
            ids = written["token_ids"][span["start"] : span["end"]]
            images = placed_images(span, written["messages"])
            trajectory.append_context(ids, Origin(span["origin"]), images)
    trajectory.advantages = _advantages(written)
    return trajectory


def _advantages(written: Record) -> array[float] | None:
    """Return the advantage of each sampled token; None if the record has none.

    A span has one number for all its tokens, a list if they differ, or null without a reward.
    """
    advantages: list[float] = []
    for span in _sampled(written):
        advantage, length = span["advantage"], span["end"] - span["start"]
        advantages += advantage if isinstance(advantage, list) else [advantage] * length
    return array("d", advantages) if advantages and None not in advantages else None
