"""`agenttrain compare <sweep folder>`: a sweep's results, and the jobs that are missing.

`--plot FILE` draws them with matplotlib: learning curves and results, by configuration.
"""

from __future__ import annotations

import html
import io
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agenttrain.commands.sweep.record import (
    FINISHED,
    RUNNING,
    SweepRecord,
    read_record,
    settings_line,
)
from agenttrain.commands.sweep.table import (
    Comparison,
    as_json,
    compare_jobs,
    curves,
    markdown,
    print_table,
    rows,
)
from agenttrain.commands.verb import STDOUT, write_report
from agenttrain.types import ConfigError
from agenttrain.utils.json_lines import finite
from agenttrain.utils.redaction import hide_in_settings, hide_secrets, shell_command


def compare(args: Namespace) -> int:
    """Print the sweep's table; exit code 0. Raises ConfigError."""
    if args.plot is not None:
        _check_plot(args.plot)  # before the table is printed
    record = read_record(args.folder)
    comparison = compare_jobs(args.folder, record, args.metrics)
    unfinished = any(job.unfinished for job in comparison.jobs)
    is_incomplete = unfinished or record.lacks_trials
    resume = shell_command(["-m", f"resume={args.folder}"]) if is_incomplete else None
    report = hide_in_settings(finite(as_json(comparison, resume)))
    write_report(report, args.json)
    prints_text = args.json != STDOUT  # there the JSON takes the place of the text
    if prints_text and args.markdown:
        print(hide_secrets(markdown(comparison)))
    elif prints_text:
        print_table(comparison)
        _print_unfinished(comparison, record)
        if resume is not None:
            print(f"all that is missing: {resume}")
    if args.plot is not None:
        try:
            write(comparison, args.plot)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError(f"--plot {args.plot}: {problem}") from error
        if prints_text and not args.markdown:
            print(f"plot       {args.plot}")
    return 0


def _check_plot(path: Path) -> None:
    """Raise ConfigError if no picture can be written to the file."""
    image_format(path)
    if find_spec("matplotlib") is None:
        raise ConfigError(f"--plot {path}: needs matplotlib; pip install 'agenttrain[sweep]'")
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: name a file in an existing folder")


def _print_unfinished(comparison: Comparison, record: SweepRecord) -> None:
    """Print the jobs that are not finished, each with the command that starts or resumes it.

    A job that runs needs none.
    """
    for job in comparison.jobs:
        if job.status == FINISHED:
            continue
        why = f": {job.error}" if job.error else ""
        print(f"{job.folder}  {job.status}{why}")
        if job.status == RUNNING:
            continue
        arguments = record.arguments(comparison.sweep, job.job)
        # A run that has begun is resumed. An evaluation cannot be: it starts again.
        if (job.folder / "config.yaml").exists() and record.verb != "eval":
            # `agenttrain resume=…` without a verb trains.
            verb = [] if record.verb == "train" else [record.verb]
            arguments = [*verb, *record.options, f"resume={job.folder}"]
        print(f"    {shell_command(arguments)}")


FORMATS = ("png", "svg", "pdf", "html")
CURVES = ("reward", "loss")
"""The learning curve where no named metric has one: reinforcement learning's, then sft's."""
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000", "#999999"),
)
"""Colours that colour-blind readers can distinguish too (Okabe and Ito)."""
WINDOW = 20
"""A curve is averaged over a WINDOW-th of its steps: a step's figure is noisy."""
PER_LEGEND_LINE = 0.22
"""Height of a line of the legend, in inches."""

Rows = Sequence[Mapping[str, Any]]
"""Rows of a run's metrics.jsonl."""


def image_format(path: Path) -> str:
    """Return the format of a file by its name; raises ConfigError for an unknown one."""
    suffix = path.suffix.removeprefix(".").lower()
    if suffix not in FORMATS:
        raise ConfigError(f"--plot {path}: give a name that ends in .{', .'.join(FORMATS)}")
    return suffix


