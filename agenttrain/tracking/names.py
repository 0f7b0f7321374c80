"""The table of metrics, metrics.yaml: the names that `metrics.jsonl` can hold, with their meaning.

An objective's own metrics stand in its decorator.

A part in angle brackets stands for any text without a slash: ``tools/<tool>/calls``.
`docs/reference/metrics.md` is generated from this table, and the metrics of runs are compared with
it by tests.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agenttrain.utils.files import parse_yaml


@dataclass(frozen=True, slots=True)
class MetricName:
    """One row of the table."""

    pattern: str
    meaning: str


def metric_row(name: str) -> MetricName | None:
    """Return the row of a metric; None for a name that the table lacks.

    Exact names go before patterns: ``tools/stuck`` is not a tool.
    """
    rows = [
        row
        for section in METRICS.values()
        for row in section
        if re.fullmatch(re.sub(r"<[a-z ]+>", "[^/]+", row.pattern), name)
    ]
    return min(rows, key=lambda row: "<" in row.pattern, default=None)


OF_THE_CLOCK = ("idle/", "perf/", "cost/")
"""Sections whose metrics depend on the clock or the machine."""


def depends_on_clock(name: str) -> bool:
    """Return True if a metric differs between two runs of one seed, e.g. ``time/train_s``."""
    return name.endswith("_s") or name.startswith(OF_THE_CLOCK)


METRICS: Mapping[str, tuple[MetricName, ...]] = {
    section: tuple(MetricName(*row) for row in rows.items())
    for section, rows in parse_yaml(
        Path(__file__).with_name("metrics.yaml").read_text(encoding="utf-8")
    ).items()
}
"""Section of the page -> its rows. `metrics.jsonl` also has `step`."""
