"""Recorded rollouts as rows of `agenttrain sft`: `data=rollouts data.path=<run>/rollouts/*.jsonl`.

`RolloutRows` reads the files and selects by reward. `difference` compares a recorded rollout with
what a run would give the model, so that it can be learned in exactly the ids that were sampled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from agenttrain.chat.chat import Chat
from agenttrain.chat.encoding import ChatError
from agenttrain.data.config import check_rollout_files
from agenttrain.data.files import BadRow, FileRows
from agenttrain.rollout.ledger import schemas_of, verify
from agenttrain.tracking.pictures import with_pictures
from agenttrain.tracking.record_arrays import ARRAYS, ArrayReader, ArraysMissing
from agenttrain.tracking.rollouts import prompt_messages, read_rollout
from agenttrain.types import (
    LedgerError,
    Message,
    Origin,
    Rollout,
    Span,
    StopReason,
    Task,
    Trajectory,
)
from agenttrain.utils.data_fields import Data

ROLLOUT = "rollout"
"""Column of a row that holds the recorded rollout."""
CUT_OFF = (
    StopReason.error,
    StopReason.aborted,
    StopReason.max_tokens,
    StopReason.context_full,
)
"""Ends that the model did not choose and that may have cut its last turn."""


class RecordedRollout(dict[str, Any]):
    """One object of a rollout file, in today's form."""


class RolloutRows:
    """The rollouts of a run as rows: their messages, the columns of their tasks, and `rollout`.

    The column `rollout` is the recorded object, for `data.where` and for the ids. Rollouts that
    ended by an error, an abort or a token limit are left out. With `min_reward` those with a lower
    reward are left out too, and those without a reward.
    Example: ``RolloutRows("outputs/shop/rollouts/*.jsonl", min_reward=1)``
    """

    def __init__(
        self,
        path: Data[str | Sequence[str]],
        min_reward: Data[float | None] = None,
        limit: Data[int | None] = None,
    ) -> None:
        """Take the first `limit` selected rollouts, or all. Raises ValueError."""
        check_rollout_files(path, min_reward, limit)
        self._file = FileRows(path)
        self._arrays = ArrayReader()
        self._checked_arrays: set[tuple[Path, str]] = set()
        """(folder, name) of the files of arrays that were checked."""
        self._selected: list[int] = []
        """Indices of the selected lines."""
        left_out_by_reason: Counter[str] = Counter()
        rewarded = 0
        for index in range(len(self._file)):
            record = self._record(index)
            if record["reward"] is not None:
                rewarded += 1
            reason = _why_left_out(record, min_reward)
            if reason is None:
                self._selected.append(index)
                self._check_arrays(record, index)
            else:
                left_out_by_reason[reason] += 1
        left_out = ", ".join(
            f"{count} {reason}" for reason, count in left_out_by_reason.most_common()
        )
        if min_reward is not None and not rewarded:
            raise ValueError(
                f"min_reward={min_reward}: none of the {len(self._file)} rollouts has a reward; "
                "leave it out, or choose by data.where"
            )
        if not self._selected:
            leaves_none = f"leaves none of {len(self._file)} rollouts: {left_out}"
            remedy = "take the files of more steps"
            if min_reward is None:
                raise ValueError(f"path={path}: {leaves_none}; {remedy}")
            raise ValueError(f"min_reward={min_reward}: {leaves_none}; lower it, or {remedy}")
        self.note = f"{len(self._selected)} of {len(self._file)} rollouts"
        """How many rollouts are selected, before `limit`, and how many left out for each reason."""
        if left_out:
            self.note += f"; left out: {left_out}"
        self._selected = self._selected[:limit]

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a fresh row: the recorded columns, the messages, and the record under ROLLOUT."""
        line = self._selected[index]
        folder = self._file.folder(line)
        record = self._arrays.with_arrays(self._record(line), folder)
        record = RecordedRollout(with_pictures(record, folder))
        row = {
            **record["columns"],
            "task_id": record["task_id"],
            "messages": record["trajectories"][0]["messages"],
            ROLLOUT: record,
        }
        return {**row, "tools": record["tools"]} if "tools" in record else row

    def where(self, index: int) -> str:
        """Return the row's place for error messages."""
        return self._file.where(self._selected[index])

    def question(self, index: int) -> Sequence[Message]:
        """Return the messages before the first sampled one: examples in a prompt are among them."""
        try:
            return prompt_messages(self._record(self._selected[index])["trajectories"][0])
        except LookupError:  # a broken record, which `read_again` refuses
            return ()

    def _check_arrays(self, record: RecordedRollout, index: int) -> None:
        """Raise ValueError unless the file of arrays of line `index`, if it has one, is there.

        Checks each file once: all lines of a step share one.
        """
        if ARRAYS not in record:
            return
        file = (self._file.folder(index), str(record[ARRAYS]))
        if file in self._checked_arrays:
            return
        self._checked_arrays.add(file)
        try:
            self._arrays.check(record, self._file.folder(index))
        except ArraysMissing as error:
            raise ValueError(f"path={self._file.where(index)}: {error}") from error

    def _record(self, index: int) -> RecordedRollout:
        """Return the recorded rollout of a line; raises ValueError for any other object."""
        place = self._file.where(index)
        try:
            record = self._file[index]
        except BadRow as error:
            raise ValueError(f"path={place}: {error}") from error
        has_keys = {"rollout_id", "reward", "stop_reason"} <= set(record)
        if not has_keys or not record.get("trajectories"):
            raise ValueError(
                f"path={place}: is no rollout that a run recorded; other rows are read by data=file"
            )
        return RecordedRollout(record)


