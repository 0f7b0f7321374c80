"""`agenttrain -m …`: a new sweep, or one that goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from agenttrain.commands.sweep.config import objective_problems
from agenttrain.commands.sweep.expand import expand, is_listed
from agenttrain.commands.sweep.record import (
    SweepJob,
    SweepRecord,
    chosen,
    held,
    is_job,
    is_sweep,
    read_record,
    shown,
    standings,
    write_record,
)
from agenttrain.commands.sweep.run import Sweep, concluded, run_listed, run_searched
from agenttrain.settings.checks import check_own_objective, check_structured, validate
from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed, check_writable, compose_raw
from agenttrain.settings.messages import explained
from agenttrain.settings.saved import RESUMABLE, resumed
from agenttrain.settings.trust import check_trusted
from agenttrain.types import ConfigError
from agenttrain.utils.moved import override_in_this_layout

NUMBERED = "${hydra.job.num}"
"""Default of hydra.sweep.subdir."""


def start(command: Command, runs: Sequence[Composed]) -> int:
    """Record a new sweep, of runs that have been checked, and run it. Needs a `hydra_session`."""
    folder, record, listed = new_sweep(command, runs)
    key = "hydra.sweep.dir="
    check_writable(folder, f"{key}{folder}", f"name another folder: {key}…")
    write_record(folder, record)
    overrides = record.shared if listed else command.overrides
    sweep = Sweep(folder=folder, config_name=command.source.name, overrides=overrides)
    with held(folder):
        return run_listed(sweep) if listed else run_searched(sweep)


def new_sweep(command: Command, runs: Sequence[Composed]) -> tuple[Path, SweepRecord, bool]:
    """Return folder and record of a sweep of checked runs, and if the record has all of its jobs.

    Nothing is written. Raises ConfigError. Needs a `hydra_session`.
    """
    source = command.source
    with explained(command.overrides, source.groups):
        parsed = OverridesParser.create().parse_overrides(command.overrides)
    # Hydra's own settings among them.
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override()]
    raw = compose_raw(fixed, source, with_hydra=True)
    folder = Path(raw.hydra.sweep.dir)
    if is_sweep(folder):
        go_on = shown(["-m", f"resume={folder}"])
        raise ConfigError(
            f"hydra.sweep.dir={folder}: holds a sweep already; {go_on} runs what is unfinished of "
            "it, another name starts a new one"
        )
    listed = is_listed(raw)
    if not listed and runs[0].config.sweep.objective is None:
        raise ConfigError(
            "sweep.objective=null: the sweeper chooses by it; name a figure, e.g. eval/pass@1"
        )
    # A job finds its YAML files from whatever folder it is started.
    options = ["--config-dir", str(Path(source.extra).resolve())] if source.extra else []
    options += ["--config-name", source.name] if source.name != "train" else []
    record = SweepRecord(
        verb=command.verb,
        objective=runs[0].config.sweep.objective,
        options=options,
        shared=fixed,
        jobs=_jobs(command, str(raw.hydra.sweep._get_node("subdir")._value())) if listed else [],
    )
    return folder, record, listed


def go_on(command: Command, compose: Callable[[Sequence[str], Command], Composed]) -> int:
    """Run what is unfinished of a sweep; `compose` checks a new run. Needs a `hydra_session`."""
    folder = command.saved
    assert folder is not None, "go_on() is for resume="
    record = read_record(folder)
    check_writable(folder, f"resume={folder}", "make it writable")
    with held(folder):
        return _go_on(folder, record, command, compose)


def _go_on(
    folder: Path,
    record: SweepRecord,
    command: Command,
    compose: Callable[[Sequence[str], Command], Composed],
) -> int:
    """Do `go_on`'s work while the sweep is held."""
    commands = [shown(record.arguments(folder, job)) for job in record.jobs]
    code = [] if record.own else [*commands, *record.shared]
    check_trusted(f"resume={folder}", code, trust=command.trust, what="its sweep.json")
    jobs = standings(folder, record)
    typed = OverridesParser.create().parse_overrides(command.overrides)
    hydras = [o.input_line or "" for o in typed if o.is_hydra_override()]
    changes = [text for text in command.overrides if text not in hydras]
    for text in changes:
        if text.lstrip("+~").partition("=")[0].partition(".")[0] not in RESUMABLE:
            raise ConfigError(
                f"{text}: cannot be combined with resume={folder}; what may change is: "
                f"{', '.join(RESUMABLE)}, and Hydra's own settings"
            )
    for one in jobs:
        if one.unfinished and (one.folder / "config.yaml").exists() and record.verb != "eval":
            config = resumed(one.folder, changes, command.source, trust=command.trust).config
            validate(config)
            check_structured(record.verb, config)
            check_own_objective(record.verb, config)
        elif one.unfinished:
            recorded = map(override_in_this_layout, one.job.overrides)
            compose([*recorded, *changes], command)
    if not any(one.unfinished for one in jobs):
        if command.overrides:
            raise ConfigError(
                f"{command.overrides[0]}: no job of {folder} is unfinished; a finished one goes on "
                f"alone: agenttrain resume={jobs[0].folder if jobs else '…'} steps=…"
            )
        return concluded(folder, 0)
    recorded_shared = [override_in_this_layout(text) for text in record.shared]
    shared = [text for text in recorded_shared if not chosen([text]).keys() & chosen(hydras).keys()]
    overrides, name = [*shared, *hydras], command.source.name
    sweep = Sweep(
        folder=folder,
        config_name=name,
        overrides=overrides,
        changes=changes,
        # All that is not bundled was agreed to above; the jobs have no terminal to ask on.
        trust=True,
    )
    return run_listed(sweep)


def check_objective(verb: str, runs: Sequence[Composed]) -> None:
    """Raise ConfigError for an objective that the runs will not have."""
    problems = dict.fromkeys(text for run in runs for text in objective_problems(verb, run.config))
    if problems:
        raise ConfigError("\n".join(problems))


def refuse_without_m(overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings of a sweep in a run that is none's job."""
    typed = [text for text in overrides if text.lstrip("+").startswith(("sweep=", "sweep."))]
    if not typed:
        return
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    folders = [o.value() for o in parsed if o.key_or_group == "hydra.run.dir"]
    if not folders or not is_job(Path(str(folders[-1]))):
        raise ConfigError(f"{typed[0]}: has no effect in a single run; add -m, or leave it out")


def _jobs(command: Command, subdir: str) -> list[SweepJob]:
    """Return the jobs of a sweep whose runs are all known."""
    combinations = expand(command.overrides, command.source)
    folders = []
    for number, run in enumerate(combinations):
        if subdir == NUMBERED:
            folders.append(str(number))
            continue
        numbered = [*run, f"++hydra.job.num={number}"]
        raw = compose_raw(numbered, command.source, with_hydra=True)
        folders.append(str(raw.hydra.sweep.subdir))
    for name in folders:
        if folders.count(name) > 1 or "/" in name:
            raise ConfigError(
                f"hydra.sweep.subdir={subdir}: every run needs a folder of its own, without /, and "
                f"{name} is not; leave it out, or add {NUMBERED}"
            )
    jobs = []
    for name, run in zip(folders, combinations, strict=True):
        # Without Hydra's settings that are about the sweep.
        about_sweep = [t for t in run if t.startswith(("hydra.", "hydra/"))]
        about_sweep = [t for t in about_sweep if not t.startswith("hydra.searchpath")]
        jobs.append(SweepJob(folder=name, overrides=[t for t in run if t not in about_sweep]))
    return jobs
