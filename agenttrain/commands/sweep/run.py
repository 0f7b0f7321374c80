"""Runner of a sweep's jobs, several at a time: those of the record, and those of a search."""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from agenttrain.commands.sweep.config import Direction, OnFailedJob, SweepConfig
from agenttrain.commands.sweep.expand import REPEATED, parse, trial_overrides
from agenttrain.commands.sweep.process import Forwarder, JobEnd, JobProcess, forward_signals
from agenttrain.commands.sweep.record import (
    ENDED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    SweepJob,
    SweepRecord,
    TrialSearch,
    is_held,
    job_state,
    job_states,
    read_record,
    settings_by_key,
    settings_line,
    status_counts,
    varying_settings,
    write_record,
)
from agenttrain.commands.sweep.search import Trial, next_trial
from agenttrain.commands.sweep.table import results
from agenttrain.launch.config import DistributedName
from agenttrain.settings.command_line import TRUSTED
from agenttrain.settings.machine import machine_problems
from agenttrain.settings.run_config import RunConfig
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.types import ConfigError
from agenttrain.utils import exit_codes
from agenttrain.utils.redaction import shell_command

OUTPUT = "output.txt"
"""File in a job's folder: its output, if several run at once."""
POLL_S = 0.2
"""Seconds between two checks of the jobs' processes."""
THREADS = "OMP_NUM_THREADS"
GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A recorded sweep, with all that `run` needs to start its jobs."""

    folder: Path
    """Folder of the sweep, with its record."""
    settings: SweepConfig
    shares: list[dict[str, str]]
    """Environment variables of each slot for a job, which divide GPUs and cores among the slots:
    see `divide_machine`."""
    changes: list[str] = field(default_factory=list)
    """Overrides by which `agenttrain -m resume=…` changes every job."""
    trust: bool = False
    """True: the code that is named in the jobs' config.yaml may run."""


