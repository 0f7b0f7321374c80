"""Start of a checked command: in this process, in several workers, or as one of torchrun's ranks.

Modules that need torch are imported last, so that a command that is refused never loads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from agenttrain.launch.config import DistributedName
from agenttrain.launch.orders import QUIET, Order, adopt, is_first, started_by_others, stop_code
from agenttrain.settings.compose import Composed, complete_objective
from agenttrain.utils.exit_codes import FAILED
from agenttrain.utils.signals import listening


def start(composed: Composed, folder: Path, verb: str, *, sweep: bool = False) -> int:
    """Run `verb` in its folder; return the exit code. Raises ConfigError."""
    config, plain = composed.config, composed.plain
    if verb == "train":
        complete_objective(composed)
    if config.distributed.name is not DistributedName.single and not started_by_others():
        from agenttrain.launch.launcher import run_workers

        return run_workers(composed, folder, verb, sweep=sweep)
    with listening() as stop:
        try:
            if started_by_others():
                from agenttrain.launch.ranks import lead

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
    from agenttrain.launch.ranks import dismiss, follow

    if not is_first():
        return follow()
    code = FAILED
    try:
        code = command()
    finally:
        dismiss(code)
    return code
