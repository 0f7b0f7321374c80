"""The processes of a run: how many there are, who started them, and their messages to each other.

They come from `launcher.py`, or from torchrun and its like, which say so in the environment
(RANK, WORLD_SIZE, MASTER_ADDR, …). A launcher and its workers share a folder, the exchange: an
`Order` says what to do, a crash file why a rank stopped.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agenttrain.launch.config import DistributedConfig, DistributedName
from agenttrain.settings.checks import shared_problems
from agenttrain.settings.command_line import Command
from agenttrain.settings.compose import Composed, convert
from agenttrain.settings.machine import CHECK, process_count_problem
from agenttrain.settings.run_config import RunPart
from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.exit_codes import FAILED, INTERRUPTED, PREEMPTED, REFUSED, TERMINATED
from agenttrain.utils.signals import StopRequest

EXCHANGE = "AGENTTRAIN_EXCHANGE"
"""Environment: the folder where a launcher and its workers leave each other files."""
ORDER, CRASH = "order.json", "crash-{rank}.json"
"""Files of the exchange: what the launcher wants done; why a rank could not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run as plain data: what the process that composed it tells the others."""

    plain: dict[str, Any]
    resume: str | None
    folder: str
    verb: str
    sweep: bool = False
    resume_changed: tuple[str, ...] = ()
    """Settings changed for this resume only: `plain` does not have them."""

    @classmethod
    def of(cls, composed: Composed, folder: Path, verb: str, *, sweep: bool = False) -> Order:
        """The order to run `verb` in `folder`."""
        return cls(
            plain=composed.plain,
            resume=composed.config.resume,
            folder=str(folder),
            verb=verb,
            sweep=sweep,
            resume_changed=tuple(map(str, composed.config.resume_changed)),
        )

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read an order that `text` wrote."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """Return the order as JSON."""
        return json.dumps(asdict(self))

    def composed(self) -> Composed:
        """Return the settings."""
        composed = convert(self.plain)
        composed.config.resume = self.resume
        composed.config.resume_changed = [RunPart(name) for name in self.resume_changed]
        return composed


def write_order(exchange: Path, order: Order) -> None:
    """Write the order for the workers that are to be started, with where they find modules."""
    text = json.dumps({"order": order.text(), "sys_path": sys.path})
    (exchange / ORDER).write_text(text, encoding="utf-8")


def read_order(exchange: Path) -> Order:
    """Read what `write_order` wrote; from now on modules are found as in the launcher."""
    record = json.loads((exchange / ORDER).read_text(encoding="utf-8"))
    # `python -m` has put the current folder first, where it can hide a package.
    sys.path[:] = record["sys_path"]
    return Order.parse(record["order"])


def write_crash(exchange: Path, rank: str, error: BaseException) -> None:
    """Write why a rank cannot go on, for the launcher to report."""
    from agenttrain.training.world import PeerFailed  # only here: torch comes with it

    record = {
        **{"time": time.time(), "error": in_a_line(error), "trace": trace(error)},
        "of_peer": isinstance(error, PeerFailed),
    }
    (exchange / CRASH.format(rank=rank)).write_text(json.dumps(record), encoding="utf-8")


def read_crash(exchange: Path, rank: int) -> dict[str, Any]:
    """Read the crash that a rank recorded: `time`, `error` in a line, `trace`, and `of_peer` where
    another rank caused it; empty where it recorded nothing."""
    try:
        crash: dict[str, Any] = json.loads((exchange / CRASH.format(rank=rank)).read_text())
    except (OSError, ValueError):
        return {}
    return crash


def in_a_line(error: BaseException) -> str:
    """``ValueError: what it says``; of a ConfigError only that, which says it all."""
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def trace(error: BaseException) -> str:
    """The traceback of an error that is nobody's mistake but ours; empty for others."""
    if isinstance(error, AgenttrainError | ValueError | OSError):
        return ""
    return "".join(traceback.format_exception(error))


def code_of(error: BaseException) -> int:
    """The exit code of a process that this stopped."""
    return REFUSED if isinstance(error, ConfigError) else FAILED


def stop_code(stop: StopRequest, verb: str) -> int:
    """The exit code of a process that was interrupted before there was anything to save."""
    if not stop.at_once:
        return INTERRUPTED
    return TERMINATED if stop.insisted or verb == "eval" else PREEMPTED


RUNS = ("train", "sft", "eval")
"""Verbs that start processes."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment: every wait for another process that takes its time would be two warnings."""
FOREIGN = ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_MEGATRON_LM")
"""Decisions of accelerate's launcher that would override ours; distributed=fsdp2 replaces them."""


