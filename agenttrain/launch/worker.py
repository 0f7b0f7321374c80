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
    """Run the launcher's command as one rank; return the exit code.

    The only argument is a `WorkerCommand` as JSON: verb, program, its arguments and `sys.path`.
    """
    protect()  # output, against a closed terminal or file
    # The launcher's folder for messages between it and its workers.
    exchange = Path(os.environ["AGENTTRAIN_EXCHANGE"])
    launcher = os.getppid()

    def remove_exchange() -> None:
        """Remove the exchange, unless the launcher is alive and will do it."""
        if os.getppid() != launcher:
            shutil.rmtree(exchange, ignore_errors=True)

    # Without the launcher nobody forwards signals or notices a dead rank.
    end_with_parent(
        "the launcher of this process is gone: it stops", after_s=RECORD_S, at_end=remove_exchange
    )
    atexit.register(remove_exchange)
    hear_interrupts()  # SIGINT, which the launcher forwards: a shell may have had it ignored
    with listening() as stop:  # before the slow imports
        # For summary.json: a worker is sent SIGUSR1 or SIGINT, whatever the launcher received.
        stop.passed_on = lambda: _received_signal(exchange)
        try:
            return _run_command(sys.argv[1])
        except KeyboardInterrupt:  # perhaps before the command was read
            from agenttrain.launch.processes import stop_code

            return stop_code(stop, json.loads(sys.argv[1])["verb"])
        except BaseException as error:
            from agenttrain.launch.processes import code_of, write_crash

            if os.getppid() == launcher:  # it is alive, and will report the error
                write_crash(exchange, os.environ["RANK"], error)
            return code_of(error)


def _received_signal(exchange: Path) -> str | None:
    """Return the name of the signal that the launcher received, if any."""
    try:
        return (exchange / SIGNAL_FILE).read_text()
    except OSError:
        return None


def _run_command(command_json: str) -> int:
    """Run a `WorkerCommand`; return the exit code."""
    from agenttrain.launch import processes

    command = processes.WorkerCommand(**json.loads(command_json))
    processes.worker_command = command
    # `python -m` has put the current folder first, where it can hide a package.
    sys.path[:] = command.sys_path
    from agenttrain.launch.ranks import share

    # At the start all ranks wait for each other to compare their settings. If this one ends before
    # that, `share` sends the others its error.
    return share(lambda: import_module(command.program).run(command.arguments))


def leave(code: int) -> None:
    """Exit at once: torch's threads may abort the interpreter's shutdown after a peer's crash."""
    # After an error torch may be half imported (a signal interrupted it), and importing it fails.
    if code == DONE:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
    atexit._run_exitfuncs()  # which `os._exit` skips
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    leave(main())
