"""Placement of servers on the GPUs of this machine that the trainer does not use.

A fleet is the servers of one section: the policy's at `servers`, or a role's at `roles.judge`.
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
    """Yield why servers do not fit on a machine with `gpus` GPUs. With 0 they run on the CPU.

    `fleets` maps sections of the settings, e.g. servers or roles.judge, to the servers that they
    describe. The first `trainers` GPUs are the training processes'.
    """
    owners: dict[int, str] = {}
    for key, servers in fleets.items():
        numbers = servers.gpus
        if numbers is None:
            continue
        setting = f"{key}.gpus={shown(numbers)}"
        if gpus == 0:
            yield f"{setting}: this machine has no GPU; leave it out"
        elif max(numbers) >= gpus:
            yield f"{setting}: this machine's GPUs are 0 to {gpus - 1}"
        elif min(numbers) < trainers:
            yield f"{setting}: GPU {min(numbers)} is the trainer's; leave it out"
        elif shared := [gpu for gpu in numbers if gpu in owners]:
            yield (
                f"{setting}: {owners[shared[0]]}.gpus has GPU {shared[0]} too; name each GPU once"
            )
        owners |= {gpu: key for gpu in numbers if gpu not in owners}
    # Servers without `gpus` share the GPUs that neither the trainer nor another section has.
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
    in_use = "the trainer's" if trainers == 1 else f"the {trainers} of the trainer"
    if owners:
        in_use += f" and the {len(owners)} that are named"
    remedy = "lower it" if len(unplaced) == 1 else "lower one of them"
    if trainers > 1:
        remedy += ", or set distributed.processes"
    yield (
        f"{settings}: with {sizes} the servers need {needed} GPUs beside {in_use}, and this "
        f"machine has {gpus}; {remedy}"
    )


def gpu_numbers(
    servers: StartedServers, trainers: int = 1, taken: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the numbers of the servers' GPUs: the named ones, or the first free ones.

    The first `trainers` GPUs are the training processes', and those of `taken` are other servers'.
    """
    free = (gpu for gpu in count(trainers) if gpu not in taken)
    return tuple(servers.gpus or islice(free, servers.gpu_count))


def place(
    servers: StartedServers, trainers: int = 1, taken: Collection[int] = ()
) -> tuple[tuple[int | str, ...], ...]:
    """Return the GPUs of each server, as CUDA_VISIBLE_DEVICES names them.

    The first `trainers` GPUs are the training processes', and those of `taken` are other servers'.

    Example: two servers of two GPUs beside one trainer: ``((1, 2), (3, 4))``. With `servers.nodes`
    the numbers count the GPUs of the server's node: ``((0, 1), (2, 3), (0, 1), (2, 3))``.
    """
    size = servers.tensor_parallel_size
    if isinstance(servers, ServersConfig) and servers.nodes:
        # Each node numbers its GPUs from 0, and its servers take them in order.
        firsts = [(number % servers.per_node) * size for number in range(servers.count)]
        return tuple(tuple(range(first, first + size)) for first in firsts)
    numbers = gpu_numbers(servers, trainers, taken)
    names: list[int | str] = list(numbers)
    # `numbers` index the GPUs that this process sees: translate them into the machine's names.
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = [visible.split(",")[number] for number in numbers]
    return tuple(tuple(names[i * size : (i + 1) * size]) for i in range(servers.count))
