"""A sweep's folder: its record `sweep.json`, written before the first job starts, and its jobs.

    outputs/shop/sweep_2026-11-21_19-40-00/
        sweep.json      {"verb": "train", "objective": "eval/pass@1", "options": [],
                         "shared": ["steps=6", "sweep.parallel=2"], "search": null, "jobs": [
                          {"folder": "0", "overrides": ["algorithm=grpo", "seed=0", "steps=6"]},
                          {"folder": "1", "overrides": ["algorithm=grpo", "seed=1", "steps=6"]}]}
        0/ 1/           run folders, as `agenttrain <overrides> hydra.run.dir=<sweep>/0` makes them

With `sweep.sampler=tpe` there is a `search`, and each trial's jobs are added when it is chosen. A
job's state is only in its own folder, so jobs can run in any order, on this machine or in a SLURM
array. A run folder is a job if the record of its parent folder lists it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import Timeout

from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import ConfigError
from agenttrain.utils.file_locks import file_lock
from agenttrain.utils.files import write_atomically
from agenttrain.utils.moved import overrides_in_this_layout
from agenttrain.utils.redaction import hide_secrets, shell_command
from agenttrain.utils.signing import sign, verifies

RECORD = "sweep.json"
RUNNING_FILE = ".running"
"""File that is locked by the process that runs the jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepJob:
    """One job of a sweep."""

    folder: str
    """Its name in the sweep's folder."""
    overrides: list[str]
    """All settings of the job, e.g. ["algorithm=grpo", "seed=0", "steps=6"]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialSearch:
    """A search: its trials are chosen by the results of those before them."""

    trials: int
    """Number of trials; each has a job for each of `repeats`."""
    seed: int
    """`sweep.trials_seed`."""
    direction: str
    """"maximize" or "minimize"."""
    space: list[str]
    """Axes of a trial in Hydra's grammar, e.g. ["optimizer.lr=tag(log, interval(1e-4, 2e-3))"]."""
    repeats: list[list[str]]
    """The other overrides of a trial's jobs, e.g. [["seed=0", "steps=6"], ["seed=1", "steps=6"]].
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRecord:
    """The content of sweep.json: a sweep's command, its jobs and its search.

    A sweep without a search knows all jobs from the beginning. A search adds the jobs of one trial
    at a time: one for each element of `search.repeats`, such as a seed.
    """

    verb: str
    """Verb of every job: `train`, `sft` or `eval`."""
    objective: str | None = None
    """`sweep.objective`."""
    options: list[str] = field(default_factory=list)
    """Options of the command line for every job, e.g. ["--config-dir", "/home/me/conf"]."""
    shared: list[str] = field(default_factory=list)
    """Typed overrides that do not vary, settings of the sweep and of Hydra included. Each job has
    the others of them among its own overrides too."""
    search: TrialSearch | None = None
    """None: all jobs are known."""
    jobs: list[SweepJob] = field(default_factory=list)
    """The jobs, in order."""
    signature: str | None = None
    """Signature of the user over the other fields: resuming runs code that the overrides name."""

    @property
    def lacks_trials(self) -> bool:
        """True if there are trials that the search has not chosen yet."""
        search = self.search
        return search is not None and len(self.jobs) < search.trials * len(search.repeats)

    @property
    def is_signed_by_user(self) -> bool:
        """True if this user wrote the record: overrides of others may name code to run."""
        return verifies(self.signed_fields(), self.signature)

    def signed_fields(self) -> dict[str, Any]:
        """Return the fields that the signature is computed from."""
        fields = {**asdict(self), "signature": None}
        if self.search is None:
            del fields["search"]  # records from before there were searches are signed without it
        return fields

    def arguments(self, sweep: Path, job: SweepJob, *extra: str) -> list[str]:
        """Return the arguments of `agenttrain` that start a job from its overrides.

        A job whose run has begun is resumed by other arguments.
        """
        folder = f"hydra.run.dir={quote_path(sweep / job.folder)}"
        overrides = overrides_in_this_layout(job.overrides)  # an older version may have other keys
        return [self.verb, *self.options, *overrides, *extra, folder]


def quote_path(path: Path) -> str:
    """Return a path as the value of an override.

    Example: ``Path("a=b/sweep")`` -> ``'a=b/sweep'``, with the quotes.
    """
    text = str(path)
    plain = all(letter.isalnum() or letter in "/_-.:" for letter in text)
    return text if plain else "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def settings_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Map the keys of overrides to their values; the last value of a key wins.

    Example: ``["seed=0", "++tools.sql.timeout_s=5"]`` -> ``{"seed": "0", "tools.sql.timeout_s":
    "5"}``.
    """
    pairs = (text.lstrip("+").partition("=") for text in overrides)
    return {key: value for key, _, value in pairs}


