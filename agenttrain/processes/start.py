"""A checked command becomes a process that runs it, several of them, or a share of some that are
there. What is heavy is imported last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agenttrain.config.compose import Composed
from agenttrain.config.distributed import DistributedName
from agenttrain.config.exit_codes import FAILED
from agenttrain.processes.count import QUIET, adopt, is_first, started_by_others
from agenttrain.processes.exchange import Order, stop_code
from agenttrain.signals import listening


def start(composed: Composed, folder: Path, verb: str, *, sweep: bool = False) -> int:
    """Run `verb` in its folder; return the exit code. Raises ConfigError."""
    config, plain = composed.config, composed.plain
    if config.distributed.name is not DistributedName.single and not started_by_others():
        from agenttrain.processes.launcher import run_workers

        return run_workers(composed, folder, verb, sweep=sweep)
    with listening() as stop:
        try:
            if started_by_others():
                from agenttrain.processes.ranks import lead

                adopt(composed, ())
                return lead(Order.of(composed, folder, verb, sweep=sweep))
            from agenttrain.runs.run import Run

            return Run(verb=verb, config=config, plain=plain, folder=folder, sweep=sweep).execute()
        except KeyboardInterrupt:
            return stop_code(stop, verb)


def as_rank(command: Callable[[], int]) -> int:
    """Run a command in one of the processes that torchrun started; return the exit code.

    The first does the command, and has the others do their share where it runs something.
    """
    os.environ.update(QUIET)
    from agenttrain.processes.ranks import dismiss, follow

    if not is_first():
        return follow()
    code = FAILED
    try:
        code = command()
    finally:
        dismiss(code)
    return code
