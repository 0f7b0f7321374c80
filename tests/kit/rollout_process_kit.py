"""Runs with a rollout process, which are watched and killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from process_runs import start
from same_run import metrics


def assert_nothing_left(folder: Path) -> None:
    """No rollout process of this test runs, and there are no weight files."""
    deadline = time.monotonic() + 90
    while [p for p in of_rollouts() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not list(folder.glob("agenttrain-tmp-*"))


def of_rollouts(parent: int | None = None) -> list[psutil.Process]:
    """The rollout processes below a process; None: below this one."""
    found = []
    for process in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):
            if "agenttrain.runs.rollout_process" in process.cmdline():
                found.append(process)
    return found


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A run in a process of its own, with all that it prints in one pipe."""
    run = start(*arguments)
    try:
        yield run
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
        assert run.stdout is not None
        run.stdout.close()


def await_steps(run: subprocess.Popen[str], folder: Path, count: int) -> None:
    """Wait until a run has finished so many steps."""
    deadline = time.monotonic() + 300
    while len(metrics(folder)) < count:
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()
        time.sleep(0.05)