def divide_machine(
    verb: str, parallel: int, configs: Sequence[RunConfig], count_gpus: Callable[[], int]
) -> list[dict[str, str]]:
    """Divide this machine's GPUs and cores among `parallel` jobs, which have these `configs`.

    Example: 2 jobs, 8 cores, 4 GPUs -> ``[{"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "0,1"},
    {"OMP_NUM_THREADS": "4", "CUDA_VISIBLE_DEVICES": "2,3"}]``. All jobs share a single GPU. Raises
    ConfigError.
    """
    if parallel == 1:
        return [{}]
    shares: list[dict[str, str]] = [{} for _ in range(parallel)]
    gpus = count_gpus()
    key = f"sweep.parallel={parallel}"
    if gpus > 1:
        if gpus % parallel:
            sizes = [str(n) for n in range(2, gpus + 1) if gpus % n == 0]
            raise ConfigError(
                f"{key}: {gpus} GPUs cannot be divided among {parallel} jobs; take "
                f"{' or '.join(sizes)}, or name the GPUs that divide: {GPUS}=…"
            )
        gpus_per_job = gpus // parallel
        if problems := machine_problems(verb, configs, lambda: gpus_per_job):
            heading = f"{key}: each job has {gpus_per_job} of {gpus} GPUs"
            raise ConfigError("\n".join([heading, *problems]))
        # The user may have named the GPUs that may be used, by number or UUID.
        visible = os.environ.get(GPUS, "").split(",")
        names = visible if len(visible) >= gpus else [str(number) for number in range(gpus)]
        for number, share in enumerate(shares):
            start = number * gpus_per_job
            share[GPUS] = ",".join(names[start : start + gpus_per_job])
    if THREADS not in os.environ:
        ranks = 1  # processes of a job, which all inherit the variable
        for config in configs:
            if config.distributed.name is not DistributedName.single:
                ranks = max(ranks, config.distributed.processes or gpus // parallel)
        threads = max(len(os.sched_getaffinity(0)) // (parallel * ranks), 1)
        shares = [{THREADS: str(threads), **share} for share in shares]
    return shares


def run(sweep: Sweep) -> int:
    """Run every unfinished job, and the trials of a search; return the exit code.

    After a signal it is the code of the first job that did not end well, and INTERRUPTED if all
    did. Otherwise `print_outcome` returns FAILED if a job is not finished. Needs a `hydra_session`,
    and the main thread.
    """
    folder = sweep.folder.resolve()
    stop_on_failure = sweep.settings.on_failed_job is OnFailedJob.stop
    record = read_record(folder)
    waiting = deque(state.job for state in job_states(folder, record) if state.unfinished)
    # Slot, the index of a share of the machine -> the job that has it.
    running: dict[int, tuple[SweepJob, JobProcess]] = {}
    code, stopped = exit_codes.DONE, False
    with forward_signals() as signals:
        while True:
            slots = [slot for slot in range(len(sweep.shares)) if slot not in running]
            while slots and not stopped and not signals.received:
                if not waiting:
                    waiting.extend(_next_jobs(folder))
                if not waiting:
                    break
                job = waiting.popleft()
                process = _start(sweep, folder, job, sweep.shares[slots[0]], signals)
                if process is not None:  # None: another process runs it or has finished it
                    running[slots.pop(0)] = job, process
            if not running:
                break
            slot, end = _wait(running)
            job, process = running.pop(slot)
            signals.jobs = [other for other in signals.jobs if other is not process]
            record_end(folder / job.folder, end, signalled=bool(signals.received))
            finished = _print_end(folder, job)
            if signals.received:
                code = code or end.code  # of the first job that did not end well
            elif stop_on_failure and not finished and not stopped:
                print("the others wait: sweep.on_failed_job=stop", flush=True)
                stopped = True
        if signals.received:
            code = code or exit_codes.INTERRUPTED
    return print_outcome(sweep.folder, code)


def _wait(running: dict[int, tuple[SweepJob, JobProcess]]) -> tuple[int, JobEnd]:
    """Wait until one of the jobs has ended; return its slot and how it ended."""
    while True:
        for slot, (_, process) in running.items():
            if end := process.poll():
                return slot, end
        time.sleep(POLL_S)


def _start(
    sweep: Sweep, folder: Path, job: SweepJob, share: dict[str, str], signals: Forwarder
) -> JobProcess | None:
    """Start a job, and return its process; None if another process runs or finished it.

    `folder` is the sweep's absolute folder. `share` has the environment variables that give the job
    its share of GPUs and cores.
    """
    record, job_folder = read_record(folder), folder / job.folder
    if is_held(job_folder):
        print(f"{job_folder}: another process works there; it is left alone", flush=True)
        return None
    if job_state(job_folder, job).status == FINISHED:  # by another process
        print(f"{job_folder}: has finished in the meantime", flush=True)
        return None
    print(f"\n{_job_title(record, job)} -> {job_folder}", flush=True)
    if read_summary(job_folder):
        update_summary(job_folder, status=None, error=None)  # remove those of the last attempt
    output = None  # the terminal
    if len(sweep.shares) > 1:  # several jobs at once would mix their lines there
        job_folder.mkdir(parents=True, exist_ok=True)
        output = job_folder / OUTPUT
    arguments = _job_arguments(folder, record, job, sweep.changes, sweep.trust)
    process = JobProcess(arguments, output, share)
    signals.add(process)
    return process


def _job_title(record: SweepRecord, job: SweepJob) -> str:
    """Return number and settings of a job: ``job 2 of 4: algorithm=grpo seed=1``."""
    number, total = _job_number(record, job), len(record.jobs)
    if record.search is None:
        values = varying_settings(record)[number - 1]
    else:
        # Trials that are not chosen yet have no jobs in the record. What may differ between all
        # jobs are the axes of the search, and the seed (REPEATED).
        total = record.search.trials * len(record.search.repeats)
        keys = {*settings_by_key(record.search.space), REPEATED}
        values = {
            key: value for key, value in settings_by_key(job.overrides).items() if key in keys
        }
    return f"job {number} of {total}: {settings_line(values)}"


def _job_number(record: SweepRecord, job: SweepJob) -> int:
    """Return the job's number, from 1."""
    return [recorded.folder for recorded in record.jobs].index(job.folder) + 1


def _print_end(folder: Path, job: SweepJob) -> bool:
    """Print the state of a job that has ended; return True if it is finished."""
    record = read_record(folder)
    state = job_state(folder / job.folder, job)
    message = state.status
    if state.status != FINISHED:
        message += f": {state.error}" if state.error else ""
    elif record.objective is not None:
        objective = results(state.folder).get(record.objective)
        if objective is None:
            message += f", but it has no {record.objective}"
        else:
            message += f", {record.objective} {objective:.4g}"
    print(f"job {_job_number(record, job)}: {message}", flush=True)
    return state.status == FINISHED


def _job_arguments(
    sweep: Path, record: SweepRecord, job: SweepJob, changes: Sequence[str], trust: bool
) -> list[str]:
    """Return the arguments that start the job, or resume it."""
    folder = sweep / job.folder
    config = folder / "config.yaml"
    if record.verb == "eval":
        config.unlink(missing_ok=True)  # an evaluation cannot be resumed: it starts again
    if config.exists():
        trusted = [TRUSTED] if trust else []
        return [record.verb, *record.options, f"resume={folder}", *changes, *trusted]
    return record.arguments(sweep, job, *changes)


def record_end(folder: Path, ended: JobEnd, *, signalled: bool) -> None:
    """Record in its summary how a job ended, unless its own process has recorded it.

    `signalled`: a signal stopped the sweep, and the job with it. A job that wrote `finished` has
    failed nevertheless if its exit code is not 0. A folder in which a process still works
    (`is_held`) is left alone: that process writes the summary.
    """
    status = read_summary(folder).get("status")
    # `finished` is no record of this end: the exit code decides.
    is_recorded = status in ENDED and status != FINISHED
    if ended.code == 0 or is_held(folder) or is_recorded:
        return
    if signalled:
        update_summary(folder, status=INTERRUPTED)
        return
    words = f": {ended.last_words}" if ended.last_words else ""
    update_summary(folder, status=FAILED, error=f"exit code {ended.code}{words}")


def _next_jobs(sweep: Path) -> list[SweepJob]:
    """Choose one more trial, record its jobs and return them; none if the search is over."""
    record = read_record(sweep)
    search = record.search
    if search is None:
        return []
    past = trials(sweep, record, search)
    if len(past) >= search.trials:
        return []
    axes = {axis.get_key_element(): axis for axis in parse(search.space)}
    values = next_trial(axes, search.seed, Direction(search.direction), past)
    if values is None:
        print(f"the search finds no new values after {len(past)} trials", flush=True)
        return []
    overrides = [[*trial_overrides(axes, values), *repeat] for repeat in search.repeats]
    jobs = [
        SweepJob(folder=str(number), overrides=job_overrides)
        for number, job_overrides in enumerate(overrides, start=len(record.jobs))
    ]
    write_record(sweep, replace(record, jobs=[*record.jobs, *jobs]))
    return jobs


def trials(sweep: Path, record: SweepRecord, search: TrialSearch) -> list[Trial]:
    """Return the trials of a search with their outcomes, in the order in which they were chosen.

    A trial is complete once all of its jobs have the objective. It has failed if all of its jobs
    have ended and not all have it. Until then, also while it is interrupted, it has no result.
    """
    by_values: dict[tuple[str, ...], list[SweepJob]] = {}
    for job in record.jobs:
        settings = settings_by_key(job.overrides)
        values = tuple(settings[key] for key in settings_by_key(search.space))
        by_values.setdefault(values, []).append(job)
    past = []
    for values, jobs in by_values.items():
        states = [job_state(sweep / job.folder, job) for job in jobs]
        ended = all(state.status in (FINISHED, FAILED) for state in states)
        objectives = [
            results(state.folder).get(record.objective)
            for state in states
            if state.status == FINISHED and record.objective is not None
        ]
        numbers = [number for number in objectives if number is not None and math.isfinite(number)]
        complete = ended and len(numbers) == len(jobs)
        mean = statistics.fmean(numbers) if complete else None
        past.append(Trial(values=values, result=mean, failed=ended and not complete))
    return past


def print_outcome(sweep: Path, code: int) -> int:
    """Print the state of the sweep; return the exit code, 1 if a job is not finished."""
    record = read_record(sweep)
    jobs = job_states(sweep, record)
    print(f"\nsweep      {sweep}: {status_counts(jobs)}")
    if record.search is not None:
        past = trials(sweep, record, record.search)
        complete = [trial for trial in past if trial.result is not None]
        choose = max if record.search.direction == Direction.maximize else min
        if complete:
            best = choose(complete, key=lambda trial: cast(float, trial.result))
            values = dict(zip(settings_by_key(record.search.space), best.values, strict=True))
            print(f"best       {settings_line(values)}: {record.objective} {best.result:.4g}")
    print(f"results    {shell_command(['compare', str(sweep)])}")
    sys.stdout.flush()
    unfinished = any(job.unfinished for job in jobs)
    if unfinished or code:
        print(f"to go on   {shell_command(['-m', f'resume={sweep}'])}", flush=True)
    return code or (exit_codes.FAILED if unfinished else exit_codes.DONE)
