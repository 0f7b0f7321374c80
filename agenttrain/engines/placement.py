"""Placement: which GPUs of this machine the servers take beside the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator

from agenttrain.engines.config import ServersConfig
from agenttrain.utils.sections import shown


def placement_problems(servers: ServersConfig, gpus: int, trainers: int = 1) -> Iterator[str]:
    """Yield why servers do not fit a machine with `gpus` GPUs; with none they run on the CPU.

    The first `trainers` GPUs are those of the training processes.
    """
    needed = servers.count * servers.tensor_parallel_size
    chosen = servers.gpus
    if chosen is None:
        if 0 < gpus < needed + trainers:
            others = "the trainer's" if trainers == 1 else f"the {trainers} of the trainer"
            yield (
                f"servers.count={servers.count}: with servers.tensor_parallel_size="
                f"{servers.tensor_parallel_size} the servers need {needed} GPUs beside "
                f"{others}, and this machine has {gpus}; lower it"
                f"{', or set distributed.processes' if trainers > 1 else ''}"
            )
        return
    if gpus == 0:
        yield f"servers.gpus={shown(chosen)}: this machine has no GPU; leave it out"
    elif max(chosen) >= gpus:
        yield f"servers.gpus={shown(chosen)}: this machine's GPUs are 0 to {gpus - 1}"
    elif min(chosen) < trainers:
        yield f"servers.gpus={shown(chosen)}: GPU {min(chosen)} is the trainer's; leave it out"


def place(servers: ServersConfig, trainers: int = 1) -> tuple[tuple[int | str, ...], ...]:
    """Return the GPUs of each server, as CUDA_VISIBLE_DEVICES names them.

    Example: two servers of two GPUs beside one trainer: ``((1, 2), (3, 4))``. On nodes of their own
    they are positions among the GPUs of the server's node: ``((0, 1), (2, 3), (0, 1), (2, 3))``.
    """
    size = servers.tensor_parallel_size
    if servers.nodes:
        firsts = [number % servers.per_node * size for number in range(servers.count)]
        return tuple(tuple(range(first, first + size)) for first in firsts)
    numbers = servers.gpus or list(range(trainers, trainers + servers.count * size))
    names: list[int | str] = list(numbers)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = [visible.split(",")[number] for number in numbers]
    return tuple(tuple(names[i * size : (i + 1) * size]) for i in range(servers.count))
