"""How a run ends that did not finish: what is recorded, what is told, and the exit code."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from agenttrain.config.command import resuming
from agenttrain.config.exit_codes import FAILED, INTERRUPTED, PREEMPTED, TERMINATED
from agenttrain.config.mcp_server import without_password
from agenttrain.job import Job
from agenttrain.tracking.run_folder import read_summary
from agenttrain.training.checkpoint import NotWritten
from agenttrain.training.world import PeerFailed
from agenttrain.types import AgenttrainError


def preempted(job: Job, verb: str, signal: str) -> int:
    """After a signal, with everything saved."""
    record(job, status="preempted")
    if job.world.is_main:
        saved = read_summary(job.folder).get("latest_checkpoint")
        where = "before the first step" if saved is None else f"with {saved}"
        print(f"stopped by {signal} {where}; to go on: {_again(job, verb)}", file=sys.stderr)
    return PREEMPTED


def interrupted(job: Job, verb: str) -> int:
    """At once: after Ctrl-C, a second SIGTERM, or a first signal that found nothing to save."""
    stop = job.stop
    if stop.at_once and not stop.insisted and verb != "eval":
        return preempted(job, verb, str(stop.name))
    record(job, status="interrupted")
    if job.world.is_main:
        goes_on = "" if verb == "eval" else f"; to go on: {_again(job, verb)}"
        print(f"interrupted{goes_on}", file=sys.stderr)
    return TERMINATED if stop.insisted or stop.at_once else INTERRUPTED


def failed(job: Job, verb: str, error: Exception) -> int:
    """After an error: what is nobody's mistake but ours is raised, and what another process says
    itself. Where something could not be written, what stands all the same is told too."""
    if isinstance(error, PeerFailed):
        record(job, status="failed", error=str(error))
        raise error
    if not isinstance(error, AgenttrainError | ValueError | OSError):
        record(job, status="failed", error=f"{type(error).__name__}: {error}")
        raise error
    message = told(error, job.folder)
    record(job, status="failed", error=message)
    with suppress(OSError):
        saved = read_summary(job.folder).get("latest_checkpoint")
        if isinstance(error, OSError | NotWritten) and saved is not None:
            message += f"\n{saved} stands; once this is mended: {_again(job, verb)}"
    print(message, file=sys.stderr)
    return FAILED


def told(error: Exception, folder: Path) -> str:
    """An error in a line, with the path that it is about."""
    nameless = isinstance(error, OSError) and error.filename is None
    message = f"{type(error).__name__}: {error}" + (f" (run folder {folder})" if nameless else "")
    return without_password(message)


def record(job: Job, **changes: Any) -> None:
    """`Job.record` where an end is being told already: a full disk is no second one."""
    with suppress(OSError):
        job.record(**changes)


def _again(job: Job, verb: str) -> str:
    return f"agenttrain {resuming(verb)}resume={quote(str(job.folder))}"
