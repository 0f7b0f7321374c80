"""Run by torchrun in each process: a policy whose processes read only their parts of the weights.

``process_shards.py start <folder> <case>…`` starts from the model in <folder>/<case>, and tells of
each case what differs from the model that transformers loads.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from packing_families import tiny_family
from torchrun import tell
from training_cases import policy
from transformers import AutoModelForCausalLM

from agenttrain.launch.worker import leave
from agenttrain.training.checkpoint import random_states, set_random_states
from agenttrain.training.config import LoraSettings
from agenttrain.training.lora import add_lora
from agenttrain.training.merge_check import check_merging
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import Sharding, local_part, own_rows
from agenttrain.training.sliced_weights import SlicedWeights, WrongWeights, empty_model, stand_ins
from agenttrain.training.world import PeerFailed, World
from agenttrain.utils.exit_codes import DONE


@dataclass(frozen=True, kw_only=True)
class Start:
    """A model that is started from its files."""

    family: str
    dtype: torch.dtype = torch.float32
    lora: bool = False
    offload: bool = False
    within: int | None = None


STARTS = {
    "tied": Start(family="Qwen3"),
    "bfloat16 of float32": Start(family="Qwen3", dtype=torch.bfloat16),
    "adapters": Start(family="Qwen3", lora=True),
    "kept in host memory": Start(family="Llama", offload=True),
    "fused experts": Start(family="Qwen3Moe"),
    "adapters of experts": Start(family="Qwen3Moe", lora=True),
    "buffers": Start(family="Gemma3"),
    "nodes of two": Start(family="Llama", within=2),
}


def start(case: Start, folder: Path, world: World) -> Policy:
    """The policy, its reference and its sampler, with weights that are read in slices."""
    AcceleratorState._reset_state()
    torch.manual_seed(world.rank)
    model = empty_model(folder, case.dtype)
    weights = SlicedWeights(model, folder, world.rank)
    if case.lora:
        with stand_ins(model):
            add_lora(model, LoraSettings(rank=4))
    assert case.lora or all(parameter.is_meta for parameter in model.parameters())
    sharding = Sharding(cpu_offload=case.offload, within=case.within)
    return policy(
        model,
        algorithm={"kl": {"beta": 0.1}},
        processes={"world": world, "sharding": sharding, "weights": weights, "sampled": True},
    )


def differences(case: Start, folder: Path, world: World) -> list[str]:
    """Weights and buffers that are not, to the bit, those that transformers loads."""
    states = random_states()
    started = start(case, folder, world)
    set_random_states(states)
    torch.manual_seed(0)  # the main process's adapters count
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=case.dtype)
    if case.lora:
        add_lora(loaded, LoraSettings(rank=4))
    found = []
    models = {"policy": started.model, "sampler": started.sampler}
    if not case.lora:
        models["reference"] = started._reference.scorer.model
    expected = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    for name, model in models.items():
        own = dict(model.named_parameters()) | dict(model.named_buffers())
        assert own.keys() == expected.keys()
        for key, tensor in own.items():
            rows = own_rows(tensor)
            theirs = expected[key][rows.start : rows.stop] if tensor.ndim else expected[key]
            same = local_part(tensor).dtype is theirs.dtype
            if not same or not torch.equal(local_part(tensor).cpu(), theirs):
                found.append(f"{name}: {key}")
        if model.generation_config.to_dict() != loaded.generation_config.to_dict():
            found.append(f"{name}: generation_config")
    if case.lora:
        check_merging(started.model, lambda: started.probe_logprobs(range(3, 40)))
    # Sharded at all: a process holds a part of each matrix.
    (largest,) = sorted(started.model.parameters(), key=torch.Tensor.numel)[-1:]
    assert local_part(largest).numel() * (case.within or world.size) <= largest.numel() * 1.2
    return found


def copies(folder: Path, world: World) -> str:
    """The error when the last process reads another copy, in which a weight differs."""
    own = folder / "tied"
    if world.rank == world.size - 1:
        own = Path(shutil.copytree(own, folder / "copied"))
        with (own / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"\x3e")
    world.barrier("the copy")
    try:
        start(STARTS["tied"], own, world)
    except (WrongWeights, PeerFailed) as error:
        return str(error)
    return "none"


def main() -> None:
    """All cases."""
    world, folder = World.start(), Path(sys.argv[1])
    if world.is_main:
        for name, case in STARTS.items():
            tiny_family(case.family).save_pretrained(folder / name)
    world.barrier("the models")
    found = {name: differences(case, folder / name, world) for name, case in STARTS.items()}
    tell(world.rank, {"differences": found, "copies": copies(folder, world)})


if __name__ == "__main__":
    main()
    leave(DONE)
