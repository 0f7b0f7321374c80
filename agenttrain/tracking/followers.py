"""The trackers of a run as the run sees them, and their process: start, restart, end.

Nothing here waits, except `Followers.close`, for a bounded time. The run writes its files; the
process reads them (`agenttrain/tracking/following.py`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from agenttrain.tracking.backends.base import Description, ExperimentTracker, RunEnd, TrackedRun
from agenttrain.tracking.config import TrackerSection
from agenttrain.tracking.follower import LAST_PAUSE_S, TrackerReport, pause_after
from agenttrain.tracking.following import Cursor, cursor_path
from agenttrain.utils.child_process import ChildGone, ChildProcess, how_ended
from agenttrain.utils.files import write_atomically
from agenttrain.utils.json_lines import dumps
from agenttrain.utils.locate import locate

SCRIPT = Path(__file__).with_name("follower.py")
EXIT_S = 1.0
"""Seconds that the process has to end after the longest `finish_s`."""
LAST_S = 5.0
"""Seconds that it lives beyond the longest `finish_s` if the run is killed."""


class FollowedTracker:
    """One tracker of a run, as the run sees it.

    The tracker itself works in the trackers' process. `Followers` calls `record` with the reports
    of that process, `fail` when it ended early, and `warn_of_missing` at the end of the run.
    """

    def __init__(
        self, section: TrackerSection, run: TrackedRun, warn: Callable[[str], None]
    ) -> None:
        """Ask the tracker to describe itself; `warn` is called with one line per problem.

        For this a tracker is constructed here, and dropped. The one that sends the run is
        constructed in the trackers' process.
        """
        self.section = section
        self._warn = warn
        self._warned: set[str] = set()
        self._path = cursor_path(run.folder, section.name)
        self.reason = ""
        """The last problem; empty without one."""
        self.is_off = False
        """True if the tracker cannot work."""
        self.is_done = False
        """True once it has everything, after the run's end."""
        self.description = Description()
        # The cursor has the run's id at the tracker, and how far the tracker has it. A resumed run
        # finds that of its earlier start, and keeps the id.
        cursor = Cursor.read(self._path) or Cursor(id=run.id)
        self.id = cursor.id
        try:
            tracker: ExperimentTracker = locate(section.target, key=section.key)(**section.settings)
            self.description = tracker.describe(replace(run, id=self.id))
            cursor.write(self._path)
        except Exception as error:
            self.turn_off(f"{type(error).__name__}: {error}")
        for note in self.description.notes:
            warn(note)

    @property
    def step(self) -> int:
        """Last step that the tracker has acknowledged."""
        cursor = Cursor.read(self._path)
        return 0 if cursor is None else cursor.step

    @property
    def is_active(self) -> bool:
        """True while there may be something to send: also after a failure (`reason`)."""
        return not (self.is_off or self.is_done)

    def record(self, report: TrackerReport) -> None:
        """Record a report of the tracker's process."""
        if report.is_off:
            self.turn_off(report.reason)
        elif report.reason:
            self.fail(report.reason)
        elif report.is_late:
            limit = f"it did not end within {self.section.finish_s:g} s"
            self.reason = f"{self.reason}; {limit}" if self.reason else limit
        else:
            self.is_done, self.reason = True, ""

    def fail(self, reason: str) -> None:
        """Record an error after which the tracker is started again; warn of each error once."""
        self.reason = reason
        if reason not in self._warned:
            self._warned.add(reason)
            self._warn(
                f"{self.section.key}: {reason}; the run goes on without waiting, and the "
                f"tracker is started again after step {self.step}"
            )

    def turn_off(self, reason: str) -> None:
        """Give it up for this run, with a warning."""
        self.is_off, self.reason = True, reason
        self._warn(
            f"{self.section.key} is off for this run ({reason}); metrics.jsonl and the rollout "
            "files are complete without it. tracker=none runs without trackers."
        )

    def warn_of_missing(self, last_step: int) -> None:
        """Warn of steps that have not arrived at the run's end."""
        if self.is_active:
            self._warn(
                f"{self.section.key}: steps up to {self.step} of {last_step} have arrived "
                f"({self.reason or 'its process did not end'}); resume= sends what is missing"
            )


def tracker_processes(children: Sequence[psutil.Process]) -> set[int]:
    """Return the pids of tracker processes among a run's descendants, with their descendants.

    They outlive a killed run, to send what is left and how it ended.
    """
    pids = set[int]()
    for child in children:
        with suppress(psutil.Error):
            if str(SCRIPT) in child.cmdline():
                pids |= {child.pid, *(c.pid for c in child.children(recursive=True))}
    return pids


