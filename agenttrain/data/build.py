"""Build the tasks of the `data:` section, and check them for the columns that rewards read."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agenttrain.data.config import HOLD_OUT, DataConfig, at_source, names_test_rows
from agenttrain.data.files import as_rows
from agenttrain.data.images import ImageLimits
from agenttrain.data.mixture import Mixture, Questions
from agenttrain.data.tasks import GeneratedRows, Rows, TaskSource, column_names
from agenttrain.data.transform import (
    RowCheck,
    RowSubset,
    RowTransform,
    TransformedRows,
    check_rows,
    hold_out,
    report_bad_rows,
)
from agenttrain.utils.locate import about_argument, locate_section
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.redaction import hide_in_settings

MAX_ITERATED = 1_000_000
"""Rows that are read from an iterator, which may have no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """The tasks of a run, for training and for evaluation."""

    train: TaskSource | Mixture
    test: TaskSource | Questions
    notes: tuple[str, ...]
    """Notes for the user: rows that are skipped or held out."""

    sources: Mapping[str, Splits] = field(default_factory=dict)
    """The tasks of each source of a mixture, by its name; empty in other runs."""

    @property
    def by_key(self) -> dict[str, TaskSource]:
        """Sources by their configuration key. `data.test` is among them only if it has rows.

        Example: ``data.train`` and ``data.test``, or of a mixture ``data.sources.shop.train``, ….
        """
        if self.sources:
            return {
                # A source's own `by_key` has data.train; in the run it is data.sources.shop.train.
                at_source(name, own_keys=(), text=key): tasks
                for name, splits in self.sources.items()
                for key, tasks in splits.by_key.items()
            }
        assert isinstance(self.train, TaskSource) and isinstance(self.test, TaskSource)
        test = {"data.test": self.test} if len(self.test) else {}
        return {"data.train": self.train, **test}


def build_tasks(
    config: DataConfig, *, seed: int, needs_prompt: bool = True, source: str = ""
) -> Splits:
    """Build the tasks of a `data:` section, and check every row of a finite dataset.

    `source` is the name of a mixture's source, whose section it is. Without `needs_prompt`, rows
    may lack a prompt, because an environment makes one. Raises ValueError with key, value and
    remedy. For bad rows it names the places and reasons of the first ten.
    """
    transform = RowTransform(config)
    notes: list[str] = []
    train_rows = build_rows(config.train, "data.train")
    train: Rows
    test: Rows = ()
    if config.test_fraction is not None:
        if isinstance(train_rows, GeneratedRows):
            raise ValueError(
                f"data.test_fraction={config.test_fraction}: generated rows have no end, so there "
                "is no share of them; leave it out"
            )
        rows = TransformedRows(train_rows, transform)
        usable = _check_all_rows(rows, config, "data.train", notes, needs_prompt)
        train_indices, test_indices = hold_out(usable, config.test_fraction, config.test_seed)
        train, test = RowSubset(rows, train_indices), RowSubset(rows, test_indices)
        notes.append(
            f"data.test_fraction={config.test_fraction}: {len(test)} of {len(usable.good)} rows "
            "are held out for evaluation"
        )
    elif not names_test_rows(config):
        train = _usable_rows(train_rows, transform, config, "data.train", notes, needs_prompt)
        notes.append(f"data.test: names no rows, so evaluations are left out; {HOLD_OUT}")
    else:
        test_rows = build_rows(config.test, "data.test")
        train = _usable_rows(train_rows, transform, config, "data.train", notes, needs_prompt)
        test = _usable_rows(test_rows, transform, config, "data.test", notes, needs_prompt)
    limits = image_limits(config)
    return Splits(
        train=TaskSource(
            train,
            shuffle=config.shuffle,
            seed=seed,
            needs_prompt=needs_prompt,
            images=limits,
            source=source,
            key="data.train",
        ),
        test=TaskSource(
            test,
            needs_prompt=needs_prompt,
            may_be_empty=True,
            images=limits,
            source=source,
            key="data.test",
        ),
        notes=tuple(notes),
    )


def image_limits(config: DataConfig) -> ImageLimits:
    """Return the limits on the images of rows."""
    return ImageLimits(
        pixels=config.max_image_pixels,
        count=config.max_images,
        total=config.max_total_images,
        urls=config.image_urls,
    )


