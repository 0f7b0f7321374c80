"""Settings of the rows and the curriculum, and checks of a source of rows before it is read.

The curriculum chooses the tasks of a step by the success that was measured of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from agenttrain.utils.names import did_you_mean


class OnBadRow(StrEnum):
    """Consequence of a row that cannot become a task."""

    error = "error"
    """Stop the run before it begins, naming the first such rows."""
    skip = "skip"
    """Leave it out; how many were is told."""


@dataclass
class CurriculumConfig:
    """Draws tasks by their success so far; those that are sometimes solved teach most."""

    enabled: bool = False
    """False: tasks are drawn in the order of the rows, or of `data.shuffle`."""
    low: float = 0.2
    """Least share of successful rollouts of a task in the band."""
    high: float = 0.8
    """Largest share of them."""
    explore: float = 0.5
    """Share of tasks that were never drawn, while there are any, in the order of the rows."""
    floor: float = 0.1
    """How often a task outside the band is drawn, compared with one in it: no task is lost."""
    revisit: int = 50
    """Steps after which a measure is too old: such a task is drawn as if it were in the band."""
    memory: float = 0.5
    """Share of the earlier measures in a new one; 0: only the last group counts."""
    success: float = 1.0
    """Reward from which on a rollout has succeeded."""


@dataclass
class DataConfig:
    """Where tasks come from: a bundled task generator (`_target_`), a file of rows, the hub."""

    train: dict[str, Any] = MISSING
    """`_target_` of a callable returning rows, with its arguments."""
    test: dict[str, Any] = field(default_factory=dict)
    """Rows of the evaluation, likewise; none: evaluations are left out."""
    shuffle: bool = False
    """Draw rows in an order seeded by (seed, epoch)."""
    path: str | None = None
    """data=file: a file or a `save_to_disk` folder; data=hub: a dataset's id. For both splits."""
    subset: str | None = None
    """data=hub: the dataset's configuration, where it has several (gsm8k: main)."""
    revision: str | None = None
    """data=hub: a commit, branch or tag; None: the newest."""
    test_fraction: float | None = None
    """Share of data.train held out for evaluation, where data.test has no rows of its own."""
    test_seed: int = 0
    """Chooses which rows are held out; not `seed`, so that runs are compared on the same ones."""
    map: dict[str, str] = field(default_factory=dict)
    """Column -> JMESPath expression over the row, e.g. {prompt: question}; others stay."""
    prompt: str | None = None
    """The user's message as a Jinja text over the columns: "{{ question }} Give a number."."""
    system: str | None = None
    """A system message, put before every prompt that has none."""
    on_bad_row: OnBadRow = OnBadRow.error
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)


HOLD_OUT = "data.test_fraction=0.1 holds some of data.train out"


def names_test_rows(data: DataConfig) -> bool:
    """Return whether data.test names rows: a path if it needs one, or another split of the same."""
    if data.test.get("_target_") not in (FILE_ROWS, HUB_ROWS) or data.test.get("path") is not None:
        return bool(data.test)
    return any(value not in (None, data.train.get(name)) for name, value in data.test.items())


def has_test_rows(data: DataConfig) -> bool:
    """Return whether there are rows to evaluate on, of data.test or held out of data.train."""
    return data.test_fraction is not None or names_test_rows(data)


FORMATS = (".jsonl", ".json", ".csv", ".parquet")
FILE_ROWS = "agenttrain.data.files.FileRows"
HUB_ROWS = "agenttrain.data.files.HubRows"
ENDLESS = tuple(
    f"agenttrain.data.bundled.{name}.row"
    for name in ("shop", "calculator", "code", "encyclopedia", "demonstrations")
)
"""The bundled generators: they have a row for every number."""
NO_PATH = "path=null: has no value; set data.path=…, or data.train.path=… and data.test.path=…"


