"""`agenttrain submit`: run `train` or `sft`, or a sweep, as a SLURM job.

All problems are reported on the machine where the command is typed: first those of settings,
template, tools and data, then those that SLURM finds in the script. The run's folder is chosen now,
so that a job that is put back into the queue resumes the run in it.
"""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from rich.console import Console
from rich.syntax import Syntax

from agenttrain.commands.check import certify, check
from agenttrain.commands.running import compose_all, compose_combinations
from agenttrain.commands.slurm import script as sbatch
from agenttrain.commands.slurm.config import SlurmConfig
from agenttrain.commands.slurm.script import (
    NAME,
    OFFLINE,
    JobScript,
    note_containers,
    note_local_paths,
    render,
)
from agenttrain.commands.sweep.command import new_sweep
from agenttrain.commands.sweep.config import OnFailedJob, Sampler, SweepConfig
from agenttrain.commands.sweep.expand import Expansion, expand
from agenttrain.commands.sweep.record import RECORD, SweepRecord, quote_path, write_record
from agenttrain.settings.checks import check_submission
from agenttrain.settings.command_line import RUN_DIR, TRUSTED, Command, command_of
from agenttrain.settings.compose import (
    Composed,
    check_writable,
    compose_new,
    compose_run,
    hydra_session,
    job_name,
    run_folder,
)
from agenttrain.settings.overrides import key_of
from agenttrain.settings.pinning import check_cached, pins
from agenttrain.types import ConfigError
from agenttrain.utils.redaction import hide_secrets

