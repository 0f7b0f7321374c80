"""What every process of a run is told, and how it is found out where there are several.

Processes come from `launcher.py`, or from torchrun and its like, which say so in the environment
(RANK, WORLD_SIZE, MASTER_ADDR, …).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agenttrain.config.compose import Composed, convert
from agenttrain.config.distributed import DistributedConfig, DistributedName
from agenttrain.config.errors import ConfigError

EXCHANGE = "AGENTTRAIN_EXCHANGE"
"""Environment: the folder where a launcher and its workers leave each other files."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment: every wait for another process that takes its time would be two warnings."""
FOREIGN = {
    "ACCELERATE_USE_FSDP": "distributed=fsdp2",
    "ACCELERATE_USE_DEEPSPEED": "distributed=fsdp2",
}
"""What accelerate's launcher would decide over our head -> the setting that takes its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run as plain data: what the process that composed it tells the others."""

    plain: dict[str, Any]
    resume: str | None
    folder: str
    verb: str
    sweep: bool = False

    @classmethod
    def of(cls, composed: Composed, folder: Path, verb: str, *, sweep: bool = False) -> Order:
        """The order to run `verb` in `folder`."""
        return cls(
            plain=composed.plain,
            resume=composed.config.resume,
            folder=str(folder),
            verb=verb,
            sweep=sweep,
        )

    @classmethod
    def parse(cls, text: str) -> Order:
        """What `text` wrote."""
        return cls(**json.loads(text))

    def text(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    def composed(self) -> Composed:
        """The settings."""
        composed = convert(self.plain)
        composed.config.resume = self.resume
        return composed


def started_by_others(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun or one of its like started this process as one of several."""
    several = int(environment.get("WORLD_SIZE", "1")) > 1 and "RANK" in environment
    return several and EXCHANGE not in environment


def is_first(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process composes for the others, where others started it."""
    return environment["RANK"] == "0"


def adopt(composed: Composed, typed: Sequence[str]) -> None:
    """Fit the settings to the processes that there are; raises ConfigError for a contradiction.

    `typed` are the user's overrides: what only a saved run says may differ.
    """
    section, world = composed.config.distributed, int(os.environ["WORLD_SIZE"])
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


def resolve(section: DistributedConfig, devices: int) -> int:
    """How many processes this node runs; raises ConfigError. `devices` are its GPUs."""
    if section.name is DistributedName.single:
        return 1
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
