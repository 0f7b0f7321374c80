"""Run by torchrun in each process: a sharded policy's weights, gathered for a weight sync.

Each process tells, of each case, the weights that differ from those of one process, the collective
calls, and the most memory that the gathered tensors took.
"""

from __future__ import annotations

from typing import Any

import tiny
import torch
from accelerate.state import AcceleratorState
from allocated import Allocated
from torch.distributed.tensor.debug import CommDebugMode
from torchrun import tell
from training_cases import policy

from agenttrain.launch.worker import leave
from agenttrain.training.config import LoraSettings
from agenttrain.training.lora import adapter_weights, add_lora
from agenttrain.training.sharding import Sharding, layers
from agenttrain.training.weight_sync import named_weights
from agenttrain.training.world import World
from agenttrain.utils.exit_codes import DONE

LAYERS = 6
SHAPE = {"num_hidden_layers": LAYERS, "hidden_size": 36, "intermediate_size": 330}
"""36 rows are 9 for each of 4 processes; 330 rows are 83, 83, 83 and 81. A layer has more numbers
than the embeddings."""


def model(*, lora: bool = False) -> Any:
    """The same in every process."""
    made = tiny.model(seed=0, tie_word_embeddings=False, **SHAPE)
    if lora:
        add_lora(made, LoraSettings(rank=4))
        torch.manual_seed(1)
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.02)
    return made


def sharded(world: World, *, lora: bool = False, **sharding: Any) -> Any:
    AcceleratorState._reset_state()
    return policy(
        model(lora=lora),
        processes={"world": world, "sharding": Sharding(**sharding), "sampled": True},
    )


def gathered(world: World, dtype: torch.dtype | None = None, **sharding: Any) -> dict[str, Any]:
    """A sync of all weights, of which one is kept at a time."""
    trained, expected = sharded(world, **sharding), dict(named_weights(model(), dtype))
    names, wrong = [], []
    with CommDebugMode() as calls:
        for name, weight in named_weights(trained.model, dtype):
            names.append(name)
            if weight.dtype is not expected[name].dtype or not torch.equal(weight, expected[name]):
                wrong.append(name)
    del weight
    with Allocated() as memory:
        for _ in named_weights(trained.model, dtype):
            pass
    size = 4 if dtype is None else dtype.itemsize
    layer = sum(p.numel() for p in layers(model())[0].parameters()) * size
    return {
        "names": names == list(expected),
        "wrong": wrong,
        "calls": calls.get_total_counts(),
        "peak_over_layer": memory.peak / layer,
    }


def adapted(world: World) -> dict[str, Any]:
    """Adapters alone, and merged into the weights."""
    trained, whole = sharded(world, lora=True), model(lora=True)
    with CommDebugMode() as calls:
        own = adapter_weights(trained.model)
    alone, merged = adapter_weights(whole), dict(named_weights(whole))
    return {
        "wrong": [name for name in alone if not torch.equal(own[name], alone[name])],
        "calls": calls.get_total_counts(),
        "unmerged": [
            name
            for name, weight in named_weights(trained.model)
            if not torch.allclose(weight, merged[name], atol=1e-6)
        ],
    }


def sampler(world: World) -> dict[str, Any]:
    """The copy that an engine of the process samples from."""
    trained = sharded(world)
    with torch.no_grad():
        for weight in trained.sampler.parameters():
            weight.zero_()
    with CommDebugMode() as calls:
        trained.refresh_sampler()
    own = dict(trained.sampler.named_parameters())
    return {
        "wrong": [n for n, p in model().named_parameters() if not torch.equal(own[n], p)],
        "calls": calls.get_total_counts(),
    }


def main() -> None:
    """All cases."""
    world = World.start()
    found = {
        "float32": gathered(world),
        "bfloat16": gathered(world, torch.bfloat16),
        "in host memory": gathered(world, cpu_offload=True),
        "adapters": adapted(world),
        "sampler": sampler(world),
    }
    if world.size == 4:
        found["nodes of two"] = gathered(world, within=2)
    tell(world.rank, found)


if __name__ == "__main__":
    main()
    leave(DONE)