TRAINING_NODES = "distributed.nodes"
NODES = (TRAINING_NODES, "distributed.rendezvous", "distributed.node_rank")
"""Settings that the job gives each of its nodes."""
CONFIG = "config.yaml"
"""File in the folder of a run that has been started."""
ANY_ENDPOINT = "first-node:29500"
"""Placeholder for the rendezvous while settings are checked. The job knows its nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedJob:
    """A job, ready to be submitted."""

    settings: SlurmConfig
    """Section `slurm`."""
    runs: list[Composed]
    """Checked settings of the run, or of each run of a sweep."""
    script: JobScript
    """Inputs of the batch script."""
    record: SweepRecord | None
    """Record of the sweep. None: a single run."""
    resumes: bool
    """True: the run exists already, and the job resumes it."""


def submit(args: Namespace, overrides: Sequence[str]) -> int:
    """Submit a run or sweep; exit code 1: a template fails its certificate. Raises ConfigError."""
    if not args.dry_run and not sbatch.has_sbatch():
        raise ConfigError(sbatch.ABSENT)
    command, plan = _checked_plan(args.target, args, overrides)
    folder = plan.script.folder
    if not args.dry_run:
        check_writable(folder, f"{folder}", f"name another folder: {RUN_DIR}…")
    text = render(plan.script, plan.settings)
    # A dry run prints only the script to stdout, so that it can be redirected to a file.
    output = sys.stderr if args.dry_run else sys.stdout
    # Certificates are checks of the chat templates: a run whose template fails would not train.
    with _offline_if(plan.settings.offline), redirect_stdout(output):
        if not args.no_check and not certify(plan.runs, command.verb):
            return 1
    configs = [run.config for run in plan.runs]
    for note in (*note_local_paths(plan.script, configs), *note_containers(configs)):
        print(f"note: {note}", file=sys.stderr)
    _print_script(text)
    if args.dry_run:
        _lint_if_possible(text)
        return 0
    print(sbatch.lint(text), file=sys.stderr)
    _submit(plan, text)
    return 0


def _lint_if_possible(script: str) -> None:
    """Let SLURM check a script that is not submitted; say so if it cannot."""
    if not sbatch.has_sbatch():
        print("note: not checked by SLURM: there is no sbatch here", file=sys.stderr)
        return
    try:
        print(sbatch.lint(script), file=sys.stderr)
    except sbatch.ClusterUnreachable as error:
        print(f"note: not checked by SLURM: {error}", file=sys.stderr)


def check_job(args: Namespace, overrides: Sequence[str]) -> int:
    """Check a training job as `submit` does; exit code 1: a certificate did not pass.

    Raises ConfigError. The machine is not checked: the job's is another one.
    """
    command, plan = _checked_plan("train", args, overrides)
    with _offline_if(plan.settings.offline):
        return check(command.verb, plan.runs)


def _checked_plan(
    verb: str, args: Namespace, overrides: Sequence[str]
) -> tuple[Command, PlannedJob]:
    """Return the command that a job runs, and the job, with its settings and folder checked."""
    command, slurm = _split_slurm(verb, args, overrides)
    with hydra_session(command.source):
        plan = _plan_job(command, slurm)
    folder = plan.script.folder
    # The files of a run (config.yaml), a sweep (sweep.json) and a job (job.sbatch).
    if not plan.resumes and any((folder / name).exists() for name in (CONFIG, RECORD, NAME)):
        raise ConfigError(
            f"{folder}: holds a run or a job already; `sbatch {quote(str(plan.script.path))}` "
            "submits a job again and agenttrain submit resume=… goes on with a run; another "
            "hydra.run.dir= starts a new one"
        )
    if plan.settings.offline:
        check_cached([run.config for run in plan.runs], command.verb)
    return command, plan


def _print_script(text: str) -> None:
    """Print the script without secrets, in colours on a terminal."""
    console, public_text = Console(), hide_secrets(text)
    if public_text != text:
        print("note: *** stands for secrets in addresses; name variables: $NAME", file=sys.stderr)
    if console.is_terminal:
        console.print(Syntax(public_text, "bash", background_color="default", word_wrap=True))
    else:
        print(public_text, end="", flush=True)


def _split_slurm(verb: str, args: Namespace, overrides: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command of the run, and the overrides of the job's section `slurm`.

    Example: ``["steps=5", "slurm.gpus=4"]`` -> a command with ``["steps=5"]``, and
    ``["slurm.gpus=4"]``. The number of nodes may move from one to the other (`_with_allocation`).
    Raises ConfigError for what the job adds itself: ``resume=auto`` (`command.auto`), and how many
    nodes train and where they meet (NODES).
    """
    slurm = [text for text in overrides if key_of(text).partition(".")[0] == "slurm"]
    command = command_of(verb, args, [text for text in overrides if text not in slurm])
    if command.auto:
        raise ConfigError(
            "resume=auto: the job adds it itself; leave it out, or name a run: resume=<folder>"
        )
    command, slurm = _with_allocation(command, slurm)
    for text in command.overrides:
        key = text.lstrip("+").partition("=")[0]
        if key in NODES:
            raise ConfigError(f"{text}: the job sets it; give slurm.nodes=…")
    return command, slurm


def _with_allocation(command: Command, slurm: list[str]) -> tuple[Command, list[str]]:
    """Replace `distributed.nodes` by the job's `slurm.nodes`, if `servers.nodes` is given too.

    Example: `servers.nodes=2 distributed.nodes=4` becomes `servers.nodes=2 slurm.nodes=6`.
    """
    values = {text.partition("=")[0]: text.partition("=")[2] for text in command.overrides}
    training, serving = values.get(TRAINING_NODES, ""), values.get("servers.nodes", "")
    if not (training.isdecimal() and serving.isdecimal() and int(serving)):
        return command, slurm
    total = f"slurm.nodes={int(training) + int(serving)}"
    for text in slurm:
        if key_of(text) == "slurm.nodes" and text != total:
            raise ConfigError(
                f"{text}: {TRAINING_NODES}={training} and servers.nodes={serving} make {total}; "
                "leave it out"
            )
    overrides = [text for text in command.overrides if not text.startswith(f"{TRAINING_NODES}=")]
    return replace(command, overrides=overrides), [*slurm, total]