def write(comparison: Comparison, path: Path) -> None:
    """Write the picture; `.html` has the table too. Raises OSError."""
    from matplotlib.figure import Figure

    file_format = image_format(path)
    figure = Figure(figsize=(11, 4.5 + PER_LEGEND_LINE * len(comparison.configurations)), dpi=120)
    figure.set_layout_engine("constrained")
    # Rows of metrics.jsonl: configuration -> job -> step.
    configurations = comparison.configurations
    measured = [
        [curves(job.folder) for job in configuration.jobs] for configuration in configurations
    ]
    names = {name for runs in measured for run in runs for row in run for name in row}
    curve = next((name for name in (*comparison.metrics, *CURVES) if name in names), None)
    axes = figure.subplots(1, 2 if curve else 1, squeeze=False)[0]
    if curve:
        _draw_curves(axes[0], curve, measured)
    if comparison.metrics:
        _draw_results(axes[-1], comparison.metrics[0], comparison)
    # Lines without points, for the legend alone.
    lines = [axes[-1].plot([], [], color=colour(n))[0] for n in range(len(measured))]
    # Without settings that vary there is a single configuration.
    labels = [settings_line(each.chosen) or "all jobs" for each in configurations]
    figure.legend(lines, labels, loc="outside lower center", frameon=False, ncols=1)
    figure.suptitle("/".join(comparison.sweep.resolve().parts[-2:]), fontsize=10)
    if file_format != "html":
        figure.savefig(path, format=file_format)
        return
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    svg = buffer.getvalue()
    head, body = rows(comparison)
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in body]
    title = html.escape(str(comparison.sweep))
    page = (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif}td,th{padding:4px 12px;text-align:left}</style>"
        f"{svg[svg.index('<svg') :]}<table><tr>"
        + "".join(f"<th>{html.escape(name)}</th>" for name in head)
        + "</tr>"
        + "".join(f"<tr>{row}</tr>" for row in cells)
        + "</table>"
    )
    path.write_text(page, encoding="utf-8")


def _draw_curves(axes: Any, name: str, measured: Sequence[Sequence[Rows]]) -> None:
    """Draw for each configuration the mean of its seeds as a line, and their range as a band.

    `name` is the metric to draw, and `measured` holds its runs: configuration -> seed -> rows of
    metrics.jsonl.
    """
    longest = max(len(run) for runs in measured for run in runs)
    window = max(1, longest // WINDOW)
    for number, runs in enumerate(measured):
        curves_of_seeds = [smoothed(run, name, window) for run in runs]  # each step -> value
        steps = sorted({step for curve in curves_of_seeds for step in curve})
        # A seed that failed early has no value at later steps.
        values_by_step = [
            [curve[step] for curve in curves_of_seeds if step in curve] for step in steps
        ]
        means = [sum(values) / len(values) for values in values_by_step]
        axes.plot(steps, means, color=colour(number))
        low, high = list(map(min, values_by_step)), list(map(max, values_by_step))
        axes.fill_between(steps, low, high, color=colour(number), alpha=0.2, linewidth=0)
    over = f", mean of {window} steps" if window > 1 else ""
    axes.set(xlabel="step", ylabel=name + over, title="line: mean of the seeds, band: their range")
    _tidy(axes)


def _draw_results(axes: Any, name: str, comparison: Comparison) -> None:
    """Draw a column for each configuration: a dot per seed and a line at their mean.

    `name` is the figure to draw. Jobs without it have no dot.
    """
    pairs = zip(comparison.jobs, comparison.results, strict=True)
    results = {job.folder: job_figures for job, job_figures in pairs}
    for number, configuration in enumerate(comparison.configurations):
        figures = [results[job.folder].get(name) for job in configuration.jobs]
        values = [value for value in figures if value is not None]
        axes.scatter([number] * len(values), values, color=colour(number), zorder=3)
        if values:
            mean = sum(values) / len(values)
            axes.hlines(mean, number - 0.3, number + 0.3, color=colour(number))
    axes.set(ylabel=name, title="dot: one seed, line: mean", xticks=[])
    axes.set_xlim(-0.6, len(comparison.configurations) - 0.4)
    _tidy(axes)


def _tidy(axes: Any) -> None:
    """Remove the frame's top and right, and draw a light grid."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    axes.title.set_fontsize(9)


def smoothed(run: Rows, name: str, window: int) -> dict[int, float]:
    """Map each step to the mean of the metric `name` over the last `window` rows that have it.

    Example: rewards 0, 1, 1 of steps 1, 2, 3 in windows of 2 -> ``{1: 0.0, 2: 0.5, 3: 1.0}``.
    """
    points = [(row["step"], row[name]) for row in run if row.get(name) is not None]
    means = {}
    for stop, (step, _) in enumerate(points, start=1):
        values = [value for _, value in points[max(0, stop - window) : stop]]
        means[step] = sum(values) / len(values)
    return means


def colour(number: int) -> str:
    """Return a configuration's colour; they repeat beyond eight."""
    return COLOURS[number % len(COLOURS)]
