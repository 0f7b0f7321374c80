"""Which tasks recorded rollouts belong to: they are in the data, not in the rollouts' files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from agenttrain.data.source import TaskSource
from agenttrain.types import Task

Record = Mapping[str, Any]


def find_tasks(records: Iterable[Record], source: TaskSource, drawn: int) -> dict[str, Task]:
    """rollout_id -> its task, for every record whose task is among the first `drawn` of `source`.

    A task is the record's when the name and the prompt agree: rows may share a name, and data that
    was changed since may keep it.
    """
    wanted: dict[str, list[Record]] = {}
    for record in records:
        wanted.setdefault(record["task_id"], []).append(record)
    found: dict[str, Task] = {}
    for position in range(min(drawn, len(source))):
        if not wanted:
            break
        (task,) = source.tasks(position, 1)
        left = []
        for record in wanted.pop(task.task_id, []):
            if _begins_with(record, task):
                found[record["rollout_id"]] = task
            else:
                left.append(record)
        if left:
            wanted[task.task_id] = left
    return found


def _begins_with(record: Record, task: Task) -> bool:
    prompt = [dict(message) for message in task.messages]
    return record["trajectories"][0]["messages"][: len(prompt)] == prompt
