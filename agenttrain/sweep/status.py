"""How the jobs of a sweep stand, read from their folders."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.sweep.record import SweepJob, SweepRecord
from agenttrain.tracking.run_folder import read_summary

FINISHED, RUNNING, NEVER_STARTED = "finished", "running", "never started"
FAILED, INTERRUPTED = "failed", "interrupted"
KILLED = "killed"
"""Began and ended without a word of it."""
ENDED = (FINISHED, FAILED, INTERRUPTED, "preempted")
"""What a run's summary says of itself when it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One job and how it stands."""

    job: SweepJob
    folder: Path
    status: str
    error: str | None = None
    """What it failed with."""

    @property
    def unfinished(self) -> bool:
        """Whether there is something left to run."""
        return self.status not in (FINISHED, RUNNING)


def standings(sweep: Path, record: SweepRecord) -> list[Standing]:
    """Every job of the sweep, in order."""
    return [standing(sweep / job.folder, job) for job in record.jobs]


def standing(folder: Path, job: SweepJob) -> Standing:
    """How a job stands that works in `folder`."""
    summary = read_summary(folder)
    status = _status(folder, summary)
    error = summary.get("error") if status == FAILED else None
    return Standing(job=job, folder=folder, status=status, error=error)


def _status(folder: Path, summary: dict[str, Any]) -> str:
    if not summary:
        return NEVER_STARTED
    # A run that goes on after a failure has the old word in its summary until it trains.
    if is_held(folder):
        return RUNNING
    said = summary.get("status")
    return KILLED if said in (None, RUNNING) else str(said)


def is_held(folder: Path) -> bool:
    """Whether a process works in a run folder; False where the file system has no locks."""
    try:
        with (folder / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def counted(found: Sequence[Standing]) -> str:
    """The numbers in words, e.g. "6 finished, 1 failed, 1 never started"."""
    return ", ".join(_counts(found))


def _counts(found: Sequence[Standing]) -> Iterator[str]:
    statuses = [standing.status for standing in found]
    for status in dict.fromkeys([*ENDED, KILLED, RUNNING, NEVER_STARTED, *statuses]):
        if count := statuses.count(status):
            yield f"{count} {status}"
