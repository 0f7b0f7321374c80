"""`agenttrain -m …`: start a new sweep, or resume one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from agenttrain.commands.sweep.config import SweepConfig
from agenttrain.commands.sweep.expand import Expansion, expand, parse, trial_overrides
from agenttrain.commands.sweep.record import (
    JobState,
    SweepJob,
    SweepRecord,
    hold_sweep,
    is_job,
    is_sweep,
    job_states,
    read_record,
    write_record,
)
from agenttrain.commands.sweep.run import Sweep, divide_machine, print_outcome, run
from agenttrain.commands.sweep.search import check_space, corners
from agenttrain.launch.processes import count_gpus
from agenttrain.settings.checks import check_for_verb, validate
from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed, Source, check_writable, compose_raw
from agenttrain.settings.overrides import key_of
from agenttrain.settings.pinning import pins
from agenttrain.settings.resumable import RESUMABLE, may_change
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.saved import settings_for_resume
from agenttrain.settings.trust import check_trusted
from agenttrain.types import ConfigError
from agenttrain.utils.moved import overrides_in_this_layout
from agenttrain.utils.redaction import shell_command
from agenttrain.utils.sections import validated

NUMBERED = "${hydra.job.num}"
"""Default of hydra.sweep.subdir."""
CHANGEABLE = ("sweep.parallel", "sweep.on_failed_job", "sweep.trials")
"""Settings of a sweep that may change with `-m resume=`; `sweep.trials` only for a search."""


def start(command: Command, runs: Sequence[Composed]) -> int:
    """Record a new sweep of checked runs, and run it. Needs a `hydra_session`."""
    expansion = expand(command.overrides, command.source)
    folder, record = new_sweep(command, runs, expansion)
    settings, configs = runs[0].config.sweep, [run.config for run in runs]
    shares = divide_machine(command.verb, settings.parallel, configs, count_gpus)
    key = "hydra.sweep.dir="
    check_writable(folder, f"{key}{folder}", f"name another folder: {key}…")
    write_record(folder, record)
    with hold_sweep(folder):
        return run(Sweep(folder=folder, settings=settings, shares=shares))


def new_sweep(
    command: Command, runs: Sequence[Composed], expansion: Expansion
) -> tuple[Path, SweepRecord]:
    """Return folder and record of a new sweep; writes nothing.

    `runs` are the checked runs of the `expansion`, which is that of the command's overrides.
    Raises ConfigError. Needs a `hydra_session`.
    """
    source, raw = command.source, expansion.raw
    folder = Path(raw.hydra.sweep.dir)
    if is_sweep(folder):
        resume = shell_command(["-m", f"resume={folder}"])
        raise ConfigError(
            f"hydra.sweep.dir={folder}: holds a sweep already; {resume} runs its unfinished jobs, "
            "another name starts a new one"
        )
    # An absolute path, because a job may be started in another folder.
    options = ["--config-dir", str(Path(source.extra).resolve())] if source.extra else []
    options += ["--config-name", source.name] if source.name != "train" else []
    # The text of the setting: Hydra would resolve ${hydra.job.num}, which differs between the jobs.
    subdir = str(raw.hydra.sweep._get_node("subdir")._value())
    # Overrides that pin models and data of each run to the commits of the hub.
    commits = [pins(run, command.verb) for run in runs]
    search, jobs = expansion.search, list[SweepJob]()
    if search is None:
        pairs = zip(expansion.runs, commits, strict=True)
        jobs = _make_jobs([[*words, *added] for words, added in pairs], source, subdir)
    else:  # the search makes its jobs later
        if subdir != NUMBERED:
            raise ConfigError(
                f"hydra.sweep.subdir={subdir}: a search numbers its jobs; leave it out"
            )
        # Pin only the models that all runs share: a search may vary the model.
        common_commits = sorted(set.intersection(*map(set, commits)))
        repeats = [[*_without_hydras_keys(repeat), *common_commits] for repeat in search.repeats]
        search = replace(search, repeats=repeats)
    record = SweepRecord(
        verb=command.verb,
        objective=runs[0].config.sweep.objective,
        options=options,
        shared=expansion.fixed,
        search=search,
        jobs=jobs,
    )
    return folder, record


def resume(command: Command, compose: Callable[[Sequence[str], Command], Composed]) -> int:
    """Run the unfinished jobs of a sweep; `compose` checks a new run. Needs a `hydra_session`."""
    folder = command.saved
    assert folder is not None, "resume() needs resume="
    record = read_record(folder)
    check_writable(folder, f"resume={folder}", "make it writable")
    with hold_sweep(folder):
        return _resume_held(folder, record, command, compose)


def _resume_held(
    folder: Path,
    record: SweepRecord,
    command: Command,
    compose: Callable[[Sequence[str], Command], Composed],
) -> int:
    """Run the unfinished jobs of the sweep, which this process holds (`hold_sweep`).

    The overrides of the command are of two kinds: settings of the sweep itself (CHANGEABLE, such as
    sweep.parallel), and settings of every job that a resumed run may change (RESUMABLE, such as
    steps). Checks them and the jobs before the first one starts.
    """
    _check_code_trusted(folder, record, trust=command.trust)
    sweep_changes = [text for text in command.overrides if key_of(text) in CHANGEABLE]
    changes = [text for text in command.overrides if text not in sweep_changes]
    for text in changes:
        if not may_change(key_of(text), RESUMABLE):
            raise ConfigError(
                f"{text}: cannot be combined with resume={folder}; what may change is: "
                f"{', '.join([*RESUMABLE, *CHANGEABLE])}"
            )
    # The overrides that all jobs share. An older version may have recorded them under other keys:
    # they get today's.
    shared = overrides_in_this_layout(_without_hydras_keys(record.shared))
    raw = compose_raw([*shared, *sweep_changes], command.source)
    section = cast(dict[str, Any], OmegaConf.to_container(raw.sweep, enum_to_str=True))
    settings = validated(SweepConfig, section, "sweep")
    if any(key_of(text) == "sweep.trials" for text in sweep_changes):
        record = _with_trials(folder, record, settings.trials or 0)
    jobs = job_states(folder, record)
    configs = _compose_unfinished(record, jobs, changes, command, compose)
    if not configs:
        if command.overrides:
            raise ConfigError(
                f"{command.overrides[0]}: no job of {folder} is unfinished; a finished one goes on "
                f"alone: agenttrain resume={jobs[0].folder if jobs else '…'} steps=…"
            )
        return print_outcome(folder, 0)
    sweep = Sweep(
        folder=folder,
        settings=settings,
        shares=divide_machine(record.verb, settings.parallel, configs, count_gpus),
        changes=changes,
        # The user has agreed to run all code above; the jobs have no terminal on which to ask.
        trust=True,
    )
    return run(sweep)


def _check_code_trusted(folder: Path, record: SweepRecord, *, trust: bool) -> None:
    """Ask whether the code that the recorded settings name may run, unless this user signed them.

    Raises ConfigError if it may not.
    """
    recorded = [shell_command(record.arguments(folder, job)) for job in record.jobs]
    recorded += record.shared
    if record.search is not None:
        repeats = record.search.repeats
        recorded += [*record.search.space, *(text for repeat in repeats for text in repeat)]
    untrusted = [] if record.is_signed_by_user else recorded
    check_trusted(f"resume={folder}", untrusted, trust=trust, what="its sweep.json")


def _compose_unfinished(
    record: SweepRecord,
    jobs: Sequence[JobState],
    changes: Sequence[str],
    command: Command,
    compose: Callable[[Sequence[str], Command], Composed],
) -> list[RunConfig]:
    """Return the checked settings of unfinished jobs, with the `changes` of the resuming command.

    Trials to come are not chosen yet: one possible trial is checked in their place, with the first
    value of each axis (a corner of the search space) and the first of the seeds with which each
    trial is repeated.
    """
    configs = []
    for job in jobs:
        if not job.unfinished:
            continue
        if (job.folder / "config.yaml").exists() and record.verb != "eval":
            # It has begun, and is resumed. An evaluation cannot be: it starts again.
            composed = settings_for_resume(job.folder, changes, command.source, trust=command.trust)
            validate(composed.config)
            check_for_verb(record.verb, composed.config)
        else:
            overrides = overrides_in_this_layout(job.job.overrides)
            composed = compose([*overrides, *changes], command)
        configs.append(composed.config)
    if record.search is not None and record.lacks_trials:
        axes = {axis.get_key_element(): axis for axis in parse(record.search.space)}
        example = [*trial_overrides(axes, corners(axes)[0]), *record.search.repeats[0]]
        configs.append(compose([*example, *changes], command).config)
    return configs


def _with_trials(folder: Path, record: SweepRecord, trials: int) -> SweepRecord:
    """Set the number of trials in the record, write it, and return it; raises ConfigError."""
    key = f"sweep.trials={trials}"
    if record.search is None:
        raise ConfigError(
            f"{key}: all jobs of {folder} were known when it was started; leave it out"
        )
    chosen = len(record.jobs) // len(record.search.repeats)
    if trials < max(chosen, 1):
        raise ConfigError(f"{key}: {folder} has {chosen} trials already; raise it, or leave it out")
    check_space({axis.get_key_element(): axis for axis in parse(record.search.space)}, trials)
    record = replace(record, search=replace(record.search, trials=trials))
    write_record(folder, record)
    return record


def check_outside_sweep(overrides: Sequence[str]) -> None:
    """Raise ConfigError for settings of a sweep in a run that is not a job of a sweep.

    At least one of the `overrides` is a setting of `sweep`.
    """
    typed = [text for text in overrides if key_of(text).split(".")[0] == "sweep"]
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    folders = [o.value() for o in parsed if o.key_or_group == "hydra.run.dir"]
    if not folders or not is_job(Path(str(folders[-1]))):
        raise ConfigError(f"{typed[0]}: has no effect in a single run; add -m, or leave it out")


def _make_jobs(runs: Sequence[Sequence[str]], source: Source, subdir: str) -> list[SweepJob]:
    """Return a job for each run of a sweep; raises ConfigError if two would share a folder."""
    folders = []
    for number, overrides in enumerate(runs):
        if subdir == NUMBERED:
            folders.append(str(number))
            continue
        # Resolve the name as Hydra does for this job: it may have the job's number or settings.
        numbered = [*overrides, f"++hydra.job.num={number}"]
        raw = compose_raw(numbered, source, with_hydra=True)
        folders.append(str(raw.hydra.sweep.subdir))
    for name in folders:
        if folders.count(name) > 1 or "/" in name:
            raise ConfigError(
                f"hydra.sweep.subdir={subdir}: every run needs a folder of its own, without /, and "
                f"{name} is not; leave it out, or add {NUMBERED}"
            )
    pairs = zip(folders, runs, strict=True)
    return [SweepJob(folder=name, overrides=_without_hydras_keys(run)) for name, run in pairs]


def _without_hydras_keys(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that a job gets: all but Hydra's own, of which it needs searchpath."""
    return [
        text
        for text in overrides
        if not text.startswith(("hydra.", "hydra/")) or text.startswith("hydra.searchpath")
    ]
