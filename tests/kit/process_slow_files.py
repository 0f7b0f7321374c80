"""Run by torchrun in each of two processes: a start from files that the second one reads slowly.

``process_slow_files.py slow|stopped <folder>``: the second process's file system takes READ_S for
each read, or stops the process at the third, as an NFS server that is gone does.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path, PosixPath
from typing import Any

import tiny
import torch
from accelerate.state import AcceleratorState
from torchrun import tell
from training_cases import policy

from agenttrain.launch.worker import leave
from agenttrain.training.sharding import Sharding, local_part, own_rows
from agenttrain.training.sliced_weights import SlicedWeights, empty_model
from agenttrain.training.world import World, WorldTimeout
from agenttrain.utils.exit_codes import DONE

TIMEOUT_S = 6.0
READ_S = 1.0
READS = 24
"""Of the tiny model's weights: 11 for each of two layers, the embeddings and the last norm."""


class SlowFile(io.FileIO):
    """A file each of whose reads is delayed."""

    delay: Callable[[], None]

    def readinto(self, buffer: Any) -> int | None:
        self.delay()
        return super().readinto(buffer)


class SlowFolder(PosixPath):
    """A folder of such files; `delay` is called before each read."""

    delay: Callable[[], None]

    def open(self, mode: str = "r", buffering: int = -1, *others: Any, **more: Any) -> Any:
        if mode != "rb" or buffering != 0:
            return super().open(mode, buffering, *others, **more)
        file = SlowFile(self)
        file.delay = SlowFolder.delay
        return file


def start(folder: Path, world: World) -> list[str]:
    """Start; return the weights that differ from those of the files."""
    AcceleratorState._reset_state()
    model = empty_model(folder, torch.float32)
    weights = SlicedWeights(model, folder, world.rank)
    started = policy(model, processes={"world": world, "sharding": Sharding(), "weights": weights})
    expected = dict(tiny.model().named_parameters())
    wrong = []
    for name, weight in started.model.named_parameters():
        rows = own_rows(weight)
        if not torch.equal(local_part(weight), expected[name][rows.start : rows.stop]):
            wrong.append(name)
    return wrong


def main() -> None:
    """What is asked for."""
    case, folder = sys.argv[1], Path(sys.argv[2])
    world = World.start(timeout_s=TIMEOUT_S)
    if world.is_main:
        tiny.model().save_pretrained(folder)
    world.barrier("the model")
    pids = world.gather([os.getpid()])
    reads = 0

    def delay() -> None:
        nonlocal reads
        reads += 1
        if case == "slow":
            time.sleep(READ_S)
        elif reads == 3:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(DONE)  # it was continued: the test is over

    SlowFolder.delay = staticmethod(delay)
    found: dict[str, Any] = {}
    before, began = world.progress, time.monotonic()
    try:
        found["wrong"] = start(folder if world.is_main else SlowFolder(folder), world)
    except WorldTimeout as error:
        found["error"], found["missing"] = str(error), list(error.missing)
        if world.is_main:
            os.kill(pids[1], signal.SIGCONT)
    found |= {"reads": reads, "progress": world.progress - before, "s": time.monotonic() - began}
    tell(world.rank, found)


if __name__ == "__main__":
    main()
    leave(DONE)
