"""Recorded rollouts of a run, with their tasks: the files hold rollouts, the data holds tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agenttrain.data.build import Splits
from agenttrain.data.tasks import TaskSource
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.declared import read_declared
from agenttrain.runs.setup import rubric_of
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.sizes import arithmetic
from agenttrain.tracking.pictures import with_pictures
from agenttrain.tracking.rollouts import read_step, step_path, written_step
from agenttrain.types import RowTool, Task

Record = Mapping[str, Any]
EVALUATED = 0
"""Number of the step under which `agenttrain eval` records its rollouts."""


def step_records(folder: Path, step: int, command: str) -> list[dict[str, Any]]:
    """Return the records of one step; raises ConfigError that names the recorded steps."""
    written_step(folder, step, command)
    pictures = step_path(folder, step).parent
    return [with_pictures(record, pictures) for record in read_step(folder, step)]


def recorded_rubric(
    config: RunConfig,
    folder: Path,
    records: Iterable[Mapping[str, Any]],
    tasks: Iterable[Task] = (),
) -> Rubric:
    """Build the rewards of `config` for recorded rollouts of `tasks`, without building tools.

    Raises ValueError for a reward on a tool that the run did not have, if its tools.json exists. An
    outside agent has tools of its own, which cannot be checked.
    """
    # The rubric has the environments' own reward if the run recorded it.
    has_environment_reward = any("environment_reward" in record for record in records)
    rubric = rubric_of(config, list(config.environment) if has_environment_reward else [])
    declared = read_declared(folder)
    if declared is not None and not config.agent.outside:
        toolbox, environments = declared
        row_tools = [
            tool.name for task in tasks for tool in task.tools or () if isinstance(tool, RowTool)
        ]
        rubric.check_tools({*toolbox.names, *environments.tool_names, *row_tools})
    return rubric


def recorded_tasks(
    config: RunConfig, splits: Splits, records: Sequence[dict[str, Any]], step: int
) -> dict[str, Task]:
    """Map rollout_id to its task, for the records whose rows are still in the data.

    Only rows that the run can have drawn up to `step` are searched.
    """
    assert isinstance(splits.train, TaskSource), "a mixture's rollouts are refused"
    assert isinstance(splits.test, TaskSource), "a mixture's rollouts are refused"
    if step == EVALUATED:
        return find_tasks(records, splits.test, config.eval.questions)
    drawn = arithmetic(config).most_tasks_per_step * step
    return find_tasks(records, splits.train, drawn)


def find_tasks(records: Iterable[Record], source: TaskSource, drawn: int) -> dict[str, Task]:
    """Map rollout_id to its task, for records of tasks among the first `drawn` of `source`.

    Both task_id and prompt have to agree: rows may share an id, and a row that was edited since the
    run may still have it. A record without such a task is left out.
    """
    wanted: dict[str, list[Record]] = {}  # task_id -> records that have no task yet
    for record in records:
        wanted.setdefault(record["task_id"], []).append(record)
    tasks: dict[str, Task] = {}
    for position in range(min(drawn, len(source))):
        if not wanted:
            break
        (task,) = source.tasks(position, 1)
        prompt = [dict(message) for message in task.messages]
        unmatched = []
        for record in wanted.pop(task.task_id, []):
            if record["trajectories"][0]["messages"][: len(prompt)] == prompt:
                tasks[record["rollout_id"]] = task
            else:
                unmatched.append(record)
        if unmatched:  # a later row may have the same id
            wanted[task.task_id] = unmatched
    return tasks
