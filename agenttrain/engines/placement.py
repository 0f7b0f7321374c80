"""Placement: which GPUs of this machine the servers take beside the trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator

from agenttrain.engines.config import ServersConfig
from agenttrain.utils.sections import shown

TRAINER = 0
"""GPU of the trainer, which is one process."""


def placement_problems(servers: ServersConfig, gpus: int) -> Iterator[str]:
    """Yield why servers do not fit a machine with `gpus` GPUs; with none they run on the CPU."""
    needed = servers.count * servers.tensor_parallel_size
    chosen = servers.gpus
    if chosen is None:
        if 0 < gpus < needed + 1:
            yield (
                f"servers.count={servers.count}: with servers.tensor_parallel_size="
                f"{servers.tensor_parallel_size} the servers need {needed} GPUs beside the "
                f"trainer's, and this machine has {gpus}; lower it"
            )
        return
    if gpus == 0:
        yield f"servers.gpus={shown(chosen)}: this machine has no GPU; leave it out"
    elif max(chosen) >= gpus:
        yield f"servers.gpus={shown(chosen)}: this machine's GPUs are 0 to {gpus - 1}"
    elif TRAINER in chosen:
        yield f"servers.gpus={shown(chosen)}: GPU {TRAINER} is the trainer's; leave it out"


def place(servers: ServersConfig) -> tuple[tuple[int | str, ...], ...]:
    """Return the GPUs of each server, as CUDA_VISIBLE_DEVICES names them.

    Example: two servers of two GPUs beside the trainer: ``((1, 2), (3, 4))``.
    """
    size = servers.tensor_parallel_size
    numbers = servers.gpus or list(range(TRAINER + 1, TRAINER + 1 + servers.count * size))
    names: list[int | str] = list(numbers)
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        names = [visible.split(",")[number] for number in numbers]
    return tuple(tuple(names[i * size : (i + 1) * size]) for i in range(servers.count))