def started_by_others(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if torchrun or one of its like started this process as one of several."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment
    return several and EXCHANGE not in environment


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True for the process that composes for the others, where others started it."""
    return environment["RANK"] == "0"


def check_processes(command: Command, runs: Sequence[Composed]) -> None:
    """Raise ConfigError for a run that cannot have the processes that it asks for, or is in."""
    if started_by_others() and command.sweep:
        raise ConfigError(
            "-m: the processes of torchrun are there once, and a sweep starts some for each run; "
            "start agenttrain itself with distributed.processes=…"
        )
    for run in runs:
        problems = list[str]()
        if started_by_others() and command.verb in RUNS:
            adopt(run, command.overrides)
            problems += shared_problems(run.config, several=True)
        section = run.config.distributed
        if command.verb in (*RUNS, CHECK):
            problems += foreign_problems(run.config.training.mixed_precision)
        if problems:
            raise ConfigError("\n".join(problems))
        if section.nodes > 1 and command.sweep:
            raise ConfigError(
                f"distributed.nodes={section.nodes}: the runs of a sweep (-m) have one node each; "
                "leave one of the two out"
            )
        distributed = section.name is not DistributedName.single
        if distributed and command.verb in RUNS and not started_by_others():
            node_rank(section)


def adopt(composed: Composed, typed: Sequence[str]) -> None:
    """Fit the settings to the processes that there are; raises ConfigError for a contradiction.

    `typed` are the user's overrides: what only a saved run says may differ.
    """
    section = composed.config.distributed
    world = int(os.environ["WORLD_SIZE"])
    contradicting = [text for text in typed if text.lstrip("+").partition("=")[0] in OWN]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    nodes = max(world // local, 1)
    other = section.processes not in (None, local) or section.nodes not in (1, nodes)
    if contradicting and (section.name is DistributedName.single or other):
        raise ConfigError(
            f"{' '.join(contradicting)}: {world} processes were started (WORLD_SIZE), {local} on "
            f"each of {nodes} node{'s' if nodes > 1 else ''}; leave it out, or start as many as it "
            "says"
        )
    if section.name is DistributedName.single:
        section.name = DistributedName.ddp
    # As `agenttrain resume=` would start them itself: what starts more nodes is not ours to keep.
    section.processes, section.nodes = local, 1
    section.rendezvous = section.node_rank = None
    composed.plain["distributed"].update(
        name=str(section.name), processes=local, nodes=1, rendezvous=None, node_rank=None
    )


def foreign_problems(mixed_precision: str) -> Iterator[str]:
    """List settings of accelerate's launcher that the run has otherwise, with ours to use."""
    for variable in FOREIGN:
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            yield f"{variable}={os.environ[variable]}: say distributed=fsdp2 instead"
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("no", "", mixed_precision):
        yield (
            f"ACCELERATE_MIXED_PRECISION={precision}: the run has "
            f"training.mixed_precision={mixed_precision}; say training.mixed_precision=bf16 or "
            "fp16 instead"
        )
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() not in ("no", ""):
        yield f"ACCELERATE_DYNAMO_BACKEND={backend}: nothing is compiled here; leave it out"


OWN = ("distributed", "distributed.name", "distributed.processes", "distributed.nodes")
"""Settings that torchrun and its like have decided already."""


def resolve(section: DistributedConfig) -> int:
    """Return the number of processes that this node runs; raises ConfigError."""
    devices = count_gpus()
    if problem := process_count_problem(section, devices):
        raise ConfigError(problem)
    return section.processes or devices


def count_gpus() -> int:
    """Count this machine's GPUs; torch, which takes seconds to import, is asked only where a driver
    is: CUDA's, or AMD's."""
    if "torch" not in sys.modules:
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            if not Path("/dev/kfd").exists():
                return 0
    import torch

    return torch.cuda.device_count()


def node_rank(section: DistributedConfig) -> int:
    """Return this machine's number; raises ConfigError where nothing says it."""
    if section.nodes == 1:
        return 0
    if section.node_rank is not None:
        return section.node_rank
    number = os.environ.get("SLURM_NODEID", "")
    if not number.isdecimal():
        raise ConfigError(
            "distributed.node_rank=null: which of the nodes is this one? add "
            "distributed.node_rank=0 on the first, 1 on the second, …"
        )
    if int(number) >= section.nodes:
        raise ConfigError(
            f"distributed.nodes={section.nodes}: this is node {number} (SLURM_NODEID); raise it"
        )
    return int(number)


def is_later_node(section: DistributedConfig) -> bool:
    """Return True if another node has the run folder and the terminal."""
    if started_by_others():  # the first rank composes, whichever machine it is on
        return False
    return section.name is not DistributedName.single and node_rank(section) > 0
