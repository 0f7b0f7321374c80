"""Settings of a run's processes, and what they cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

LONGEST_TIMEOUT_S = 10_000_000
"""Four months: torch counts nanoseconds, and has no infinity."""


class DistributedName(StrEnum):
    """Ways in which the processes of a run share the policy."""

    single = "single"
    """There is one."""
    ddp = "ddp"
    """Each holds all of it; gradients are averaged."""
    fsdp2 = "fsdp2"
    """Each holds a part of every weight, of its gradient and of the optimizer."""


@dataclass
class DistributedConfig:
    """The processes of a run, on one node or several. Their number changes what a run does no more
    than rounding."""

    name: DistributedName = DistributedName.single
    processes: int | None = None
    """Processes of each node; None: one per GPU."""
    nodes: int = 1
    """Machines; the same command is started once on each."""
    rendezvous: str | None = None
    """`host:port` of the first node, which must be free there; for nodes > 1."""
    node_rank: int | None = None
    """This node's number, from 0; None: SLURM_NODEID. For nodes > 1."""
    timeout_s: float = 600.0
    """Seconds that a process waits for another one before the run fails."""
    cpu_offload: bool = False
    """fsdp2: keep weights and optimizer in the host's memory."""


def distributed_problems(config: Any) -> Iterator[str]:
    """Yield what is wrong with the `distributed` of a RunConfig."""
    section: DistributedConfig = config.distributed
    for key in ("processes", "nodes"):
        value = getattr(section, key)
        if value is not None and value < 1:
            yield f"distributed.{key}={value}: must be at least 1"
        if (value or 0) > 1 and section.name is DistributedName.single:
            yield (
                f"distributed.{key}={value}: distributed=single is one process; add "
                "distributed=ddp or distributed=fsdp2"
            )
    if not 0 < section.timeout_s <= LONGEST_TIMEOUT_S:
        yield (
            f"distributed.timeout_s={section.timeout_s}: must be more than 0, and at most "
            f"{LONGEST_TIMEOUT_S}"
        )
    yield from _nodes(section)
    yield from shared_problems(config)


def several_processes(section: DistributedConfig) -> bool:
    """Return whether a run has more than one process, or may have: one per GPU."""
    several = section.nodes > 1 or section.processes != 1
    return several and section.name is not DistributedName.single


def shared_problems(config: Any) -> Iterator[str]:
    """Yield what does not go with a way to share a policy."""
    section: DistributedConfig = config.distributed
    if section.cpu_offload and section.name is not DistributedName.fsdp2:
        yield (
            f"distributed.cpu_offload=true: has no effect with distributed={section.name}; add "
            "distributed=fsdp2"
        )
    if section.name is DistributedName.fsdp2 and config.training.mixed_precision == "fp16":
        yield (
            "training.mixed_precision=fp16: with distributed=fsdp2 each process would scale a part "
            "of the gradient; set training.mixed_precision=bf16, or distributed=ddp"
        )


def _nodes(section: DistributedConfig) -> Iterator[str]:
    if section.nodes < 2:
        for key in ("rendezvous", "node_rank"):
            if (value := getattr(section, key)) is not None:
                yield f"distributed.{key}={value}: is for distributed.nodes > 1; leave it out"
        return
    if section.rendezvous is None:
        yield (
            f"distributed.nodes={section.nodes}: where do the nodes meet? add "
            "distributed.rendezvous=<first node's name>:29500"
        )
    elif not is_endpoint(section.rendezvous):
        yield (
            f"distributed.rendezvous={section.rendezvous}: must be a host and a port, e.g. "
            "node1:29500"
        )
    rank = section.node_rank
    if rank is not None and not 0 <= rank < section.nodes:
        yield (
            f"distributed.node_rank={rank}: distributed.nodes={section.nodes} are numbered 0 to "
            f"{section.nodes - 1}"
        )


def is_endpoint(text: str) -> bool:
    """Return whether a text is `host:port`.

    Example: ``node1:29500`` is one, ``node1`` is none.
    """
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