def check_row_file(path: object, split: object = None, limit: object = None) -> Path:
    """Return the file or folder at `path`; raises ValueError that begins with the argument.

    A file has to be there, of a kind that can be read, and not empty; a folder must be one that
    `save_to_disk` of `datasets` wrote, and have the `split`.
    """
    if path is None:
        raise ValueError(NO_PATH)
    check_limit(limit)
    file = Path(str(path)).expanduser()
    if file.is_dir():
        listing = file / "dataset_dict.json"
        if listing.is_file():
            splits = json.loads(listing.read_text(encoding="utf-8"))["splits"]
            if split not in splits:
                hint = did_you_mean(str(split), splits)
                raise ValueError(f"split={split}: {path} has {', '.join(splits)}{hint}")
        elif not (file / "state.json").is_file():
            raise ValueError(
                f"path={path}: is a folder, and none that save_to_disk wrote; a folder of data "
                "files is read by data=hub"
            )
        elif split is not None:
            raise ValueError(
                f"split={split}: {path} is one dataset and has no splits; leave it out"
            )
        return file
    if not file.is_file():
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise ValueError(f"path={path}: there is no such file{where}")
    if file.suffix not in FORMATS:
        raise ValueError(f"path={path}: its ending must be one of {', '.join(FORMATS)}")
    if file.stat().st_size == 0:
        raise ValueError(f"path={path}: the file has no rows")
    if split is not None:
        raise ValueError(f"split={split}: {path} is one file and has no splits; leave it out")
    return file


def check_limit(limit: object) -> None:
    """Raise ValueError unless `limit` is a number of rows, or None for all."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(f"limit={limit}: must be a whole number of at least 1, or null for all")


def check_hub(
    path: object,
    subset: object = None,
    split: object = "train",
    revision: object = None,
    limit: object = None,
) -> None:
    """Raise ValueError for arguments of a hub dataset that cannot be right."""
    if path is None or not str(path):
        raise ValueError(NO_PATH)
    if not isinstance(split, str) or not split:
        raise ValueError(f"split={split}: give a split's name, e.g. train")
    check_limit(limit)


def known_rows(section: Mapping[str, Any]) -> int | None:
    """Count the rows of a `data.train` or `data.test` section; None where that is not cheap.

    Example: 2 for a JSONL file of two lines, `sys.maxsize` for
    ``agenttrain.data.bundled.shop.row``.
    """
    target = section.get("_target_")
    if target in ENDLESS:
        return sys.maxsize
    file, limit = Path(str(section.get("path"))).expanduser(), section.get("limit")
    if target != FILE_ROWS or file.suffix != ".jsonl" or not file.is_file():
        return None
    with file.open("rb") as lines:
        rows = sum(1 for line in lines if line.strip())
    return rows if limit is None else min(rows, limit)


def curriculum_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with `data.curriculum` of a RunConfig."""
    curriculum: CurriculumConfig = config.data.curriculum
    if not curriculum.enabled:
        default = CurriculumConfig()
        for field in fields(curriculum):
            value = getattr(curriculum, field.name)
            if value != getattr(default, field.name):
                yield (
                    f"data.curriculum.{field.name}={value}: has no effect without "
                    "data.curriculum.enabled=true"
                )
        return
    if not 0 <= curriculum.low <= curriculum.high <= 1:
        yield (
            f"data.curriculum.low={curriculum.low}: needs 0 <= low <= high <= 1, and "
            f"data.curriculum.high={curriculum.high}"
        )
    for name in ("explore", "floor"):
        value = getattr(curriculum, name)
        if not 0 < value <= 1:
            yield f"data.curriculum.{name}={value}: must be above 0 and at most 1"
    if not 0 <= curriculum.memory < 1:
        yield f"data.curriculum.memory={curriculum.memory}: must be at least 0 and below 1"
    if curriculum.revisit < 1:
        yield f"data.curriculum.revisit={curriculum.revisit}: must be at least 1"
