"""The process of a run's trackers: a tracker that raises, hangs or crashes cannot touch the run.

Started as a script with a JSON file of arguments. Each tracker has a thread, which follows the
run's files: a hanging tracker does not delay the others, and is abandoned `finish_s` after the
run's end. At its end the run writes a line to this process's standard input that says how it ended;
if the run is killed, the input is closed. This process writes `TrackerReport` lines to its standard
output.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

LONGEST_PAUSE_S = 60.0
"""Longest time until a tracker that failed is started again; it begins with one second."""
LAST_PAUSE_S = 1.0
"""Longest such pause once the run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerReport:
    """A line from the trackers' process to the run, about one tracker."""

    tracker: str
    reason: str = ""
    """Error of an attempt; empty: the tracker has everything, or is late."""
    is_off: bool = False
    """The tracker is given up: its library is missing or it refuses a setting."""
    is_late: bool = False
    """The tracker did not finish in time after the end of the run."""


def pause_after(failures: int) -> float:
    """Return the seconds before the next attempt, after so many failures without progress.

    The first failure needs no pause: a killed process did nothing wrong.
    """
    return 0.0 if failures == 1 else min(2.0 ** (failures - 2), LONGEST_PAUSE_S)


class RunSignal:
    """The end of the run: `event` is set at the end, `message` is the run's last line."""

    def __init__(self) -> None:
        self.event = Event()
        self.message = ""


def main() -> None:
    """Follow the run that the arguments name."""
    # Keep standard output for the reports: libraries that print write to the null device.
    output = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)

    def send_report(report: TrackerReport) -> None:
        output.write(json.dumps(asdict(report)) + "\n")
        output.flush()

    arguments = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # The run may import this package, and the user's, from its working folder.
    sys.path += [folder for folder in arguments["path"] if folder not in sys.path]
    end = RunSignal()
    threads = {}
    for tracker in arguments["trackers"]:
        common = (arguments["run"], arguments["config"])
        thread = Thread(target=send_all, args=(tracker, *common, end, send_report), daemon=True)
        thread.start()
        threads[tracker["name"]] = (thread, tracker["finish_s"])
    end.message = sys.stdin.readline()  # blocks until the run ends: its last line, or "" if killed
    end.event.set()
    ended_at = time.monotonic()
    for name, (thread, finish_s) in threads.items():
        thread.join(max(ended_at + finish_s - time.monotonic(), 0))
        if thread.is_alive():
            send_report(TrackerReport(tracker=name, is_late=True))
    # Skip the interpreter's shutdown: threads of a library may hang there.
    os._exit(0)


def send_all(
    arguments: dict[str, Any],
    run: dict[str, Any],
    config: dict[str, Any],
    end: RunSignal,
    send_report: Callable[[TrackerReport], None],
) -> None:
    """Have one tracker follow the run to its end: a thread's body.

    `arguments` are the tracker's: name, target (its class), settings, system (it gets the machine's
    load), finish_s and id. `run` has the other fields of a TrackedRun.

    A tracker that fails is constructed again after a pause, and continues after the last
    acknowledged step. There are two ends besides success: a tracker is given up (`is_off`) whose
    class cannot be constructed or imported, because neither changes while the process lives. And
    after the run's end `main` ends the process, with this thread, once `finish_s` have passed.
    """
    from agenttrain.tracking.backends.base import TrackedRun
    from agenttrain.tracking.following import Cursor, cursor_path, follow, run_end
    from agenttrain.tracking.machine import MachineLoad
    from agenttrain.utils.file_locks import file_lock
    from agenttrain.utils.locate import locate

    name = arguments["name"]
    folders = {key: Path(run[key]) for key in ("folder", "shared")}
    tracked = TrackedRun(**{**run, **folders, "id": arguments["id"]})
    load = MachineLoad(tracked.pid) if arguments["system"] else None
    failures = 0
    while True:
        cursor = Cursor.read(cursor_path(tracked.folder, name))
        step_before = 0 if cursor is None else cursor.step
        is_constructed = False
        try:
            target = locate(arguments["target"], key=f"tracker.{name}")
            tracker = target(**arguments["settings"])
            is_constructed = True
            # After a resume the tracker process of the killed run may still be at work.
            with file_lock(cursor_path(tracked.folder, name).with_suffix(".lock")):
                follow(
                    tracked,
                    name,
                    tracker,
                    config,
                    end.event,
                    load,
                    how_ended=lambda: run_end(tracked.folder, end.message),
                )
        except BaseException as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            is_off = not is_constructed or isinstance(error, ImportError)
            send_report(TrackerReport(tracker=name, reason=reason, is_off=is_off))
            if is_off:
                return
        else:
            send_report(TrackerReport(tracker=name))
            return
        # Failures without progress lengthen the pause; after progress they are counted anew.
        cursor = Cursor.read(cursor_path(tracked.folder, name))
        has_progressed = cursor is not None and cursor.step > step_before
        failures = 1 if has_progressed else failures + 1
        pause_s = pause_after(failures)
        if not end.event.wait(pause_s):
            continue
        # The run has ended, so the wait was cut short: pause, but not long.
        time.sleep(min(pause_s, LAST_PAUSE_S))


if __name__ == "__main__":
    main()
