"""One worker of `launcher.py`: it runs the launcher's command line as one rank.

The first rank prints to the terminal, the others to <run>/logs/rank-<rank>.log. An error that stops
any of them is printed to the terminal.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
from importlib import import_module
from pathlib import Path

from agenttrain.utils.child_process import end_with_parent
from agenttrain.utils.exit_codes import DONE
from agenttrain.utils.output import protect
from agenttrain.utils.signals import hear_interrupts, listening

SIGNAL_FILE = "signal.txt"
"""File of the exchange: name of the signal that the launcher received. Workers are sent SIGUSR1 or
SIGINT instead."""
RECORD_S = 2.0
"""Seconds for a rank to record in summary.json that the run failed, once its launcher is gone, and
the store with it."""


def main() -> int:
    """Run a worker from start to end; return its exit code."""
    protect()
    exchange = Path(os.environ["AGENTTRAIN_EXCHANGE"])

    def received_signal() -> str | None:
        try:
            return (exchange / SIGNAL_FILE).read_text()
        except OSError:
            return None

    launcher = os.getppid()

    def clear() -> None:
        """Remove the exchange if the launcher, which would, is gone."""
        if os.getppid() != launcher:
            shutil.rmtree(exchange, ignore_errors=True)

    # Without the launcher nothing passes signals on or notices a dead rank.
    end_with_parent(
        "the launcher of this process is gone: it stops", after_s=RECORD_S, at_end=clear
    )
    atexit.register(clear)
    hear_interrupts()
    with listening() as stop:  # before the slow imports
        stop.passed_on = received_signal
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

            if os.getppid() == launcher:
                write_crash(exchange, os.environ["RANK"], error)
            return code_of(error)


def leave(code: int) -> None:
    """End the process at once, so that nothing changes its exit code.

    Threads of a process group whose other members are gone may abort the interpreter's shutdown.
    """
    # With another code, a signal may have interrupted the import of torch, and it fails here.
    if code == DONE:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
