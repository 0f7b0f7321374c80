"""One worker of `launcher.py`: it runs the launcher's command line as one rank.

The first rank has the terminal; the others write into <run>/logs/rank-<rank>.log. What stops one of
them goes to the terminal all the same.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from importlib import import_module
from pathlib import Path

from agenttrain.utils.child_process import end_with_parent
from agenttrain.utils.exit_codes import DONE
from agenttrain.utils.output import protect
from agenttrain.utils.signals import listening

TOLD = "signal.txt"
"""File of the exchange: which signal the launcher passes on, always as the same one."""
RECORD_S = 2.0
"""Seconds for a rank whose launcher is gone, and the store with it, to record in summary.json that
the run failed."""


def main() -> int:
    """Run a worker's life; return its exit code."""
    protect()
    exchange = Path(os.environ["AGENTTRAIN_EXCHANGE"])

    def signal_passed_on() -> str | None:
        try:
            return (exchange / TOLD).read_text()
        except OSError:
            return None

    # Nobody would pass signals on, or notice a dead rank.
    end_with_parent("the launcher of this process is gone: it stops", after_s=RECORD_S)
    with listening() as stop:  # before anything is imported that takes its time
        stop.passed_on = signal_passed_on
        try:
            from agenttrain.launch import processes

            command = processes.WorkerCommand(**json.loads(sys.argv[1]))
            processes.worker_command = command
            # `python -m` has put the current folder first, where it can hide a package.
            sys.path[:] = command.sys_path
            from agenttrain.launch.ranks import share

            return share(lambda: import_module(command.program).run(command.arguments))
        except KeyboardInterrupt:
            from agenttrain.launch.processes import stop_code

            return stop_code(stop, json.loads(sys.argv[1])["verb"])
        except BaseException as error:
            from agenttrain.launch.processes import code_of, write_crash

            write_crash(exchange, os.environ["RANK"], error)
            return code_of(error)


def leave(code: int) -> None:
    """End the process with an exit code that nothing can change any more.

    The threads of a process group whose other members are gone may abort the interpreter's end.
    """
    if code == DONE:  # else a signal may have cut the import of torch short: it takes no second one
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