def _why_left_out(record: Mapping[str, Any], min_reward: float | None) -> str | None:
    """Return why a recorded rollout is left out of the rows, or None if it is one of them."""
    if record["stop_reason"] in CUT_OFF:
        return f"ended by {record['stop_reason']}"
    if min_reward is None:
        return None
    if record["reward"] is None:
        return "without a reward"
    return f"with a reward below {min_reward:g}" if record["reward"] < min_reward else None


def read_again(record: Mapping[str, Any], task: Task, rollout_id: str) -> Rollout:
    """Return a recorded rollout under a new id, without scores.

    Raises LedgerError for a record that lacks something or does not fit together.
    """
    ids = {"rollout_id": rollout_id, "group_id": rollout_id}
    try:
        rollout = read_rollout({**record, **ids, "rewards": {}, "reward": None}, task)
    except (LookupError, TypeError, ValueError, StopIteration) as error:
        raise LedgerError(f"is no complete record of a rollout: {error!r}") from error
    # Results of the run that recorded it: this run computes its own.
    for trajectory in rollout.trajectories:
        trajectory.trainer_logprobs = trajectory.entropies = trajectory.advantages = None
    return replace(rollout, sample=0, environment_reward=None, turn_scores={})


def difference(
    rollout: Rollout, messages: Sequence[Mapping[str, Any]], chat: Chat, schemas: Sequence[dict]
) -> str | None:
    """Return why this run would give a recorded rollout other ids, or None if the ids are the same.

    The run has `chat`, the tools of `schemas` and the row's `messages`, which its settings may have
    changed. The prompt and the context between sampled turns are rendered again, and the sampled
    ids have to parse to the recorded messages. Context after the last sampled token may differ:
    nothing is learned from it.
    """
    main = rollout.trajectories[0]
    if list(messages) != main.messages:
        return "the settings of `data` change its messages"
    try:
        prompt = chat.rendered_ids(main.messages[: main.prompt_messages], schemas)
        if list(main.token_ids[: main.prompt_length]) != prompt:
            return "the tokenizer, the chat template or the tools of this run give another prompt"
        verify(rollout, chat, schemas)
        for trajectory in rollout.trajectories:
            trajectory_schemas = schemas_of(trajectory, schemas)
            # A sub-agent begins with a prompt of its own, unless its context was compacted.
            has_own_prompt = trajectory.delegation is not None and trajectory.parent is None
            if has_own_prompt:
                prompt = chat.rendered_ids(
                    trajectory.messages[: trajectory.prompt_messages], trajectory_schemas
                )
                if list(trajectory.token_ids[: trajectory.prompt_length]) != prompt:
                    return f"this run gives {trajectory.name} another prompt"
            if (turn := _first_changed_context(trajectory, chat, trajectory_schemas)) is not None:
                return f"this run gives other ids than those after turn {turn} of {trajectory.name}"
    except (ChatError, LedgerError) as error:
        return str(error)
    return None


def _first_changed_context(
    trajectory: Trajectory, chat: Chat, schemas: Sequence[dict]
) -> int | None:
    """Return the first turn after which `chat` renders other ids than were recorded, or None.

    The spans alternate: prompt, turn, its replies, turn, its replies, … For each turn but the last
    this run renders its replies, and compares their ids with the recorded ones.
    """
    messages = trajectory.messages
    turn_positions = [
        position
        for position, message in enumerate(messages)
        if position >= trajectory.prompt_messages and message["role"] == "assistant"
    ]
    runs = [
        list(run) for _, run in groupby(trajectory.spans, key=lambda s: s.origin is Origin.sampled)
    ]
    turns_with_replies = [
        (turn_spans, reply_spans)
        for turn_spans, reply_spans in pairwise(runs)
        if turn_spans[0].origin is Origin.sampled
    ]
    # Not strict: the last turn may have replies, but there is no turn after it.
    for (turn_spans, reply_spans), (position, next_position) in zip(
        turns_with_replies, pairwise(turn_positions), strict=False
    ):
        turn, finish = turn_spans[0].turn, turn_spans[-1].finish
        if finish is None:  # an incomplete turn
            return None
        ids = _ids_of(turn_spans)
        # The template may open a turn after a user's message otherwise than after a tool's reply.
        role_before = messages[position - 1]["role"]
        suffix = chat.suffix(
            chat.parse(ids, schemas, turn=trajectory.turn_name(turn), after=role_before),
            messages[position + 1 : next_position],
            completion_ids=ids,
            finish=finish,
            generation_prompt=True,
        )
        rendered = [token_id for _, token_ids in suffix for token_id in token_ids]
        if rendered != _ids_of(reply_spans):
            return turn
    return None


def _ids_of(spans: Sequence[Span]) -> list[int]:
    """Return the token ids of spans, in order."""
    return [token_id for span in spans for token_id in span.token_ids]
