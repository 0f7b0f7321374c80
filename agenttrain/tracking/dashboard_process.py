"""The process that holds trackio: a run's dashboard data, written apart from the run.

Started as a script, with the standard library and trackio alone, so that whatever trackio does
(its threads, prints, warnings and a look-up of the user's hub account at every start) cannot touch
the run. Reads JSON lines: first the arguments of `trackio.init`, then ``{"step", "metrics",
"traces"}``; ends with ``null`` or with the input, so also when the run is killed. One line on the
output says what failed; a whole history leaves it empty.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, TextIO

HEARD_BY_RUN = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Ctrl-C, and those of `agenttrain/utils/signals.py`, which a script on its own cannot import."""


def main() -> None:
    """Log everything that arrives on the standard input."""
    # They reach the whole process group; the run decides when its history is complete.
    for number in HEARD_BY_RUN:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD_BY_RUN)
    report = os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(null, stream)
    try:
        import trackio

        package = Path(trackio.__file__).parent

        # trackio swallows its exceptions and warns instead, also from its writer thread.
        def fail_on_warning(message: Any, category: Any, filename: str, *_: Any) -> None:
            if package in Path(filename).parents:
                _fail(report, str(message))

        warnings.simplefilter("always")
        warnings.showwarning = fail_on_warning  # type: ignore[assignment]
        arguments = json.loads(sys.stdin.readline())
        run = trackio.init(**arguments, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        while row := json.loads(sys.stdin.readline() or "null"):
            entry = dict(row["metrics"])
            if row["traces"]:
                entry["rollouts"] = [trackio.Trace(**trace) for trace in row["traces"]]
            run.log(entry, step=row["step"])
        trackio.finish()
    except Exception as error:
        _fail(report, f"{type(error).__name__}: {error}")


def _fail(report: TextIO, message: str) -> None:
    print(" ".join(message.split()), file=report, flush=True)
    os._exit(1)


if __name__ == "__main__":
    main()