class Followers:
    """All trackers of a run and their process, which `check` restarts if it ended early.

    `Tracker` calls `check` after each step and evaluation, and `close` at the end of the run.
    """

    def __init__(
        self,
        sections: Sequence[TrackerSection],
        run: TrackedRun,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        """Start the process of the trackers, if there are any."""
        self._trackers = [FollowedTracker(section, run, warn) for section in sections]
        self._longest_s = max((section.finish_s for section in sections), default=0.0)
        self._folder = run.folder
        folders = {"folder": str(run.folder.absolute()), "shared": str(run.shared.absolute())}
        self._arguments = {
            "run": {**asdict(run), **folders},
            "config": config,
            "path": [folder or os.getcwd() for folder in sys.path],  # "" is the working folder
        }
        self._reports: deque[str] = deque()
        """Lines that the process has printed; a thread of `ChildProcess` adds them."""
        self._process: ChildProcess | None = None
        """None: not started, or ended."""
        self._failures = 0
        """Early ends of the process in a row without an acknowledged step between them."""
        self._steps_before: list[int] = []
        """Last acknowledged step of each tracker when the process was started."""
        self._restart_at: float | None = None
        """Time of the next start; None if no start is due."""
        self._is_closed = False
        self._start()

    def check(self) -> None:
        """Start the process again if it ended early; takes microseconds if it has not."""
        self._read_reports()
        if self._process is not None and not self._process.alive:
            self._schedule_restart(self._process)
        if self._restart_at is not None and time.monotonic() >= self._restart_at:
            self._start()

    def close(self, last_step: int, how: RunEnd = RunEnd.finished) -> None:
        """Wait until every tracker has everything, at most its `finish_s`; then end the process.

        `how` is the end of the run, for the pages of the trackers. A second call does nothing.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self.check()  # notices a process that ended early
        if self._restart_at is not None:  # a restart is due later: do it at once
            self._start()
        deadline = time.monotonic() + self._longest_s
        while self._process is not None:
            # Closing the pipe is not enough: a process forked from this one may hold it open.
            with suppress(ChildGone):
                self._process.send(f"end {how}")
            # EXIT_S: at the deadline the process still reports the trackers that are late.
            wait_s = max(deadline + EXIT_S - time.monotonic(), 0.01)
            in_time = self._process.wait_for_end(wait_s)
            if not in_time or self._process.code == 0:  # hanging, or done
                self._release_process(self._process)
                break
            self._schedule_restart(self._process)  # sets `_process` to None, which ends this loop
            # Another attempt needs at least a second.
            if self._restart_at is not None and time.monotonic() < deadline - 1:
                time.sleep(min(LAST_PAUSE_S, max(self._restart_at - time.monotonic(), 0)))
                self._start()  # sets `_process`: the loop goes on
        for tracker in self._trackers:
            tracker.warn_of_missing(last_step)

    def views(self) -> list[str]:
        """Return the commands and addresses that show the run, of the trackers that have it."""
        working = [tracker for tracker in self._trackers if not tracker.reason]
        return [tracker.description.view for tracker in working if tracker.description.view]

    def _active(self) -> list[FollowedTracker]:
        return [tracker for tracker in self._trackers if tracker.is_active]

    def _start(self) -> None:
        """Start the process for the active trackers; turn them off if it cannot be started."""
        self._restart_at = None  # no start is due
        active = self._active()
        if not active:
            return
        # If the process ends early, `_schedule_restart` sees by these whether it sent any step.
        self._steps_before = [tracker.step for tracker in self._trackers]
        fields = ("name", "target", "settings", "system", "finish_s")
        trackers = [
            {"id": tracker.id, **{name: getattr(tracker.section, name) for name in fields}}
            for tracker in active
        ]
        start_file = self._folder / "trackers" / "follower.start"
        try:
            write_atomically(start_file, dumps({**self._arguments, "trackers": trackers}))
            # -P: the script's own folder must not shadow modules that a tracker imports.
            self._process = ChildProcess(
                [sys.executable, "-P", str(SCRIPT), str(start_file)],
                requests=True,
                # The process ignores Ctrl-C, which stops the run: it still sends how the run ended.
                deaf=True,
                grace_s=self._longest_s + LAST_S,  # to send the last steps of a run that is killed
                print_line=self._reports.append,
            )
        except Exception as error:  # too many processes, no memory, a setting that is no JSON
            for tracker in active:
                tracker.turn_off(f"{type(error).__name__}: {error}")

    def _schedule_restart(self, process: ChildProcess) -> None:
        """Record why the process ended early, and set `_restart_at` if a tracker still needs it.

        The last reports of the process may say that a tracker is done or off. Only the others have
        failed with it.
        """
        code = process.code or 0
        self._release_process(process)
        steps = [tracker.step for tracker in self._trackers]
        # Each failure without a new step since `_start` lengthens the pause.
        self._failures = 1 if steps != self._steps_before else self._failures + 1
        for tracker in self._active():
            tracker.fail(f"its process {how_ended(code)}")
        if self._active():
            self._restart_at = time.monotonic() + pause_after(self._failures)

    def _release_process(self, process: ChildProcess) -> None:
        """End the process if it still lives, and record its last reports."""
        process.printed()  # waits until a thread has put all printed lines into `_reports`
        process.kill()  # closes the pipe, too
        self._process = None
        self._read_reports()

    def _read_reports(self) -> None:
        """Record the reports that the process has printed."""
        while self._reports:
            with suppress(ValueError):  # a line that a library printed
                report = TrackerReport(**json.loads(self._reports.popleft()))
                for tracker in self._trackers:
                    if tracker.section.name == report.tracker:
                        tracker.record(report)
