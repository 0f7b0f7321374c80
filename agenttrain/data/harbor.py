"""Rows of a folder of tasks in Harbor's format: the instruction is the prompt."""

from __future__ import annotations

from typing import Any

from agenttrain.data.config import Paths
from agenttrain.runtimes.harbor.task import COLUMN, read_task, task_folders
from agenttrain.utils.data_fields import Data


def harbor_rows(path: Data[Paths], limit: Data[int | None] = None) -> list[dict[str, Any]]:
    """Return a row for each task folder in `path`: a folder of tasks, a task, or a list of these.

    Example: ``{"task_id": "fix-script", "prompt": "Fix …", "harbor": "/tasks/fix-script"}``.
    Raises ValueError, with the key of task.toml, for a task that cannot be run.
    """
    if not path:
        raise ValueError("path=null: names no tasks; set data.path=<folder of tasks>")
    rows = []
    for folder in task_folders(path)[:limit]:
        task = read_task(folder)
        prompt, name = task.instruction, folder.name
        row: dict[str, Any] = {"task_id": name, "prompt": prompt, COLUMN: str(folder)}
        if task.steps:  # their instructions are the later turns of the user
            row["user_turns"] = [step.instruction for step in task.steps[1:]]
        rows.append(row)
    return rows
