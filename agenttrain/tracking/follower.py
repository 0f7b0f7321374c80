"""The process of one tracker: a tracker that raises, hangs or crashes cannot touch the run.

Started as a script with a JSON file of arguments. The run writes a line into its input at its end,
which says how it ended; a run that is killed closes the input. A line on the output says why the
process ends early.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from threading import Event, Thread

HEARD_BY_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, and those of `agenttrain/utils/signals.py`. Schedulers signal all processes of a job."""
LAST_S = 5.0
"""Seconds that a process lives beyond the time that the run waits for it at its end."""
FAILED = 1
CANNOT = 3
"""Exit code of a tracker that would fail again: its library is missing or it refuses a setting."""


def main() -> None:
    """Follow the run that the arguments name."""
    for number in HEARD_BY_RUN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_BY_RUN)
    report = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    code = CANNOT
    try:
        arguments = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        # The run may import this package, and the user's, from its working folder.
        sys.path += [folder for folder in arguments["path"] if folder not in sys.path]
        from agenttrain.tracking.backends.base import TrackedRun
        from agenttrain.tracking.following import cursor_lock, follow, run_end
        from agenttrain.tracking.machine import MachineLoad
        from agenttrain.utils.locate import locate

        folders = {name: Path(arguments["run"][name]) for name in ("folder", "shared")}
        run = TrackedRun(**{**arguments["run"], **folders})
        ended, messages = Event(), list[str]()

        def wait_for_end() -> None:
            messages.append(sys.stdin.readline())
            ended.set()
            # The run kills this process in time; a run that was killed cannot.
            time.sleep(arguments["finish_s"] + LAST_S)
            os.killpg(0, signal.SIGKILL)

        Thread(target=wait_for_end, daemon=True).start()
        key = f"tracker.{arguments['name']}"
        tracker = locate(arguments["target"], key=key)(**arguments["settings"])
        code = FAILED
        load = MachineLoad(run.pid) if arguments["system"] else None
        # The process of a killed run may still be at work, and a resume starts this one.
        with cursor_lock(run.folder, arguments["name"]):
            follow(
                run,
                arguments["name"],
                tracker,
                arguments["config"],
                ended,
                load,
                how=lambda: run_end(run.folder, messages[0]),
            )
        code = 0
    except BaseException as error:
        code = CANNOT if isinstance(error, ImportError) else code
        print(" ".join(f"{type(error).__name__}: {error}".split()), file=report, flush=True)
    # Not through the interpreter's end: threads of a library may hang there.
    os._exit(code)


if __name__ == "__main__":
    main()