def _plan_job(command: Command, slurm: Sequence[str]) -> PlannedJob:
    """Compose the job and its script. Needs a `hydra_session`. Raises ConfigError.

    Three sets of overrides are composed: those of the first run with `slurm`, for the job's size
    (`first`); those with the nodes that the job will set, to check each run as it will start
    (`runs`); and those without these nodes, for the folder and the arguments in the script, because
    the script adds the nodes when the job knows them.
    """
    source = command.source
    if command.saved is not None:
        return _plan_resumed(command, slurm, command.saved.absolute())
    overrides = command.overrides  # of a single run; below, of a sweep's first run
    expansion = expand(command.overrides, source) if command.sweep else None
    if expansion is not None:
        overrides = expansion.runs[0]
        _check_same_processes(command.overrides, expansion.runs)
    try:
        composed = compose_run([*overrides, *slurm], source, with_hydra=True)
    except ConfigError as error:
        run = f"in the run {' '.join(overrides)}\n" if command.sweep else ""
        raise ConfigError(f"{run}{error}") from error
    first = composed.config
    check_submission(first)
    # By default one process per GPU of the job: this machine may have fewer GPUs.
    gpus = first.slurm.gpus if first.distributed.name != "single" else 0
    processes = list[str]()
    if gpus and first.distributed.processes is None:
        processes = [f"distributed.processes={gpus}"]
    command = replace(command, overrides=[*command.overrides, *processes])
    # The job adds its nodes itself: here they are only checked with the other settings.
    # The job's nodes without those of the servers are left to the training.
    nodes = first.slurm.nodes - first.servers.nodes
    rendezvous = [f"distributed.nodes={nodes}", f"distributed.rendezvous={ANY_ENDPOINT}"]
    set_by_job = rendezvous if nodes > 1 else []
    if expansion is not None:
        expansion = expansion.with_overrides(*processes)
        runs = compose_combinations(command, expansion.with_overrides(*set_by_job).runs)
        return _plan_sweep(command, composed, runs, expansion)
    runs = compose_all(replace(command, overrides=[*command.overrides, *set_by_job]))
    composed = runs[0]
    if set_by_job:  # the folder may be named after the overrides, without those of the job's nodes
        composed = compose_new(command.overrides, source, starts=True)
    folder = run_folder(composed, command.overrides, source)
    settings = [text for text in command.overrides if not text.startswith(RUN_DIR)]
    # The job loads the revisions that were checked here, whatever the hub has by then.
    commits = pins(runs[0], command.verb)
    # resume=auto: a job that is put back into the queue goes on in the same folder.
    resume = ["resume=auto", f"{RUN_DIR}{quote_path(folder)}"]
    arguments = [command.verb, *command.options, *settings, *commits, *resume]
    script = _job_script(folder, job_name(composed), [arguments], runs[0])
    return PlannedJob(settings=first.slurm, runs=runs, script=script, record=None, resumes=False)


def _check_same_processes(overrides: Sequence[str], runs: Sequence[Sequence[str]]) -> None:
    """Raise ConfigError if a setting of `distributed` varies between the runs of a sweep."""
    for text in overrides:
        varies = any(text not in run for run in runs)
        if varies and key_of(text).partition(".")[0] == "distributed":
            raise ConfigError(f"{text}: all jobs of an array have the same processes")


def _plan_resumed(command: Command, slurm: Sequence[str], folder: Path) -> PlannedJob:
    """Plan the job that resumes the run in `folder`.

    `slurm` are the overrides of slurm.*. They are composed apart from the run: the job is a new
    one, which does not inherit the section `slurm` that the run has saved.
    """
    job = compose_run(slurm, command.source, with_hydra=True)
    settings = job.config.slurm
    runs = compose_all(command)
    check_submission(replace(runs[0].config, slurm=settings))
    trust = [TRUSTED] if command.trust else []
    arguments = [command.verb, *command.options, f"resume={folder}", *command.overrides, *trust]
    script = _job_script(folder, job_name(job), [arguments], runs[0])
    return PlannedJob(settings=settings, runs=runs, script=script, record=None, resumes=True)


