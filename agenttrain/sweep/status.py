"""How the jobs of a sweep stand, read from their folders."""

from __future__ import annotations

import fcntl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agenttrain.sweep.record import SweepJob, SweepRecord
from agenttrain.tracking.run_folder import read_summary

FINISHED, RUNNING, NEVER_STARTED = "finished", "running", "never started"
FAILED, INTERRUPTED = "failed", "interrupted"
KILLED = "killed"
"""Began and ended without a word of it."""
ENDED = (FINISHED, FAILED, INTERRUPTED, "preempted")
"""Statuses in the summary of a run that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One job and how it stands."""

    job: SweepJob
    folder: Path
    status: str
    error: str | None = None
    """The error that it failed with."""

    @property
    def unfinished(self) -> bool:
        """True if there is something left to run."""
        return self.status not in (FINISHED, RUNNING)


def standings(sweep: Path, record: SweepRecord) -> list[Standing]:
    """Return every job of the sweep, in order."""
    return [standing(sweep / job.folder, job) for job in record.jobs]


def standing(folder: Path, job: SweepJob) -> Standing:
    """Return how a job stands that works in `folder`."""
    summary = read_summary(folder)
    recorded = summary.get("status")
    if not summary:
        status = NEVER_STARTED
    elif is_held(folder):  # before its summary, which has the old status until it trains again
        status = RUNNING
    else:
        status = KILLED if recorded in (None, RUNNING) else str(recorded)
    error = summary.get("error") if status == FAILED else None
    return Standing(job=job, folder=folder, status=status, error=error)


def is_held(folder: Path) -> bool:
    """Return True if a process works in a run folder; False where the file system has no locks."""
    try:
        with (folder / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def counted(jobs: Sequence[Standing]) -> str:
    """Count the jobs by status, e.g. "6 finished, 1 failed, 1 never started"."""
    statuses = [job.status for job in jobs]
    order = dict.fromkeys([*ENDED, KILLED, RUNNING, NEVER_STARTED, *statuses])
    counts = {status: statuses.count(status) for status in order}
    return ", ".join(f"{count} {status}" for status, count in counts.items() if count)
