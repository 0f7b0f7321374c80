"""How a run ends that did not finish: what is recorded, what is told, and the exit code."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from agenttrain.config.command import resuming
from agenttrain.config.exit_codes import FAILED, INTERRUPTED, PREEMPTED, TERMINATED
from agenttrain.signals import StopRequest
from agenttrain.tracking.run_folder import read_summary, update_summary
from agenttrain.training.checkpoint import NotWritten


def preempted(folder: Path, verb: str, signal: str) -> int:
    """After a signal, with everything saved."""
    record(folder, status="preempted")
    saved = read_summary(folder).get("latest_checkpoint")
    where = "before the first step" if saved is None else f"with {saved}"
    print(f"stopped by {signal} {where}; to go on: {_again(folder, verb)}", file=sys.stderr)
    return PREEMPTED


def interrupted(folder: Path, verb: str, stop: StopRequest) -> int:
    """At once: after Ctrl-C, a second SIGTERM, or a first signal that found nothing to save."""
    if stop.at_once and not stop.insisted and verb != "eval":
        return preempted(folder, verb, str(stop.name))
    record(folder, status="interrupted")
    goes_on = "" if verb == "eval" else f"; to go on: {_again(folder, verb)}"
    print(f"interrupted{goes_on}", file=sys.stderr)
    return TERMINATED if stop.insisted or stop.at_once else INTERRUPTED


def failed(folder: Path, verb: str, error: Exception) -> int:
    """After an error; what could not be written is named, and what stands all the same."""
    message = told(error, folder)
    record(folder, status="failed", error=message)
    with suppress(OSError):
        saved = read_summary(folder).get("latest_checkpoint")
        if isinstance(error, OSError | NotWritten) and saved is not None:
            message += f"\n{saved} stands; once this is mended: {_again(folder, verb)}"
    print(message, file=sys.stderr)
    return FAILED


def told(error: Exception, folder: Path) -> str:
    """An error in a line, with the path that it is about."""
    nameless = isinstance(error, OSError) and error.filename is None
    return f"{type(error).__name__}: {error}" + (f" (run folder {folder})" if nameless else "")


def record(folder: Path, **changes: Any) -> None:
    """`update_summary` where an end is being told already: a full disk is no second one."""
    with suppress(OSError):
        update_summary(folder, **changes)


def _again(folder: Path, verb: str) -> str:
    return f"agenttrain {resuming(verb)}resume={quote(str(folder))}"
