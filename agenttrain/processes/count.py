"""How many processes a run has, and who started them.

They come from `launcher.py`, or from torchrun and its like, which say so in the environment
(RANK, WORLD_SIZE, MASTER_ADDR, …).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from agenttrain.config.command import Command
from agenttrain.config.compose import Composed
from agenttrain.config.distributed import DistributedConfig, DistributedName, process_problems
from agenttrain.config.errors import ConfigError
from agenttrain.processes.exchange import EXCHANGE

RUNS = ("train", "sft", "eval")
"""Verbs that start processes."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment: every wait for another process that takes its time would be two warnings."""
FOREIGN = {
    "ACCELERATE_USE_FSDP": "distributed=fsdp2",
    "ACCELERATE_USE_DEEPSPEED": "distributed=fsdp2",
}
"""What accelerate's launcher would decide over our head -> the setting that takes its place."""


def started_by_others(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun or one of its like started this process as one of several."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment
    return several and EXCHANGE not in environment


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process composes for the others, where others started it."""
    return environment["RANK"] == "0"


def check_processes(command: Command, runs: Sequence[Composed]) -> None:
    """Raise ConfigError for a run that cannot have the processes that it asks for, or is in."""
    if started_by_others() and command.sweep:
        raise ConfigError(
            "-m: the processes of torchrun are there once, and a sweep starts some for each run; "
            "start agenttrain itself with distributed.processes=…"
        )
    for run in runs:
        if started_by_others() and command.verb in RUNS:
            adopt(run, command.overrides)
        section = run.config.distributed
        if problems := list(process_problems(command.verb, run.config)):
            raise ConfigError("\n".join(problems))
        if section.nodes > 1 and command.sweep:
            raise ConfigError(
                f"distributed.nodes={section.nodes}: the runs of a sweep (-m) have one node each; "
                "leave one of the two out"
            )
        if section.name is not DistributedName.single and command.verb in RUNS:
            node_rank(section)
            resolve(section)


def adopt(composed: Composed, typed: Sequence[str]) -> None:
    """Fit the settings to the processes that there are; raises ConfigError for a contradiction.

    `typed` are the user's overrides: what only a saved run says may differ.
    """
    section = composed.config.distributed
    world = int(os.environ["WORLD_SIZE"])
    for variable, remedy in FOREIGN.items():
        if os.environ.get(variable, "false").lower() in ("1", "true"):
            raise ConfigError(f"{variable}={os.environ[variable]}: say {remedy} instead")
    said = [text for text in typed if text.lstrip("+").partition("=")[0] in OWN]
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    wanted = (section.processes or local) * section.nodes
    if said and (section.name is DistributedName.single or wanted != world):
        raise ConfigError(
            f"{' '.join(said)}: {world} processes were started (WORLD_SIZE); leave it out, or "
            "start as many as it says"
        )
    if section.name is DistributedName.single:
        section.name = DistributedName.ddp
    section.processes, section.nodes = local, max(world // local, 1)
    composed.plain["distributed"].update(
        name=str(section.name), processes=section.processes, nodes=section.nodes
    )


OWN = ("distributed", "distributed.name", "distributed.processes", "distributed.nodes")
"""What torchrun and its like have decided already."""


def resolve(section: DistributedConfig) -> int:
    """How many processes this node runs; raises ConfigError."""
    import torch  # only here: a run of one process does not need it yet

    devices = torch.cuda.device_count()
    if section.processes is None and devices == 0:
        raise ConfigError(
            f"distributed={section.name}: there is no GPU here to run a process on each; say how "
            "many there are to be on the CPU, e.g. distributed.processes=2"
        )
    if devices and (section.processes or 0) > devices:
        raise ConfigError(
            f"distributed.processes={section.processes}: this machine has {devices} GPUs; lower it"
        )
    return section.processes or devices


def node_rank(section: DistributedConfig) -> int:
    """This machine's number; raises ConfigError where nothing says it."""
    if section.nodes == 1:
        return 0
    if section.node_rank is not None:
        return section.node_rank
    found = os.environ.get("SLURM_NODEID", "")
    if not found.isdecimal():
        raise ConfigError(
            "distributed.node_rank=null: which of the nodes is this one? add "
            "distributed.node_rank=0 on the first, 1 on the second, …"
        )
    if int(found) >= section.nodes:
        raise ConfigError(
            f"distributed.nodes={section.nodes}: this is node {found} (SLURM_NODEID); raise it"
        )
    return int(found)


def is_later_node(section: DistributedConfig) -> bool:
    """Whether another node has the run folder and the terminal."""
    return section.name is not DistributedName.single and node_rank(section) > 0
