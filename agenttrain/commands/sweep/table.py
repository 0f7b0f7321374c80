"""A sweep's results: the figures of its configurations, as text, Markdown or JSON.

The figures come from the jobs' summary.json and metrics.jsonl.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from agenttrain.commands.sweep.config import SUMMARY
from agenttrain.commands.sweep.expand import REPEATED
from agenttrain.commands.sweep.record import (
    FINISHED,
    JobState,
    SweepRecord,
    job_states,
    status_counts,
    varying_settings,
)
from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import ConfigError
from agenttrain.utils.json_lines import read_rows
from agenttrain.utils.names import did_you_mean

COST_AND_SPEED = ("usage/mfu", "usage/cost")
"""Figures of `usage` in summary.json that are shown where the jobs have them."""
DEFAULT = {
    "train": ("eval/reward", "eval/pass@1", "seconds", *COST_AND_SPEED),
    "sft": ("eval/loss", "seconds", *COST_AND_SPEED),
    "eval": ("eval/reward", "eval/pass@1", "seconds"),
}
"""Figures by verb that are shown after the objective if none is named."""
WIDEST = 10_000
"""Characters; wider than any table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Mean and spread of one figure, such as eval/reward, over the seeds of a configuration."""

    mean: float
    std: float | None
    """Sample standard deviation (n - 1); None for one value."""
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.4g}" + ("" if self.std is None else f" ± {self.std:.2g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """Jobs that only differ in their seed."""

    chosen: dict[str, str]
    """The other settings that vary in the sweep, with the values of these jobs."""
    jobs: list[JobState]
    figures: dict[str, Figure]
    """Figures over the finished jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Results of a sweep for `agenttrain compare`."""

    sweep: Path
    objective: str | None
    metrics: list[str]
    """Names of the figures to show, in order."""
    keys: list[str]
    """Settings that differ, without the seed."""
    configurations: list[Configuration]
    jobs: list[JobState]
    results: list[dict[str, float]]
    """Figures of each job; empty for one that is not finished."""


def compare_jobs(sweep: Path, record: SweepRecord, metrics: Sequence[str]) -> Comparison:
    """Return the results by configuration; raises ConfigError for a metric that no job has."""
    jobs = job_states(sweep, record)
    figures = [results(job.folder) if job.status == FINISHED else {} for job in jobs]
    shown = _metrics(record, metrics, figures)
    # Settings of each job that vary in the sweep, without the seed.
    chosen = [
        {key: value for key, value in settings.items() if key != REPEATED}
        for settings in varying_settings(record)
    ]
    # A configuration's settings -> the numbers of its jobs, which differ only in the seed.
    numbers_by_settings: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for number, values in enumerate(chosen):
        numbers_by_settings.setdefault(tuple(values.items()), []).append(number)
    configurations = []
    for settings, numbers in numbers_by_settings.items():
        over_seeds: dict[str, Figure] = {}
        for name in shown:
            samples = [figures[n][name] for n in numbers if name in figures[n]]
            if samples:
                std = statistics.stdev(samples) if len(samples) > 1 else None
                mean = statistics.fmean(samples)
                over_seeds[name] = Figure(mean=mean, std=std, n=len(samples))
        members = [jobs[number] for number in numbers]
        configurations.append(
            Configuration(chosen=dict(settings), jobs=members, figures=over_seeds)
        )
    return Comparison(
        sweep=sweep,
        objective=record.objective,
        metrics=shown,
        keys=list(dict.fromkeys(key for values in chosen for key in values)),
        configurations=configurations,
        jobs=jobs,
        results=figures,
    )


def _metrics(
    record: SweepRecord, named: Sequence[str], figures: Sequence[Mapping[str, float]]
) -> list[str]:
    """Return the names of the table's columns: `named`, or else the objective and DEFAULT's.

    `figures` has the results of each job, `named` the names that the user typed. Raises ConfigError
    for a name that no finished job has.
    """
    available = dict.fromkeys(name for values in figures for name in values)
    for name in named:
        if available and name not in available:  # `available` is empty until a job has finished
            # The names of a run's main figures. Those with a slash ("sampling/logprob_gap_max") are
            # too many to list.
            plain = [key for key in available if "/" not in key or key.startswith("eval/")]
            raise ConfigError(
                f"{name}: no finished job has such a figure{did_you_mean(name, available)}; there "
                f"are {', '.join(plain)}, and the others of metrics.jsonl"
            )
    objective = [] if record.objective is None else [record.objective]
    wanted = named or [*objective, *(name for name in DEFAULT[record.verb] if name in available)]
    return list(dict.fromkeys(wanted))


def rows(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the table; a setting that a configuration does not have is a dash."""
    head = [*comparison.keys, *comparison.metrics, "jobs"]
    body = [
        [
            *(configuration.chosen.get(key, "–") for key in comparison.keys),
            *(str(configuration.figures.get(name, "")) for name in comparison.metrics),
            f"{status_counts(configuration.jobs)} "
            f"({', '.join(job.job.folder for job in configuration.jobs)})",
        ]
        for configuration in comparison.configurations
    ]
    return head, body


