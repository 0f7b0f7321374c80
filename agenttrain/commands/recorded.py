"""The rollouts of a run's folder, together with the tasks that they are attempts at.

The tasks are in the data, not in the rollouts' files.
"""

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
from agenttrain.tracking.rollouts import read_step
from agenttrain.types import ConfigError, RowTool, Task

Record = Mapping[str, Any]
EVALUATED = 0
"""The step whose file holds the rollouts of `agenttrain eval`."""


def written_steps(folder: Path, said: str) -> list[int]:
    """The steps whose rollouts are in a run's folder; raises ConfigError for none at all."""
    paths = sorted((folder / "rollouts").glob("step-*.jsonl"))
    if not paths:
        raise ConfigError(f"{said}: the run has written no rollouts (tracker.rollouts)")
    return [int(path.stem.removeprefix("step-")) for path in paths]


def step_records(folder: Path, step: int, said: str) -> list[dict[str, Any]]:
    """The records of one step; raises ConfigError that names the steps there are."""
    written = written_steps(folder, said)
    if step not in written:
        known = f"there are {written[0]} to {written[-1]}"
        raise ConfigError(f"{said} step={step}: no rollouts of that step; {known}")
    return list(read_step(folder, step))


def recorded_rubric(
    config: RunConfig,
    folder: Path,
    records: Iterable[Mapping[str, Any]],
    tasks: Iterable[Task] = (),
) -> Rubric:
    """Build the rewards of `config` for recorded rollouts of these tasks, and no tool.

    Raises ValueError for a reward on a tool that was not there, as far as tools.json tells.
    """
    recorded = list(records)
    names = list(config.environment)
    rewarded = any("environment_reward" in record for record in recorded)
    rubric = rubric_of(config, names if rewarded else [])
    declared = read_declared(folder)
    if declared is not None:
        toolbox, environments = declared
        own = [
            tool.name for task in tasks for tool in task.tools or () if isinstance(tool, RowTool)
        ]
        rubric.check_tools({*toolbox.names, *environments.tool_names, *own})
    return rubric


def recorded_tasks(
    config: RunConfig, splits: Splits, records: Sequence[dict[str, Any]], step: int
) -> dict[str, Task]:
    """rollout_id -> task, of those records whose rows are still in the data.

    The rows are looked for among all that the run can have drawn up to `step`.
    """
    if step == EVALUATED:
        return find_tasks(records, splits.test, config.eval.questions)
    drawn = arithmetic(config).most_tasks_per_step * step
    return find_tasks(records, splits.train, drawn)


def find_tasks(records: Iterable[Record], source: TaskSource, drawn: int) -> dict[str, Task]:
    """Map rollout_id to its task, for records of tasks among the first `drawn` of `source`.

    A task is the record's when the name and the prompt agree: rows may share a name, and data that
    was changed since may keep it.
    """
    wanted: dict[str, list[Record]] = {}
    for record in records:
        wanted.setdefault(record["task_id"], []).append(record)
    tasks: dict[str, Task] = {}
    for position in range(min(drawn, len(source))):
        if not wanted:
            break
        (task,) = source.tasks(position, 1)
        prompt = [dict(message) for message in task.messages]
        left = []
        for record in wanted.pop(task.task_id, []):
            if record["trajectories"][0]["messages"][: len(prompt)] == prompt:
                tasks[record["rollout_id"]] = task
            else:
                left.append(record)
        if left:
            wanted[task.task_id] = left
    return tasks