def varying_settings(record: SweepRecord) -> list[dict[str, str]]:
    """Return, for each job, the settings in which the jobs differ.

    Example: ``[{"algorithm": "grpo", "seed": "0"}, {"algorithm": "grpo", "seed": "1"}]`` gives
    ``[{"seed": "0"}, {"seed": "1"}]``.
    """
    settings = [settings_by_key(job.overrides) for job in record.jobs]
    keys = dict.fromkeys(key for values in settings for key in values)
    differ = [key for key in keys if len({values.get(key) for values in settings}) > 1]
    return [{key: values[key] for key in differ if key in values} for values in settings]


def settings_line(values: Mapping[str, str]) -> str:
    """Return settings in a line: ``"algorithm=grpo optimizer.lr=8e-4"``."""
    return hide_secrets(" ".join(f"{key}={value}" for key, value in values.items()))


def is_sweep(folder: Path) -> bool:
    """Return True if the folder is a sweep's."""
    return (folder / RECORD).is_file()


def is_job(folder: Path) -> bool:
    """Return True if a run folder is that of a sweep's job."""
    sweep = folder.resolve().parent
    names = [job.folder for job in read_record(sweep).jobs] if is_sweep(sweep) else []
    return folder.resolve().name in names


def read_record(sweep: Path) -> SweepRecord:
    """Read the record of a sweep; raises ConfigError for a folder without a readable one."""
    try:
        fields = json.loads((sweep / RECORD).read_text(encoding="utf-8"))
        jobs = [SweepJob(**job) for job in fields["jobs"]]
        search = TrialSearch(**fields["search"]) if fields.get("search") else None
        return SweepRecord(**{**fields, "search": search, "jobs": jobs})
    except FileNotFoundError as error:
        raise ConfigError(f"{sweep}: is no sweep's folder: there is no {RECORD} in it") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{sweep / RECORD}: is no record of a sweep: {error}") from error


def write_record(sweep: Path, record: SweepRecord) -> None:
    """Write the record of a sweep with the user's signature; create its folder if there is none."""
    sweep.mkdir(parents=True, exist_ok=True)
    signed = replace(record, signature=sign(record.signed_fields()))
    write_atomically(sweep / RECORD, json.dumps(asdict(signed), indent=1) + "\n")


@contextmanager
def hold_sweep(sweep: Path) -> Iterator[None]:
    """Keep other processes from starting the sweep's jobs; raises ConfigError if one has it."""
    # A stack, because only errors of taking the lock are translated, not those of the block.
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(sweep / RUNNING_FILE, blocking=False))
        except Timeout as error:
            raise ConfigError(
                f"{sweep}: another process runs this sweep, and starts the jobs that wait; wait "
                f"for it or stop it, and watch it with {shell_command(['compare', str(sweep)])}"
            ) from error
        yield


FINISHED, RUNNING, NEVER_STARTED = "finished", "running", "never started"
FAILED, INTERRUPTED = "failed", "interrupted"
KILLED = "killed"
"""Ended without writing a status."""
ENDED = (FINISHED, FAILED, INTERRUPTED, "preempted")
"""Statuses in the summary of a run that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job of a sweep with its state."""

    job: SweepJob
    folder: Path
    """Folder of the job's run."""
    status: str
    """Status in the run's summary, or RUNNING, NEVER_STARTED or KILLED."""
    error: str | None = None
    """The error of a failed job."""

    @property
    def unfinished(self) -> bool:
        """True if the job has to be run or resumed."""
        return self.status not in (FINISHED, RUNNING)


def job_states(sweep: Path, record: SweepRecord) -> list[JobState]:
    """Return the states of all jobs of the sweep, in order."""
    return [job_state(sweep / job.folder, job) for job in record.jobs]


def job_state(folder: Path, job: SweepJob) -> JobState:
    """Return the state of the job in `folder`."""
    summary = read_summary(folder)
    recorded = summary.get("status")
    if not summary:
        status = NEVER_STARTED
    elif is_held(folder):  # comes first: the summary of a resumed run still has the old status
        status = RUNNING
    else:  # no process works in the folder: a run that is not recorded as ended was killed
        status = KILLED if recorded in (None, RUNNING) else str(recorded)
    error = summary.get("error") if status == FAILED else None
    return JobState(job=job, folder=folder, status=status, error=error)


def is_held(folder: Path) -> bool:
    """Return True if a process works in a run folder; always False without file locks."""
    try:
        # A run locks this file exclusively: a shared lock is refused while it works.
        with (folder / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def status_counts(jobs: Sequence[JobState]) -> str:
    """Count the jobs by status, e.g. "6 finished, 1 failed, 1 never started"."""
    statuses = [job.status for job in jobs]
    order = dict.fromkeys([*ENDED, KILLED, RUNNING, NEVER_STARTED, *statuses])
    counts = {status: statuses.count(status) for status in order}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
