"""Start of a checked command: in this process, in several workers, or as one rank of a run.

Modules that need torch are imported last, so that a command that fails its checks never loads it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from agenttrain.launch.config import DistributedName
from agenttrain.launch.processes import (
    QUIET,
    adopt,
    code_of,
    described,
    is_rank,
    started_by_others,
    stop_code,
)
from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed, complete_objective
from agenttrain.settings.engine_checks import admit_engine
from agenttrain.settings.machine import SAMPLING_VERBS
from agenttrain.settings.saved import tracker_project
from agenttrain.types import ConfigError
from agenttrain.utils.garbage import no_garbage_collection
from agenttrain.utils.output import unfailing
from agenttrain.utils.signals import listening

LAST_S = 1.0
"""Seconds that the other ranks wait before they exit if the ranks do not agree: torchrun ends all
ranks once one has ended, and the first rank has to print the reason."""


def start(
    command: Command, composed: Composed, folder: Path, *, program: str, sweep: bool = False
) -> int:
    """Run a command in its folder; return the exit code. Raises ConfigError.

    With several processes this is called in the launcher, which starts workers, and again in each
    worker, which is a rank. `program` is the module whose `run` workers call with the command's
    arguments. A process that torchrun started is a rank too, without a launcher of ours.
    """
    if command.verb in SAMPLING_VERBS:
        admit_engine(composed, command.verb)
    if command.verb == "train":
        complete_objective(composed)
    if composed.config.distributed.name is not DistributedName.single and not is_rank():
        from agenttrain.launch.launcher import run_workers

        return run_workers(command, composed, folder, program)
    with listening() as stop:  # SIGTERM and the like are recorded in `stop`
        try:
            if is_rank():
                from agenttrain.launch.ranks import run

                if started_by_others():
                    # Set `distributed` to the processes that torchrun has started. That the user
                    # has typed nothing else was checked before (`adopt_and_check_processes`).
                    adopt(composed, typed=())
                return run(command, composed, folder, sweep=sweep)
            with no_garbage_collection():  # faster: the import makes very many objects
                from agenttrain.runs.run import Run

            return Run(
                verb=command.verb,
                config=composed.config,
                plain=composed.plain,
                folder=folder,
                sweep=sweep,
                words=command.words,
                experiment=tracker_project(command),
            ).execute()
        except KeyboardInterrupt:
            return stop_code(stop, command.verb)


def as_rank(command: Callable[[], int], verb: str) -> int:
    """Run a command as one of the ranks that torchrun started; return the exit code.

    The first rank raises ConfigError. Other ranks print their errors, except a Disagreement, which
    the first rank prints.
    """
    rank = int(os.environ["RANK"])
    os.environ.update(QUIET)
    # Stderr without secrets; duplicated, because `share` redirects descriptor 2 of other ranks.
    terminal = unfailing(os.dup(2), hides=True)
    with listening() as stop:
        try:
            from agenttrain.launch.ranks import Disagreement, share

            return share(command)
        except KeyboardInterrupt:
            return stop_code(stop, verb)
        except Exception as error:
            if rank == 0 and isinstance(error, ConfigError):
                raise
            if isinstance(error, Disagreement):
                # torchrun ends all ranks once one has ended: the first one has to print it before.
                time.sleep(LAST_S)
            else:
                line, trace = described(error)
                for text in (trace or line).splitlines():
                    print(f"rank {rank}: {text}", file=terminal, flush=True)
            return code_of(error)
