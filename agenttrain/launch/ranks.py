"""One rank of a run: it composes its own command line, and all ranks compare what they have.

Composing is deterministic, so only the run folder, which is named by a clock, goes round. What
differs nevertheless (another command line, another node's files, another version) is refused on
every rank before weights are loaded.
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
from typing import Any

import torch.distributed as dist

from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed
from agenttrain.settings.saved import differences
from agenttrain.training.world import World
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import DONE

OF_NODE = ("processes", "rendezvous", "node_rank")
"""Settings of `distributed` that may differ from node to node."""
SHOWN = 3
"""Differences that are named; one cause may have many."""


class Refused(ConfigError):
    """Not all ranks can run the same; raised on every rank with the same message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Run that a rank proposes."""

    settings: dict[str, Any] = field(default_factory=dict)
    """All that must be the same on every rank; empty: nothing is to be run."""
    folder: str = ""
    resumes: bool = False
    """True if there is a run in the folder already, which goes on."""
    problem: str | None = None
    """The reason why this rank cannot run it."""

    @classmethod
    def of(cls, command: Command, composed: Composed, folder: Path) -> Proposal:
        """The proposal to run a command with the settings that it composes to."""
        config, plain = composed.config, composed.plain
        sections = {name: value for name, value in plain.items() if name != "distributed"}
        section = {k: v for k, v in plain["distributed"].items() if k not in OF_NODE}
        settings = {
            **sections,
            "distributed": section,
            # The folder of resume=auto is the first rank's: another node may not see yet that a run
            # is in it.
            "resume": "auto" if command.auto else config.resume,
            "resume_changed": [str(part) for part in config.resume_changed],
            "verb": command.verb,
            "agenttrain": version("agenttrain"),
        }
        return cls(settings=settings, folder=str(folder), resumes=config.resume is not None)

    def differs_from(self, first: Proposal) -> str | None:
        """Return what this rank has otherwise than the first; None if it has the same.

        Example: ``optimizer.lr=0.1: the first rank has optimizer.lr=0.2; start every rank with …``
        """
        if not first.settings:
            return None
        both = list(differences(first.settings, self.settings))
        if not both:
            return None
        more = f" and {len(both) - SHOWN} more" if len(both) > SHOWN else ""
        ours = " ".join(f"{key}={own}" for key, _, own in both[:SHOWN])
        theirs = " ".join(f"{key}={other}" for key, other, _ in both[:SHOWN])
        return (
            f"{ours}{more}: the first rank has {theirs}; start every rank with the same command "
            "line, the same files and the same version of agenttrain"
        )


def agree(world: World, own: Proposal) -> Proposal:
    """Return the first rank's proposal.

    Raises Refused on every rank unless all can run the same.
    """
    first = world.broadcast(own, "the settings")
    problem = own.problem
    if problem is None and first.problem is None:
        problem = own.differs_from(first)
    problems = world.gather([(problem, socket.gethostname())], "the settings")
    named = {text for text, _ in problems if text is not None}
    if not named:
        return first
    if named == {first.problem}:  # of all ranks, or of the folder, which is the first one's
        raise Refused(str(first.problem))
    raise Refused(
        "\n".join(
            f"rank {rank} on {host}: {text}"
            for rank, (text, host) in enumerate(problems)
            if text is not None and text not in [earlier for earlier, _ in problems[:rank]]
        )
    )


def run(command: Command, composed: Composed, folder: Path, *, sweep: bool) -> int:
    """Do this rank's share of a command; raises what stops it, besides errors of the run on the
    first rank."""
    world = World.start(timeout_s=composed.config.distributed.timeout_s)
    first = agree(world, Proposal.of(command, composed, folder))
    if not first.settings:
        return DONE
    composed.config.resume = first.folder if first.resumes else None
    if not world.is_main:
        redirect(Path(first.folder) / "logs" / f"rank-{world.rank}.log")
        faulthandler.enable()
    from agenttrain.runs.run import Run

    return Run(
        verb=command.verb,
        config=composed.config,
        plain=composed.plain,
        folder=Path(first.folder),
        sweep=sweep,
        world=world,
    ).execute()


def share(command: Callable[[], int]) -> int:
    """Run a command that composes and comes to `run`; return its exit code.

    Where it does not come so far the other ranks, which wait for this one, get to know why.
    """
    if os.environ["RANK"] != "0":
        redirect(Path(os.devnull))  # the first rank prints what all of them compose
    try:
        code = command()
    except ConfigError as error:
        if not dist.is_initialized():
            agree(World.start(), Proposal(problem=str(error)))
        raise
    if code == DONE and not dist.is_initialized():
        agree(World.start(), Proposal())
    return code


def redirect(path: Path) -> None:
    """Append all that this process prints from now on, by libraries in C too, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
