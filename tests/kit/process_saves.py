"""Run by torchrun in each process: checkpoints between numbers of processes, and HSDP.

``process_saves.py save <folder>`` trains and saves each case in <folder>/<case>; ``load`` makes a
policy of each and tells the checksums of its whole state; ``hsdp`` tells updates on a mesh of two
nodes and without one.
"""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from process_states import keeping, learn
from torch import Tensor
from torchrun import tell
from two_processes import Case, make

from agenttrain.launch.worker import leave
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import full_tensor
from agenttrain.training.world import World
from agenttrain.utils.exit_codes import DONE

CASES = {
    "adamw": Case(algorithm={"kl": {"beta": 0.1}}),
    "masters": Case(dtype=torch.bfloat16),
    "muon": Case(optimizer={"name": "muon"}),
    "adapters": Case(lora=True),
    "nodes": Case(within=2),
}


def digests(trained: Policy) -> dict[str, str]:
    """Checksum of each weight and of each tensor of the optimizer, by name."""
    state = trained.state_dict()
    return dict(_digests(dict(trained.model.named_parameters()), "weight")) | dict(
        _digests(state["optimizer"], "optimizer")
    )


def _digests(value: Any, name: str):
    if isinstance(value, Tensor):
        data = full_tensor(value.detach()).contiguous().reshape(-1).view(torch.uint8).numpy()
        yield name, hashlib.sha256(data).hexdigest()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _digests(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for key, item in enumerate(value):
            yield from _digests(item, f"{name}.{key}")


def save(world: World, folder: Path) -> dict[str, Any]:
    """Two updates and a checkpoint of each case, beside a third update."""
    found = {}
    for name, case in CASES.items():
        trained = make(case, "fsdp2", world)
        for step in range(2):
            learn(trained, step, world)
        found[name] = digests(trained)
        saver = keeping(folder / name, world)
        saver.begin(trained, step=2)
        learn(trained, 2, world)
        saver.finish(world)
    return found


def load(world: World, folder: Path) -> dict[str, Any]:
    """The checksums of what the checkpoints hold."""
    found = {}
    for name, case in CASES.items():
        if world.size == 3:  # which nodes of two do not divide
            case = replace(case, within=None)
        trained = make(case, "fsdp2", world)
        learn(trained, 7, world)
        keeping(folder / name, world).load_latest(trained)
        found[name] = digests(trained)
    return found


def hsdp(world: World) -> dict[str, Any]:
    """Metrics and weights of three updates, with the weights within all and within two ranks."""
    found = {}
    for within in (None, 2):
        trained = make(Case(within=within, algorithm={"kl": {"beta": 0.1}}), "fsdp2", world)
        metrics = [learn(trained, step, world) for step in range(3)]
        weights = {name: full_tensor(p.detach()) for name, p in trained.model.named_parameters()}
        sums = {name: weight.double().abs().sum().item() for name, weight in weights.items()}
        held = sum(p.to_local().numel() for p in trained.model.parameters())
        found[str(within)] = {"metrics": metrics, "weights": sums, "held": held}
    return found


def main() -> None:
    """What is asked for."""
    world, verb = World.start(), sys.argv[1]
    if verb == "hsdp":
        tell(world.rank, hsdp(world))
    else:
        tell(world.rank, {"save": save, "load": load}[verb](world, Path(sys.argv[2])))


if __name__ == "__main__":
    main()
    leave(DONE)
