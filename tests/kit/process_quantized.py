"""Run by torchrun in each process: FSDP2 over a base in 4 bits.

``process_quantized.py <folder>`` starts from the models of `SIZES`, whose weights are read in
slices or loaded whole, and tells what `told` finds of each. Without torchrun the one process has
all rollouts and all rows.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from allocated import peak_bytes
from process_states import keeping, sums
from safetensors.torch import load_file, save_file
from torchrun import tell
from training_cases import policy, random_groups
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.launch.worker import leave
from agenttrain.trainer import train_policy
from agenttrain.training.config import LoraSettings
from agenttrain.training.lora import adapter_parameters, add_lora
from agenttrain.training.merge_check import check_merging
from agenttrain.training.policy import Policy
from agenttrain.training.quantization import quantize, quantized_layers, scales
from agenttrain.training.sharding import Sharding, full_tensor, local_part, own_rows
from agenttrain.training.sliced_weights import (
    SlicedWeights,
    WrongWeights,
    empty_model,
    load_whole,
    stand_ins,
)
from agenttrain.training.weight_sync import named_weights
from agenttrain.training.world import PeerFailed, World
from agenttrain.utils.exit_codes import DONE

IDS = list(range(7, 60))
SIZES = {
    # Two processes divide the 129 rows of up_proj. Rows of down_proj are no whole blocks.
    "model": {"hidden_size": 128, "intermediate_size": 129, "num_hidden_layers": 2},
    # Of the bytes of a pass, most are those of a dequantised weight.
    "wide": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4},
}
"""Sizes of the models, by their folders."""


def model(name: str) -> PreTrainedModel:
    """A tiny model with biases."""
    config = Qwen2Config(
        vocab_size=320,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        **SIZES[name],
    )
    torch.manual_seed(0)
    made = Qwen2ForCausalLM(config)
    for name, weight in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1)
    return made.eval()


def start(folder: Path, world: World, way: str, *, double: bool = True) -> Policy:
    """The policy and its sampler, with adapters that do something."""
    AcceleratorState._reset_state()
    weights = None
    if way == "slices":
        made = empty_model(folder, torch.float32)
        weights = SlicedWeights(made, folder, world.rank)
        quantize(made, double=double)
        torch.manual_seed(world.rank)  # the first process's adapters count
        with stand_ins(made):
            add_lora(made, LoraSettings(rank=4))
    else:
        made = load_whole(folder, torch.float32)
        quantize(made, double=double, on_host=way == "whole")
        torch.manual_seed(world.rank)
        add_lora(made, LoraSettings(rank=4))
    torch.manual_seed(9)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # which begins with zeros
            torch.nn.init.normal_(parameter, std=0.02)
    sharding = None if way == "one" else Sharding()
    return policy(
        made,
        algorithm={"kl": {"beta": 0.1}},
        training={"token_budget": 100, "activation_checkpointing": "all"},
        processes={"world": world, "sharding": sharding, "weights": weights, "sampled": True},
        lr=1e-3,
    )


def learn(trained: Policy, step: int, world: World) -> tuple[dict[str, float], list]:
    """The step's update, its groups shared out in turn: metrics, and the adapters' gradients."""
    made = random_groups(step, groups=3)
    mine = [g if i % world.size == world.rank else [] for i, g in enumerate(made)]
    gradients: list[dict[str, list[float]]] = []

    def before_update(*_: Any) -> None:
        adapters = adapter_parameters(trained.model)
        gradients.append({n: full_tensor(p.grad).flatten().tolist() for n, p in adapters.items()})

    handle = trained.optimizer.optimizer.register_step_pre_hook(before_update)
    metrics = train_policy(trained, mine)
    handle.remove()
    return metrics, gradients


def sampled(trained: Policy) -> list[int]:
    """Ids that the transformers engine samples from the policy's sampler."""

    async def sample() -> tuple[int, ...]:
        engine = TransformersEngine(trained.sampler, TransformersSettings(max_context=64))
        completion = await engine.generate(IDS[:9], Sampling(max_tokens=20, seed=3), session="a")
        await engine.aclose()
        return completion.token_ids

    return list(asyncio.run(sample()))


