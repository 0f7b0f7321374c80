"""`agenttrain rescore <run>`: score stored rollouts with another reward."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from agenttrain.commands.recorded import recorded_rubric, recorded_tasks, step_records
from agenttrain.rollout.collector import may_be_scored
from agenttrain.runs.setup import Components
from agenttrain.settings.mixture import refuse_sources
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.rollouts import read_rollout, written_steps
from agenttrain.types import ConfigError, Rollout, Task
from agenttrain.utils.files import write_atomically
from agenttrain.utils.json_lines import dumps

TOTAL = "reward"
"""Name of the weighted sum, beside the names of the reward functions."""
Values = list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A stored rollout with its recorded and its new rewards."""

    step: int
    old: Rollout
    """The rollout with its recorded rewards."""
    new: Rollout
    """The same rollout, scored again."""

    def line(self) -> str:
        """Return the rollout's line in the file of `--to`."""
        record = {
            "step": self.step,
            "rollout_id": self.old.rollout_id,
            "task_id": self.old.task.task_id,
            "old": {"rewards": self.old.rewards, "reward": self.old.reward},
            "new": {"rewards": self.new.rewards, "reward": self.new.reward},
        }
        return dumps(record) + "\n"


def rescore(config: RunConfig, folder: Path, *, step: int | None, to: Path | None) -> int:
    """Score the rollouts of a step, or of all, with `config.reward`.

    Prints the means of the recorded and of the new rewards. One JSON object per rollout goes to the
    file `to`. Failed rollouts are not scored. Returns exit code 0. Raises ConfigError for steps
    that were not recorded, and for rows that the data no longer has if a reward reads a column of
    them. Raises RewardError if a reward function fails.
    """
    command = f"rescore {folder}"
    refuse_sources(command, config)
    steps = written_steps(folder, command) if step is None else [step]
    recorded = {number: step_records(folder, number, command) for number in steps}
    components = Components(config)
    # Step -> rollout_id -> task.
    tasks = {
        number: recorded_tasks(config, components.tasks, records, number)
        for number, records in recorded.items()
    }
    all_tasks = chain(*(tasks_by_id.values() for tasks_by_id in tasks.values()))
    rubric = recorded_rubric(config, folder, chain(*recorded.values()), all_tasks)
    # (reward function, column) for each column of the rows that a reward reads.
    columns_read = [
        (name, column) for name, columns in rubric.columns.items() for column in columns
    ]
    rows: list[Rescored] = []
    for number, records in recorded.items():
        step_tasks = tasks[number]
        missing = [r["task_id"] for r in records if r["rollout_id"] not in step_tasks]
        # A missing row matters only if a reward reads its columns: the rollout itself is recorded.
        if missing and columns_read:
            name, column = columns_read[0]
            raise ConfigError(
                f"{command}: reward.{name} reads the column {column}, and task {missing[0]} with "
                "its recorded prompt is not in the data now; give the data that the run had"
            )
        for record in records:
            task = step_tasks.get(record["rollout_id"]) or Task(
                task_id=record["task_id"], messages=()
            )
            # Two copies: scoring fills in the rewards of the new one.
            old, new = read_rollout(record, task), read_rollout(record, task)
            rows.append(Rescored(step=number, old=old, new=new))
    asyncio.run(rubric.score([row.new for row in rows if may_be_scored(row.new)]))
    for line in report(rows):
        print(line)
    if to is not None:
        write_atomically(to, "".join(row.line() for row in rows))
        print(f"written to {to}")
    return 0


def report(rows: Sequence[Rescored]) -> Iterator[str]:
    """Yield a table of each reward's old and new mean, per step and over all steps.

    Each reward has two columns, headed by its name (the old mean) and by "now" (the new one). The
    last line has Pearson's correlation of the old and new sums, over the rollouts with both.
    """
    functions = (name for row in rows for name in (*row.old.rewards, *row.new.rewards))
    names = [TOTAL, *dict.fromkeys(functions)]
    steps = list(dict.fromkeys(row.step for row in rows))
    header = ["step", "rollouts"]
    for name in names:
        header += [name, "now"]
    table = [header]
    for step in steps:
        table.append(_means(str(step), [row for row in rows if row.step == step], names))
    if len(steps) > 1:
        table.append(_means("all", rows, names))
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    for line in table:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))
    correlation = _correlation(_column(rows, TOTAL, new=False), _column(rows, TOTAL, new=True))
    changed = sum(row.old.reward != row.new.reward for row in rows)
    agreement = "no correlation, one of them does not vary"
    if correlation is not None:
        agreement = f"r = {correlation:.3f}"
    yield f"{changed} of {len(rows)} rollouts have another reward; old and new: {agreement}"


def _means(label: str, rows: Sequence[Rescored], names: Sequence[str]) -> list[str]:
    """Return a row of the table: label, number of rollouts, old and new mean of each reward."""
    cells = []
    for name in names:
        for new in (False, True):
            values = [value for value in _column(rows, name, new=new) if value is not None]
            cells.append(f"{statistics.fmean(values):.4f}" if values else "-")
    return [label, str(len(rows)), *cells]


def _column(rows: Sequence[Rescored], name: str, *, new: bool) -> Values:
    """Return the old or the new value of a reward, or of TOTAL, for each rollout."""
    rollouts = [row.new if new else row.old for row in rows]
    return [r.reward if name == TOTAL else r.rewards.get(name) for r in rollouts]


def _correlation(old: Values, new: Values) -> float | None:
    """Return Pearson's correlation over the rollouts with both; None if one does not vary."""
    pairs = [(a, b) for a, b in zip(old, new, strict=True) if a is not None and b is not None]
    if len(pairs) < 2 or any(len(set(column)) < 2 for column in zip(*pairs, strict=True)):
        return None
    value = statistics.correlation(*zip(*pairs, strict=True))
    return value if math.isfinite(value) else None