def _plan_sweep(
    command: Command, composed: Composed, runs: list[Composed], expansion: Expansion
) -> PlannedJob:
    """Plan the job array of a sweep.

    `runs` are its checked runs, with the nodes and processes that the job adds. `composed` is the
    first run as typed. It alone has the job's name and section `slurm`.
    """
    first = composed.config
    _check_sweep(first.sweep)
    if first.servers.nodes:  # each job of an array has its own nodes, all of which train
        raise ConfigError(
            f"servers.nodes={first.servers.nodes}: the jobs of an array have no nodes for "
            "servers; submit the runs one by one, or leave it out"
        )
    folder, record = new_sweep(command, runs, expansion)
    folder = folder.absolute()
    # A job that is put back into the queue resumes its run.
    jobs = [record.arguments(folder, job, "resume=auto") for job in record.jobs]
    script = _job_script(folder, job_name(composed), jobs, runs[0], array=True)
    return PlannedJob(settings=first.slurm, runs=runs, script=script, record=record, resumes=False)


def _check_sweep(settings: SweepConfig) -> None:
    """Raise ConfigError for settings of a sweep that a job array does not support."""
    if settings.sampler is not Sampler.random:
        raise ConfigError(
            f"sweep.sampler={settings.sampler.value}: chooses a trial by the results of those "
            "before it, and the jobs of an array are known when it is submitted; leave it out "
            "(sweep=random draws all at once), or run agenttrain -m where the GPUs are, with "
            "sweep.parallel=…"
        )
    if settings.parallel != 1:
        raise ConfigError(
            f"sweep.parallel={settings.parallel}: is for one machine; write slurm.concurrent="
            f"{settings.parallel}, or leave it out: the cluster starts as many as it can"
        )
    if settings.on_failed_job is OnFailedJob.stop:
        raise ConfigError(
            "sweep.on_failed_job=stop: the jobs of an array start by themselves; leave it out"
        )


def _job_script(
    folder: Path, name: str, jobs: Sequence[Sequence[str]], first: Composed, *, array: bool = False
) -> JobScript:
    """Return the script of these jobs. Raises ConfigError for a folder that SLURM cannot name.

    Each of `jobs` is the arguments of one `agenttrain` command. `first` is the run of the first
    one, whose servers the script starts.
    """
    if not f"{folder}{Path.cwd()}".isprintable():  # a line break would end an #SBATCH line
        raise ConfigError(f"{str(folder)!r}: SLURM takes no such folder name; give another one")
    return JobScript(
        name=name,
        folder=folder,
        workdir=Path.cwd(),
        jobs=jobs,
        array=array,
        servers=first.config.servers,
        python=Path(sys.executable),
    )


@contextmanager
def _offline_if(offline: bool) -> Iterator[None]:
    """If `offline`, keep the block off the network, so that missing data sets are noticed now."""
    previous = {name: os.environ.get(name) for name in OFFLINE}
    if offline:
        os.environ.update(dict.fromkeys(OFFLINE, "1"))
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _submit(plan: PlannedJob, text: str) -> None:
    """Write the script and a sweep's record, submit the job, and print how to follow it."""
    script, folder, array = plan.script, plan.script.folder, plan.script.array
    folder.mkdir(parents=True, exist_ok=True)
    if plan.record is not None:
        write_record(folder, plan.record)
        for job in plan.record.jobs:
            (folder / job.folder).mkdir(parents=True, exist_ok=True)
    script.path.write_text(text, encoding="utf-8")
    number = sbatch.submit(script.path)
    log = script.log.name.replace("%j", number).replace("%A_%a", f"{number}_<job>")
    count = f", {len(script.jobs)} jobs in an array" if array else ""
    lines = {
        "submitted": f"{number}{count}",
        "folder": f"{folder}",
        "log": f"tail -F {quote(f'{folder}/{log}')}",
        "watch": f"squeue --job {number}",
        "cancel": f"scancel {number}" + (f", one job: scancel {number}_<job>" if array else ""),
        "go on": f"sbatch {'--array=<job> ' if array else ''}{quote(str(script.path))}",
    }
    print("\n".join(f"{name:<11}{text}" for name, text in lines.items()), flush=True)
