"""Settings of a run's processes."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Whole, raise_problems

LONGEST_TIMEOUT_S = 10_000_000
"""Four months: torch counts nanoseconds, and has no infinity."""


class DistributedName(StrEnum):
    """Ways in which the processes of a run share the policy."""

    single = "single"
    """One process."""
    ddp = "ddp"
    """Each process holds the whole policy; gradients are averaged."""
    fsdp2 = "fsdp2"
    """Each process holds a part of every weight, of its gradient and of the optimizer's state."""


class ShardWithin(StrEnum):
    """The processes that hold one copy of the policy together with fsdp2."""

    run = "run"
    """All of them: the least memory."""
    node = "node"
    """Those of each node, so that layers are gathered within it and only gradients cross nodes."""


@dataclass(config=SETTINGS)
class DistributedConfig:
    """The processes of a run, on one node or several. Their number changes the results no more than
    rounding does."""

    name: Data[DistributedName] = DistributedName.single
    """One process, or the way in which several processes share the policy."""
    processes: Whole | None = Field(default=None, ge=1)
    """Processes of each node; None: one per GPU."""
    nodes: Whole = Field(default=1, ge=1)
    """Machines; the same command is started once on each."""
    rendezvous: str | None = None
    """`host:port` of the first node, which must be free there; for nodes > 1."""
    node_rank: Whole | None = Field(default=None, ge=0)
    """This node's number, from 0; None: SLURM_NODEID. For nodes > 1."""
    timeout_s: Number = Field(default=600.0, gt=0, le=LONGEST_TIMEOUT_S)
    """Seconds that a process waits for another one before the run fails."""
    cpu_offload: Data[bool] = False
    """fsdp2: keep weights and optimizer in the host's memory."""
    shard_within: Data[ShardWithin] = ShardWithin.run
    """fsdp2: the processes that hold one copy of the policy together, each a part of it."""
    context_parallel: Whole = Field(default=1, ge=1)
    """Successive processes that compute the tokens of a microbatch together, so that each holds a
    part of a long rollout's activations; it must divide the processes of the run. It has never been
    run on GPUs."""
    restarts: Whole = Field(default=0, ge=0)
    """Number of automatic restarts from the newest checkpoint, each after a training process was
    killed by a signal or ended by the watchdog. Servers go on after a signal. The watchdog ends
    them too, because one of them may be the cause of the stall."""

    @model_validator(mode="after")
    def _check(self) -> DistributedConfig:
        raise_problems(self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        """Yield settings that contradict each other, have no effect or are missing."""
        yield from self._process_problems()
        yield from self._fsdp2_problems()
        yield from self._restart_problems()
        yield from self._node_problems()

    def _process_problems(self) -> Iterator[str]:
        """Yield numbers of processes that `name` or `context_parallel` rules out."""
        if self.name is DistributedName.single:
            for key, value in (("processes", self.processes), ("nodes", self.nodes)):
                if (value or 0) > 1:
                    yield (
                        f"distributed.{key}={value}: distributed=single is one process; add "
                        "distributed=ddp or distributed=fsdp2"
                    )
            if self.context_parallel > 1:
                yield (
                    f"distributed.context_parallel={self.context_parallel}: distributed=single is "
                    "one process; add distributed=ddp or distributed=fsdp2"
                )
        elif self.processes is not None:
            yield from uneven_groups(self, self.processes)

    def _fsdp2_problems(self) -> Iterator[str]:
        """Yield settings that only fsdp2 has, beside another `name`."""
        by_node = self.shard_within is ShardWithin.node
        for setting, is_set in (
            ("cpu_offload=true", self.cpu_offload),
            ("shard_within=node", by_node),
        ):
            if is_set and self.name is not DistributedName.fsdp2:
                yield (
                    f"distributed.{setting}: has no effect with distributed={self.name}; add "
                    "distributed=fsdp2"
                )

    def _restart_problems(self) -> Iterator[str]:
        """Yield why there can be no `restarts`, if they are set."""
        if self.restarts and self.name is DistributedName.single:
            yield (
                f"distributed.restarts={self.restarts}: distributed=single has no launcher that "
                "could restart it; add distributed=ddp"
            )
        if self.restarts and self.nodes > 1:
            yield (
                f"distributed.restarts={self.restarts}: is for one node; leave it out, and "
                "have the scheduler start the job again with resume=auto"
            )

    def _node_problems(self) -> Iterator[str]:
        """Yield problems of `rendezvous` and `node_rank`, which are for several nodes."""
        if self.nodes < 2:
            for key in ("rendezvous", "node_rank"):
                if (value := getattr(self, key)) is not None:
                    yield f"distributed.{key}={value}: is for distributed.nodes > 1; leave it out"
            return
        if self.rendezvous is None:
            yield (
                f"distributed.nodes={self.nodes}: where do the nodes meet? add "
                "distributed.rendezvous=<first node's name>:29500"
            )
        else:
            host, _, port = self.rendezvous.rpartition(":")
            if not (host and port.isdecimal() and 0 < int(port) < 65536):
                yield (
                    f"distributed.rendezvous={self.rendezvous}: must be a host and a port, e.g. "
                    "node1:29500"
                )
        if self.node_rank is not None and self.node_rank >= self.nodes:
            yield (
                f"distributed.node_rank={self.node_rank}: distributed.nodes={self.nodes} are "
                f"numbered 0 to {self.nodes - 1}"
            )


def uneven_groups(section: DistributedConfig, processes: int) -> Iterator[str]:
    """Yield the problem if the run's processes cannot be divided into groups of `context_parallel`.

    `processes` is their number on each node.
    """
    size, total = section.context_parallel, processes * section.nodes
    if total % size:
        divisors = [str(n) for n in range(1, total + 1) if total % n == 0]
        yield (
            f"distributed.context_parallel={size}: {total} processes cannot be divided into groups "
            f"of {size}; set it to one of {', '.join(divisors)}, or distributed.processes to a "
            f"multiple of {size}"
        )


def several_processes(section: DistributedConfig) -> bool:
    """Return True if a run has several processes, or may have: by default there is one per GPU."""
    several = section.nodes > 1 or section.processes != 1
    return several and section.name is not DistributedName.single