def told(folder: Path, world: World, way: str, *, double: bool = True) -> dict:
    """Everything that two processes must have as one does."""
    trained = start(folder / "model", world, way, double=double)
    held = sum(local_part(weight).nbytes for weight in trained.model.parameters())
    beside = sum(tensor.nbytes for tensor in scales(trained.model))
    base = {n: full_tensor(m.weight).flatten().tolist() for n, m in quantized_layers(trained.model)}
    base |= {f"{i}": t.flatten().tolist() for i, t in enumerate(scales(trained.model))}
    rows = {n: list(own_rows(m.weight)) for n, m in quantized_layers(trained.model)}
    first = sampled(trained)
    check_merging(trained.model, lambda: trained.probe_logprobs(IDS))
    learnt = [learn(trained, step, world) for step in range(2)]
    trained.refresh_sampler()
    saved = keeping(folder / f"{way}-{double}", world)
    saved.save(trained, step=2)
    sent = {name: tensor.flatten().tolist() for name, tensor in named_weights(trained.model)}
    before, probe = sums(trained), trained.probe_logprobs(IDS)
    second = sampled(trained)
    third, _ = learn(trained, 2, world)
    # Resumed by a policy that has learnt something else.
    resumed = start(folder / "model", world, way, double=double)
    learn(resumed, 7, world)
    saved.load_latest(resumed)
    same = sums(resumed) == before and resumed.probe_logprobs(IDS) == probe
    again, _ = learn(resumed, 2, world)
    return {
        "held": world.gather([held]),
        "beside": world.gather([beside]),
        "rows": world.gather([rows["model.layers.0.mlp.up_proj.base_layer"]]),
        "base": base,
        "metrics": [metrics for metrics, _ in learnt],
        "gradients": [gradients for _, gradients in learnt],
        "sampled": [first, second],
        "sent": sent,
        "probe": probe,
        "resumed": same and repr(again) == repr(third) and sums(resumed) == sums(trained),
    }


def pass_peak(folder: Path, world: World) -> int:
    """The most that a pass over two tokens allocates at once, forward and backward.

    The pass before it allocates gradients, which stay.
    """
    trained = start(folder / "wide", world, "slices")
    ids = torch.tensor([IDS[:2]])

    def compute() -> None:
        total = trained._scorer.inside(lambda model: model(ids, use_cache=False).logits.sum())
        total.backward()

    compute()
    with torch.profiler.profile(profile_memory=True) as profile:
        compute()
    return peak_bytes(profile)


def refused_copy(folder: Path, world: World) -> str:
    """The error when the last process reads a copy with a weight of twice the size.

    Its 4-bit numbers are the same, and its scales are not.
    """
    own = folder / "model"
    if world.rank == world.size - 1:
        own = Path(shutil.copytree(own, folder / "copied"))
        weights = load_file(own / "model.safetensors")
        weights["model.layers.1.self_attn.q_proj.weight"] *= 2
        save_file(weights, own / "model.safetensors", metadata={"format": "pt"})
    world.barrier("the copy")
    made = empty_model(own, torch.float32)
    weights_read = SlicedWeights(made, own, world.rank)
    quantize(made, double=True)
    try:
        policy(
            made,
            algorithm={"kl": None},
            processes={"world": world, "sharding": Sharding(), "weights": weights_read},
        )
    except (WrongWeights, PeerFailed) as error:
        return str(error)
    return "none"


def main() -> None:
    """All of it."""
    world, folder = World.start(), Path(sys.argv[1])
    found = {
        "slices": told(folder, world, "slices"),
        "whole": told(folder, world, "whole"),
        "32-bit scales": told(folder, world, "slices", double=False),
        "peak": world.gather([pass_peak(folder, world)]),
        "refused": refused_copy(folder, world),
    }
    tell(world.rank, found)


if __name__ == "__main__":
    main()
    leave(DONE)