def print_table(comparison: Comparison) -> None:
    """Print the table in its full width: wrapped figures cannot be read."""
    head, body = rows(comparison)
    has_seeds = any(len(each.jobs) > 1 for each in comparison.configurations)
    legend = "mean ± standard deviation over the seeds, " if has_seeds else ""
    table = Table(title=f"{legend}{status_counts(comparison.jobs)}", title_justify="left")
    for name in head:
        justify: Literal["left", "right"] = "right" if name in comparison.metrics else "left"
        table.add_column(name, justify=justify, no_wrap=True)
    for row in body:
        table.add_row(*(escape(cell) for cell in row))
    width = Console(width=WIDEST).measure(table).maximum
    Console(width=width).print(table)


def markdown(comparison: Comparison) -> str:
    """Return the table in Markdown."""
    head, body = rows(comparison)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def as_json(comparison: Comparison, resume: str | None) -> dict[str, Any]:
    """Return the comparison as plain data; `resume` is the command for the unfinished jobs."""
    return {
        "sweep": str(comparison.sweep),
        "objective": comparison.objective,
        "metrics": comparison.metrics,
        "configurations": [
            {
                "overrides": configuration.chosen,
                "folders": [job.job.folder for job in configuration.jobs],
                "figures": {name: asdict(figure) for name, figure in configuration.figures.items()},
            }
            for configuration in comparison.configurations
        ],
        "jobs": [
            {
                **{"folder": job.job.folder, "overrides": job.job.overrides},
                **{"status": job.status, "error": job.error, "results": figures},
            }
            for job, figures in zip(comparison.jobs, comparison.results, strict=True)
        ],
        "resume": resume,
    }


def results(folder: Path) -> dict[str, float]:
    """Return all figures of a run: `eval/<name>`, SUMMARY's, `usage/<name>`, and the last metrics.

    Example: ``{"eval/pass@1": 0.5, "eval/reward": 0.5, "seconds": 93.0, "reward": 0.41, …}``
    """
    summary = read_summary(folder)
    last = curves(folder)[-1:] or [{}]
    after = summary.get("eval", {}).get("after", {})
    return {
        **{f"eval/{name}": value for name, value in _numbers(after).items()},
        **{name: value for name, value in _numbers(summary).items() if name in SUMMARY},
        **{f"usage/{name}": value for name, value in _numbers(summary.get("usage", {})).items()},
        **{name: value for name, value in _numbers(last[0]).items() if name != "step"},
    }


def curves(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl; none if there is no such file."""
    path = folder / "metrics.jsonl"
    return list(read_rows(path)) if path.exists() else []


def _numbers(record: dict[str, Any]) -> dict[str, float]:
    """Return the entries of a record that are numbers."""
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
