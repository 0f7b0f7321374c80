"""`agenttrain compare <sweep folder>`: a sweep's results, and the jobs that are missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agenttrain.config.errors import ConfigError
from agenttrain.config.suggest import did_you_mean
from agenttrain.sweep import plot
from agenttrain.sweep.record import SweepRecord, read_record, shown
from agenttrain.sweep.status import FINISHED, RUNNING, Standing
from agenttrain.sweep.table import as_json, compared, markdown, print_table
from agenttrain.tracking.json_lines import finite

USAGE = (
    "compare: give a sweep's folder, compare <sweep folder> [metric …] [--plot FILE] [--json] "
    "[--markdown]"
)
OPTIONS = ("--plot", "--json", "--markdown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Typed:
    """The words of the command line, taken apart."""

    sweep: Path
    metrics: list[str]
    plot: Path | None
    form: str | None
    """`--json` or `--markdown`; None: a table for a terminal."""


def compare(arguments: Sequence[str]) -> int:
    """Print the sweep's table; exit code 0. Raises ConfigError."""
    typed = parse(arguments)
    if typed.plot is not None:
        plot.check(typed.plot)
    record = read_record(typed.sweep)
    comparison = compared(typed.sweep, record, typed.metrics)
    unfinished = any(job.unfinished for job in comparison.jobs)
    resume = shown(["-m", f"resume={typed.sweep}"]) if unfinished else None
    if typed.form == "--json":
        print(json.dumps(finite(as_json(comparison, resume)), indent=1))
    elif typed.form == "--markdown":
        print(markdown(comparison))
    else:
        print_table(comparison)
        for job in comparison.jobs:
            if job.status == FINISHED:
                continue
            why = f": {job.error}" if job.error else ""
            print(f"{job.folder}  {job.status}{why}")
            if job.status != RUNNING:
                print(f"    {shown(alone(comparison.sweep, record, job))}")
        if resume is not None:
            print(f"all of them, one after the other: {resume}")
    if typed.plot is not None:
        try:
            plot.write(comparison, typed.plot)
        except OSError as error:
            problem = f"cannot be written: {error.strerror}"
            raise ConfigError(f"--plot {typed.plot}: {problem}") from error
        if typed.form is None:
            print(f"plot       {typed.plot}")
    return 0


def parse(arguments: Sequence[str]) -> Typed:
    """The words behind `compare`; raises ConfigError."""
    words, plots, forms = list[str](), list[Path](), list[str]()
    left = iter(arguments)
    for text in left:
        option, equals, value = text.partition("=")
        if option == "--plot":
            value = value if equals else next(left, "")
            if not value:
                raise ConfigError(f"--plot: where to? {USAGE}")
            plots.append(Path(value))
        elif text in OPTIONS:
            forms.append(text)
        elif text.startswith("-"):
            raise ConfigError(f"{text}: no such option{did_you_mean(text, OPTIONS)}; {USAGE}")
        else:
            words.append(text)
    if not words or len(forms) > 1 or len(plots) > 1:
        raise ConfigError(USAGE)
    for path in plots:
        plot.kind(path)
    return Typed(
        sweep=Path(words[0]),
        metrics=words[1:],
        plot=plots[0] if plots else None,
        form=forms[0] if forms else None,
    )


def alone(sweep: Path, record: SweepRecord, unfinished: Standing) -> list[str]:
    """Return the arguments of `agenttrain` that run one unfinished job."""
    if (unfinished.folder / "config.yaml").exists() and record.verb != "eval":
        verb = [] if record.verb == "train" else [record.verb]
        return [*verb, *record.options, f"resume={unfinished.folder}"]
    return record.arguments(sweep, unfinished.job)
