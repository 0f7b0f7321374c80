"""One rank of a run: it composes its own command line, and all ranks compare the results.

Composing is deterministic, so the first rank only has to send the run folder, whose name contains
the time. If the settings differ nevertheless (another command line, other files on a node, another
version), every rank stops with an error before weights are loaded.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from threading import Event
from typing import Any

from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed
from agenttrain.settings.saved import differences, tracker_project
from agenttrain.training.world import World
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import DONE

OF_NODE = ("processes", "rendezvous", "node_rank")
"""Settings of `distributed` that may differ from node to node, so that they are not compared."""
SHOWN = 3
"""Differences that an error lists; one cause may have many."""
_agreed = Event()
"""Set once this process has compared settings with the other ranks. `dist.is_initialized()` would
not do: vLLM destroys the process group when it closes, and the ranks would compare again."""


class Disagreement(ConfigError):
    """Raised on every rank, with the same message, if not all ranks can run the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The run that a rank proposes."""

    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that must be the same on every rank; empty: there is nothing to run."""
    folder: str = ""
    resumes: bool = False
    """True if the folder holds a run, which is resumed."""
    problem: str | None = None
    """The error of this rank, if it cannot run it."""


def agree(world: World, own: Proposal) -> Proposal:
    """Exchange proposals with all ranks, and return the first rank's.

    Raises Disagreement on every rank if settings differ or a rank has a problem, with a message
    such as ``optimizer.lr=0.1: the first rank has optimizer.lr=0.2; start every rank with …``.
    """
    _agreed.set()  # `share`, which runs this rank's command, need not call `agree` after it
    first = world.broadcast(own, "the settings")  # the first rank's, on every rank
    problem = own.problem
    if problem is None and first.problem is None and first.settings:
        different = list(differences(first.settings, own.settings))
        if different:
            more = f" and {len(different) - SHOWN} more" if len(different) > SHOWN else ""
            own_values = " ".join(f"{key}={value}" for key, _, value in different[:SHOWN])
            first_values = " ".join(f"{key}={value}" for key, value, _ in different[:SHOWN])
            problem = (
                f"{own_values}{more}: the first rank has {first_values}; start every rank with the "
                "same command line, the same files and the same version of agenttrain"
            )
    # gather joins the ranks' lists, each of one pair (problem, host): the index is the rank.
    problems = world.gather([(problem, socket.gethostname())], "the settings")
    distinct = {text for text, _ in problems if text is not None}
    if not distinct:
        return first
    if distinct == {first.problem}:
        # All ranks that have a problem have the first rank's, such as a typing error in their
        # command line. Naming a rank would not help.
        raise Disagreement(str(first.problem))
    # Each problem once, with the first rank that has it.
    raise Disagreement(
        "\n".join(
            f"rank {rank} on {host}: {text}"
            for rank, (text, host) in enumerate(problems)
            if text is not None and text not in [earlier for earlier, _ in problems[:rank]]
        )
    )


def run(command: Command, composed: Composed, folder: Path, *, sweep: bool) -> int:
    """Agree with the other ranks on the run, and execute it; return the exit code.

    `folder` is the run folder that this rank proposes; the first rank's is used. Raises the error
    that stops this rank. The first rank does not raise those of the run itself: `Run` prints them.
    """
    config, plain = composed.config, composed.plain
    world = World.start(timeout_s=config.distributed.timeout_s)
    proposal = Proposal(
        settings=_compared_settings(command, composed),
        folder=str(folder),
        resumes=config.resume is not None,
    )
    agreed = agree(world, proposal)
    if not agreed.settings:  # the first rank found nothing to run
        return DONE
    # With resume=auto each rank has looked for a run to resume. The first rank's result counts.
    config.resume = agreed.folder if agreed.resumes else None
    if not world.is_main:
        redirect(Path(agreed.folder) / "logs" / f"rank-{world.rank}.log")
        faulthandler.enable()  # a crash in C code writes its stack into the log
    from agenttrain.runs.run import Run

    return Run(
        verb=command.verb,
        config=config,
        plain=plain,
        folder=Path(agreed.folder),
        sweep=sweep,
        words=command.words,
        experiment=tracker_project(command),
        world=world,
    ).execute()


def _compared_settings(command: Command, composed: Composed) -> dict[str, Any]:
    """Return what has to be the same on every rank: the settings and the package's version."""
    config, plain = composed.config, composed.plain
    distributed = {k: v for k, v in plain["distributed"].items() if k not in OF_NODE}
    return {
        **{name: value for name, value in plain.items() if name != "distributed"},
        "distributed": distributed,
        # Not the folder that resume=auto found: another node may not yet see it.
        "resume": "auto" if command.auto else config.resume,
        "resume_changed": [str(part) for part in config.resume_changed],
        "verb": command.verb,
        "agenttrain": version("agenttrain"),
    }


def share(command: Callable[[], int]) -> int:
    """Run a command that composes settings and calls `run`; return its exit code.

    `run` has all ranks exchange proposals (`agree`), where each waits for the others. A command
    that ends before, because of an error or with nothing to run, would leave the others waiting. So
    this rank then takes part with a proposal that says so.
    """
    if os.environ["RANK"] != "0":
        redirect(Path(os.devnull))  # the first rank prints for all of them
    try:
        code = command()
    except ConfigError as error:
        if not _agreed.is_set():
            agree(World.start(), Proposal(problem=str(error)))
        raise
    # Another code comes from a signal. The program that started the ranks then ends all of them.
    if code == DONE and not _agreed.is_set():
        agree(World.start(), Proposal())  # there is nothing to run
    return code


def redirect(path: Path) -> None:
    """Redirect standard output and error to the end of a file, also those of C libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
