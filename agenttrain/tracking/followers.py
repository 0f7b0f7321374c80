"""The trackers of a run, each in a process of its own, as the run sees them: start, restart, end.

Nothing here waits, except `Followers.close`, for a bounded time. The run writes its files; the
processes read them (`agenttrain/tracking/following.py`).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil

from agenttrain.tracking.backends.base import Description, ExperimentTracker, RunEnd, TrackedRun
from agenttrain.tracking.config import TrackerSection
from agenttrain.tracking.follower import CANNOT, HEARD_BY_RUN
from agenttrain.tracking.following import Cursor, cursor_path
from agenttrain.tracking.run_folder import write_atomically
from agenttrain.utils.child_process import ChildGone, ChildProcess
from agenttrain.utils.json_lines import dumps
from agenttrain.utils.locate import locate
from agenttrain.utils.signals import signal_name

SCRIPT = Path(__file__).with_name("follower.py")
LONGEST_PAUSE_S = 60.0
"""Longest time until a tracker that failed is started again; it begins with one second."""


class Follower:
    """One tracker of a run. `check` starts its process again after it ended early."""

    def __init__(
        self,
        section: TrackerSection,
        run: TrackedRun,
        config: Mapping[str, Any],
        warn: Callable[[str], None],
        *,
        longest_s: float,
    ) -> None:
        """Start the process; `warn` is called with one line for each kind of trouble.

        `longest_s` is the longest `finish_s` of the run's trackers: `close` waits that long.
        """
        self.section = section
        self._warn = warn
        self._warned: set[str] = set()
        self._path = cursor_path(run.folder, section.name)
        self._start_file = self._path.with_suffix(".start")
        cursor = Cursor.read(self._path) or Cursor(id=run.id)
        run = replace(run, id=cursor.id)
        self._process: ChildProcess | None = None
        self._how = RunEnd.finished
        self._failures = self._step_before = 0
        self._again_at: float | None = None
        """Time of the next start; None: there is none."""
        self.reason = ""
        """The last trouble, in words; empty without any."""
        self.is_off = False
        """True if the tracker cannot work."""
        self.description = Description()
        try:
            tracker: ExperimentTracker = locate(section.target, key=section.key)(**section.settings)
            self.description = tracker.describe(run)
            cursor.write(self._path)
            arguments = {
                "name": section.name,
                "target": section.target,
                "settings": section.settings,
                "system": section.system,
                "finish_s": longest_s,
                "run": {
                    **asdict(run),
                    "folder": str(run.folder.absolute()),
                    "shared": str(run.shared.absolute()),
                },
                "config": config,
                "path": [folder or os.getcwd() for folder in sys.path],
            }
            write_atomically(self._start_file, dumps(arguments))
            self._start()
        except Exception as error:
            self._turn_off(f"{type(error).__name__}: {error}")
        for note in self.description.notes:
            warn(note)

    @property
    def step(self) -> int:
        """Last step that the tracker has acknowledged."""
        cursor = Cursor.read(self._path)
        return 0 if cursor is None else cursor.step

    def check(self) -> None:
        """Start the process again if it ended early, after a pause that grows."""
        if self._process is not None and not self._process.alive:
            self._ended(self._process)
        if self._again_at is not None and time.monotonic() >= self._again_at:
            self._start()

    def end(self, how: RunEnd) -> None:
        """Ask the process to send what is left, and to end; start one that waits for its turn.

        `how` is the end of the run, for the tracker's page.
        """
        self._how = how
        if self._again_at is not None:
            self._start()
        if self._process is not None:
            # A process forked from this one may hold the pipe open: closing it is not enough.
            with suppress(ChildGone):
                self._process.send(f"end {how}")

    def wait(self, deadline: float, last_step: int) -> None:
        """Wait until the process has ended, at most until the deadline; warn of what is missing."""
        while self._process is not None:
            if not self._process.ended(max(deadline - time.monotonic(), 0.01)):
                limit = f"it did not end within {self.section.finish_s:g} s"
                self.reason = f"{self.reason}; {limit}" if self.reason else limit
                self._process.kill()
                self._process = None
            elif self._process.code == 0:
                self._process.kill()  # closes the pipe
                self._process, self.reason = None, ""
            else:
                self._ended(self._process)
                if self._again_at is not None and time.monotonic() < deadline - 1:
                    time.sleep(min(1.0, max(self._again_at - time.monotonic(), 0)))
                    self.end(self._how)
        if self.reason and not self.is_off:
            self._warn(
                f"{self.section.key}: steps up to {self.step} of {last_step} have arrived "
                f"({self.reason}); resume= sends what is missing"
            )

    def _start(self) -> None:
        self._again_at = None
        self._step_before = self.step
        # Blocked until the process ignores them; one that comes meanwhile is this process's alone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD_BY_RUN)
        try:
            # -P: the script's own folder must not shadow modules that a tracker imports.
            command = [sys.executable, "-P", str(SCRIPT), str(self._start_file)]
            self._process = ChildProcess(command, requests=True, keeper=False)
        except OSError as error:  # too many processes, no memory
            self._turn_off(f"{type(error).__name__}: {error}")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _ended(self, process: ChildProcess) -> None:
        """Record why the process ended early, and when to start it again."""
        code, printed = process.code or 0, process.printed().splitlines()
        process.kill()  # closes the pipe
        self._process = None
        if code < 0:
            self.reason = f"its process was ended by {signal_name(-code)}"
        else:
            self.reason = printed[-1] if printed else f"its process ended with exit code {code}"
        if code == CANNOT:
            self._turn_off(self.reason)
            return
        step = self.step
        self._failures = 1 if step > self._step_before else self._failures + 1
        # At once the first time: a process that was killed did nothing wrong.
        pause = 0.0 if self._failures == 1 else min(2.0 ** (self._failures - 2), LONGEST_PAUSE_S)
        self._again_at = time.monotonic() + pause
        if self.reason not in self._warned:
            self._warned.add(self.reason)
            self._warn(
                f"{self.section.key}: {self.reason}; the run goes on without waiting, and the "
                f"tracker is started again after step {step}"
            )

    def _turn_off(self, reason: str) -> None:
        self.is_off, self.reason = True, reason
        self._warn(
            f"{self.section.key} is off for this run ({reason}); metrics.jsonl and the rollout "
            "files are complete without it. tracker=none runs without trackers."
        )


def tracker_processes(children: Sequence[psutil.Process]) -> set[int]:
    """Return the processes of trackers among a run's descendants, and those that they started.

    They outlive a run that is ended from outside, to send what is left and how it ended.
    """
    spared = set[int]()
    for child in children:
        with suppress(psutil.Error):
            if str(SCRIPT) in child.cmdline():
                spared |= {child.pid, *(each.pid for each in child.children(recursive=True))}
    return spared


class Followers:
    """All trackers of a run."""

    def __init__(self, each: Sequence[Follower]) -> None:
        self._each = each
        self._is_closed = False

    def check(self) -> None:
        """Start processes again that ended early; takes microseconds if none has."""
        for follower in self._each:
            follower.check()

    def close(self, last_step: int, how: RunEnd = RunEnd.finished) -> None:
        """Wait, a bounded time, until every tracker has everything; a second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for follower in self._each:
            follower.check()
            follower.end(how)
        longest = max((follower.section.finish_s for follower in self._each), default=0.0)
        deadline = time.monotonic() + longest
        for follower in self._each:
            follower.wait(deadline, last_step)

    def views(self) -> list[str]:
        """Return the commands and addresses that show the run, of the trackers that have it."""
        working = [follower for follower in self._each if not follower.reason]
        return [follower.description.view for follower in working if follower.description.view]
