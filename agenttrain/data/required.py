"""Check that the rows have the columns that a run's rewards read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agenttrain.config.suggest import did_you_mean
from agenttrain.data.source import LOOKED_AT, TaskSource


def column_names(source: TaskSource) -> list[str]:
    """Return the columns of the first rows; single rows may lack some."""
    known: dict[str, None] = {}
    for task in source.tasks(0, min(len(source), LOOKED_AT)):
        known.update(dict.fromkeys(task.columns))
    return list(known)


def check_reward_columns(
    source: TaskSource, columns: Mapping[str, Sequence[str]], key: str
) -> None:
    """Raise ValueError for a column that a reward needs and none of the first rows has.

    `columns` by reward, `key` of the rows. Example: ``check_reward_columns(tasks, {"exact_match":
    ("answer",)}, "data.train")``.
    """
    known = column_names(source)
    for reward, names in columns.items():
        for name in names:
            if name not in known:
                raise ValueError(
                    f"reward.{reward}: needs the column {name!r}, and the rows of {key} have: "
                    f"{', '.join(known) or 'none'}{did_you_mean(name, known)}; make it of another: "
                    f"data.map.{name}=…"
                )