def build_rows(section: Mapping[str, Any], key: str) -> Rows:
    """Build the rows of a section such as `data.train`, which is at `key`.

    `_target_` names a function of `index`, a function that returns rows as a list or an iterator,
    or a class whose instances return rows by number. The other keys are its arguments. Example:
    ``{"_target_": "agenttrain.data.bundled.shop.row", "split": "test", "seed": 0}``.

    Raises ValueError with key, value and remedy. A ValueError of the target that begins with
    ``split=…`` becomes one about ``data.train.split``.
    """
    located = locate_section(section, key=key)
    # The callable, its arguments, and the start of messages: "data.train._target_=…".
    target, bound, where = located.target, located.bound, located.where
    try:
        # A function of `index` has rows without end; `bind` raises TypeError for wrong arguments.
        if inspect.isfunction(target) and "index" in inspect.signature(target).parameters:
            inspect.signature(target).bind(index=0, **bound)
            return GeneratedRows(target, **bound)
        inspect.signature(target).bind(**bound)
        # Rows as the target returns them; those of an iterator are read into a list.
        result = _numbered_rows(target(**bound), where)
    except TypeError as error:
        raise ValueError(f"{where} with {hide_in_settings(bound)}: {error}") from error
    except ValueError as error:
        # "split=…: no such split" of the target becomes "data.train.split=…: no such split".
        raise ValueError(about_argument(error, key, bound)) from error
    try:
        # A table of datasets, pyarrow or pandas becomes rows; others stay as they are.
        rows = as_rows(result, str(section["_target_"]))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise ValueError(f"{where}: gives a {type(rows).__name__}, which has no rows by number")
    if len(rows) == 0:
        raise ValueError(f"{where}: has no rows")
    return rows


def _numbered_rows(rows: Any, where: str) -> Any:
    """Return rows that can be taken by number: those of an iterator as a list, others as they are.

    Raises ValueError for an iterator of too many rows, which may have no end.
    """
    has_numbers = hasattr(rows, "__len__") and hasattr(rows, "__getitem__")
    # A set is not read, because it has another order in each process. The caller refuses it.
    if has_numbers or isinstance(rows, Set) or not isinstance(rows, Iterable):
        return rows
    result = list(itertools.islice(rows, MAX_ITERATED + 1))
    if len(result) > MAX_ITERATED:
        raise ValueError(
            f"{where}: gives over {MAX_ITERATED:,} rows one by one, which are kept in memory; "
            "return a list, or write a function of `index`, whose rows are made when they are used"
        )
    return result


def _usable_rows(
    rows: Rows,
    transform: RowTransform,
    config: DataConfig,
    key: str,
    notes: list[str],
    needs_prompt: bool,
) -> Rows:
    """Return the transformed rows that can become tasks.

    Notes for the user, on rows that are left out, are appended to `notes`. Rows without end are
    checked when they are used instead.
    """
    transformed = TransformedRows(rows, transform)
    if not isinstance(rows, GeneratedRows):
        usable = _check_all_rows(transformed, config, key, notes, needs_prompt)
        return RowSubset(transformed, usable.good)
    if config.where is not None:
        raise ValueError(
            f"data.where={config.where}: has no effect on {key}, whose rows have no end and are "
            "made one by one; leave it out"
        )
    return transformed


def _check_all_rows(
    rows: TransformedRows, config: DataConfig, key: str, notes: list[str], needs_prompt: bool
) -> RowCheck:
    """Check all rows of the dataset at `key`, and append notes on those that are left out.

    The rows must have an end.
    """
    # Recorded rollouts (data=rollouts) say in `note` how many of a file's rollouts are rows.
    if note := getattr(rows.rows, "note", None):
        notes.append(f"{key}: {note}")
    limits = image_limits(config)
    # Applies `data.where` too: `usable.kept` counts the rows of which it is true, also bad ones.
    usable = check_rows(rows, key, needs_prompt=needs_prompt, images=limits)
    if config.where is not None:
        share = f"{usable.kept} of {len(rows)} rows of {key}"
        notes.append(f"data.where={config.where}: is true of {share}")
    if note := report_bad_rows(usable, len(rows), key, config.on_bad_row):
        notes.append(note)
    return usable


def check_needed_columns(
    source: TaskSource, columns: Mapping[str, Sequence[str]], key: str
) -> None:
    """Raise ValueError for a column that a component needs and none of the first rows has.

    `columns` maps components to the columns they need. `key` is the rows' setting. Example:
    ``check_needed_columns(tasks, {"reward.exact_match": ("answer",)}, "data.train")``.
    """
    row_columns = column_names(source)
    for component, names in columns.items():
        for name in names:
            if name not in row_columns:
                raise ValueError(
                    f"{component}: needs the column {name!r}, and the rows of {key} have: "
                    f"{', '.join(row_columns) or 'none'}{did_you_mean(name, row_columns)}; make it "
                    f"of another: data.map.{name}=…"
                )
