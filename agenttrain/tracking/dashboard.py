"""trackio, local and offline: a dashboard of the run's metrics and some of its rollouts.

Opened by `dashboard_command`; the data lie in one SQLite file per project.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from agenttrain.tracking.dashboard_process import HEARD_BY_RUN
from agenttrain.utils.child_process import ChildGone, ChildProcess
from agenttrain.utils.json_lines import dumps

FINISH_TIMEOUT_S = 15.0
"""Longest wait for trackio at the end of a run."""

END = "null"
"""The line after the last row."""

# Any of these would make trackio send data to other machines.
_REMOTE_VARIABLES = (
    "TRACKIO_SPACE_ID",
    "TRACKIO_SERVER_URL",
    "TRACKIO_WEBHOOK_URL",
    "TRACKIO_DATASET_ID",
    "TRACKIO_BUCKET_ID",
)


class TrackioSink:
    """Sends rows to trackio in a process of its own; a failure is warned of once and ends the sink.

    `log` never blocks and never raises: rows go through a queue, so that a trackio that fails,
    hangs or dies costs the run nothing but its dashboard.
    """

    def __init__(
        self,
        folder: Path,
        *,
        project: str,
        name: str,
        group: str | None = None,
        resume: bool = False,
        config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None],
    ) -> None:
        """Start the process. `folder` becomes TRACKIO_DIR; `resume` continues the run of this
        name, if there is one; `warn` is called with one line, the reason why tracking stopped."""
        self._warn = warn
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        self._process: ChildProcess | None = None
        self.failed = False
        """True if something is missing from the dashboard, or all of it."""
        arguments = {
            "project": project,
            "name": name,
            "group": group,
            "resume": "allow" if resume else "never",
            "config": dict(config or {}),
        }
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._process = _start(folder)
            self._queue.put(dumps(arguments))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")
            return
        self._writer = Thread(target=_feed, args=(self._process, self._queue), daemon=True)
        self._writer.start()

    def log(
        self, step: int, metrics: Mapping[str, float], rollouts: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Log one point per metric at `step`; `rollouts` (records) appear among the traces."""
        if self._process is None:
            return
        if not self._process.alive:
            self._fail()
            return
        try:
            finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
            traces = [trace(record) for record in rollouts]
            self._queue.put(dumps({"step": step, "metrics": finite, "traces": traces}))
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def close(self) -> None:
        """Wait, a bounded time, until everything is on disk."""
        if self._process is None:
            return
        self._queue.put(None)
        if not self._process.ended(FINISH_TIMEOUT_S):
            self._fail(f"did not finish within {FINISH_TIMEOUT_S:.0f} s")
        elif self._process.code != 0:
            self._fail()
        else:
            self._stop()

    def _fail(self, reason: str | None = None) -> None:
        """End the sink with a warning; the default reason is the last line of the process."""
        if reason is None:
            assert self._process is not None
            lines = self._process.printed().splitlines()
            reason = lines[-1] if lines else f"exit status {self._process.code}"
        self.failed = True
        self._stop()
        self._warn(
            f"trackio failed and is off for the rest of this run ({reason}); metrics.jsonl and the "
            "rollout files are complete without it. tracker.name=none runs without trackio."
        )

    def _stop(self) -> None:
        if self._process is not None:
            self._queue.put(None)
            self._process.kill()
            self._process = None


def _start(folder: Path) -> ChildProcess:
    environment = {k: v for k, v in os.environ.items() if k not in _REMOTE_VARIABLES}
    environment |= {"TRACKIO_DIR": str(folder.resolve()), "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("dashboard_process.py")
    # Blocked until the process ignores them; one that comes meanwhile is this process's alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_BY_RUN)
    try:
        # -P: the script's own folder must not shadow modules that trackio imports.
        command = [sys.executable, "-P", str(script)]
        return ChildProcess(command, requests=True, own_session=False, env=environment)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _feed(process: ChildProcess, queue: SimpleQueue[str | None]) -> None:
    """Feed the process until None or until it is gone; runs in a thread of its own."""
    # If it is gone, `log` or `close` reads its exit status and warns.
    with suppress(ChildGone):
        while (line := queue.get()) is not None:
            process.send(line)
        # Sent explicitly: a process forked from this one may hold the pipe open.
        process.send(END)


def trace(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a `trackio.Trace` for a rollout record."""
    metadata = {
        key: record[key] for key in ("rollout_id", "task_id", "reward", "rewards", "stop_reason")
    }
    messages = [dict(m) for trajectory in record["trajectories"] for m in trajectory["messages"]]
    for shown in messages:
        # The dashboard lists content only: a turn that only calls tools gets the calls' text as it.
        if not shown.get("content") and shown.get("tool_calls"):
            functions = [call["function"] for call in shown["tool_calls"]]
            shown["content"] = "\n".join(f"{f['name']}({dumps(f['arguments'])})" for f in functions)
    return {"messages": messages, "metadata": metadata}


def dashboard_command(run_folder: Path, project: str, *, trackio_folder: Path | None = None) -> str:
    """Return the shell command that opens the dashboard in a browser.

    Example: ``TRACKIO_DIR=outputs/shop/2026-01-31_12-00/trackio trackio show --project shop``
    """
    folder = trackio_folder or run_folder / "trackio"
    # Run by a path into a virtual environment that is not activated, `trackio` is not on PATH.
    program = "trackio" if shutil.which("trackio") else str(Path(sys.executable).parent / "trackio")
    return f"TRACKIO_DIR={shlex.quote(str(folder))} {shlex.quote(program)} show --project " + (
        shlex.quote(project)
    )
