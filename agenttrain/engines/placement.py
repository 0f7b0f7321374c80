"""Placement: which GPUs of this machine the servers take beside the trainer.

A fleet is the servers of one section: the policy's, at `servers`, or a role's, at `roles.judge`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import count, islice

from agenttrain.engines.config import ServersConfig, StartedServers
from agenttrain.utils.sections import shown

Fleets = Mapping[str, StartedServers]
"""Servers by the key of their section, in the order in which they take free GPUs."""


def placement_problems(fleets: Fleets, gpus: int, trainers: int = 1) -> Iterator[str]:
    """Yield why servers do not fit a machine with `gpus` GPUs; with none they run on the CPU.

    The first `trainers` GPUs are those of the training processes.
    """
    owners: dict[int, str] = {}
    for key, servers in fleets.items():
        chosen = servers.gpus
        if chosen is None:
            continue
        if gpus == 0:
            yield f"{key}.gpus={shown(chosen)}: this machine has no GPU; leave it out"
        elif max(chosen) >= gpus:
            yield f"{key}.gpus={shown(chosen)}: this machine's GPUs are 0 to {gpus - 1}"
        elif min(chosen) < trainers:
            yield f"{key}.gpus={shown(chosen)}: GPU {min(chosen)} is the trainer's; leave it out"
        elif taken := [gpu for gpu in chosen if gpu in owners]:
            yield (
                f"{key}.gpus={shown(chosen)}: {owners[taken[0]]}.gpus has GPU {taken[0]} too; "
                "name each GPU once"
            )
        owners |= {gpu: key for gpu in chosen if gpu not in owners}
    free = [gpu for gpu in range(trainers, gpus) if gpu not in owners]
    unplaced = {key: servers for key, servers in fleets.items() if servers.gpus is None}
    needed = sum(servers.gpu_count for servers in unplaced.values())
    if gpus == 0 or needed <= len(free):
        return
    settings = " ".join(f"{key}.count={servers.count}" for key, servers in unplaced.items())
    sizes = " and ".join(
        f"{key}.tensor_parallel_size={servers.tensor_parallel_size}"
        for key, servers in unplaced.items()
    )
    others = "the trainer's" if trainers == 1 else f"the {trainers} of the trainer"
    named = f" and the {len(owners)} that are named" if owners else ""
    lower = "lower it" if len(unplaced) == 1 else "lower one of them"
    yield (
        f"{settings}: with {sizes} the servers need {needed} GPUs beside {others}{named}, and this "
        f"machine has {gpus}; {lower}{', or set distributed.processes' if trainers > 1 else ''}"
    )


def gpu_numbers(
    servers: StartedServers, trainers: int = 1, taken: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the numbers of the servers' GPUs; `taken` are those of others beside the trainers'."""
    free = (gpu for gpu in count(trainers) if gpu not in taken)
    return tuple(servers.gpus or islice(free, servers.gpu_count))


def place(
    servers: StartedServers, trainers: int = 1, taken: Collection[int] = ()
) -> tuple[tuple[int | str, ...], ...]:
    """Return the GPUs of each server, as CUDA_VISIBLE_DEVICES names them.

    Example: two servers of two GPUs beside one trainer: ``((1, 2), (3, 4))``. On nodes of their own
    they are positions among the GPUs of the server's node: ``((0, 1), (2, 3), (0, 1), (2, 3))``.
    """
    size = servers.tensor_parallel_size
    if isinstance(servers, ServersConfig) and servers.nodes:
        firsts = [number % servers.per_node * size for number in range(servers.count)]
        return tuple(tuple(range(first, first + size)) for first in firsts)
    numbers = gpu_numbers(servers, trainers, taken)
    names: list[int | str] = list(numbers)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = [visible.split(",")[number] for number in numbers]
    return tuple(tuple(names[i * size : (i + 1) * size]) for i in range(servers.count))
