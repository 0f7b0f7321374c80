"""Memory and time of a LoRA step on a base in 4 bits, beside the same step on one in bfloat16.

A random model of Qwen3-0.6B's shape in bfloat16, adapters of rank 16 on all linear layers, AdamW
with float32 copies, one sequence of 1,024 tokens with activation checkpointing. The loss is of the
hidden states, so that logits are left out: they are as large in both. Bytes are those of the
tensors that are there before the second step, and the most that it allocates at once, as torch's
profiler counts them. Each model is measured in a process of its own. The figures:

    peak_over_bf16          peak of the step with a base in 4 bits, over that in bfloat16
    peak_gb, bf16_peak_gb   both, in 10^9 bytes
    weights_gb, bf16_weights_gb   the same of the weights alone
    weights_over_formula    bytes of the weights over those of `agenttrain plan`
    step_s_over_bf16        seconds of the step over those in bfloat16: on a CPU, where each layer
                            is dequantised as a whole before it multiplies
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import harness
import torch
from torch import Tensor

SHAPE = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
TOKENS, QUICK_TOKENS = 1024, 256
PART = "part"
"""First argument of the processes that measure one of the two models."""


def measure(quick: bool) -> dict[str, float]:
    """Measure each model in a process; return their figures and ratios."""
    tokens = QUICK_TOKENS if quick else TOKENS
    stored, plain = (_start(kind, tokens) for kind in ("nf4", "bf16"))
    return {
        "peak_over_bf16": stored["peak"] / plain["peak"],
        "peak_gb": stored["peak"] / 1e9,
        "bf16_peak_gb": plain["peak"] / 1e9,
        "weights_gb": stored["weights"] / 1e9,
        "bf16_weights_gb": plain["weights"] / 1e9,
        "weights_over_formula": stored["weights"] / stored["formula"],
        "step_s_over_bf16": stored["seconds"] / plain["seconds"],
    }


def _start(kind: str, tokens: int) -> dict[str, float]:
    """Measure a model in a process of its own."""
    command = [sys.executable, __file__, PART, kind, str(tokens)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def measure_part(kind: str, tokens: int) -> dict[str, float]:
    """Make two steps; return bytes and seconds of the second."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from agenttrain.training.config import ActivationCheckpointing, AdamWSettings, LoraSettings
    from agenttrain.training.lora import add_lora
    from agenttrain.training.optimizers import build_optimizer
    from agenttrain.training.quantization import (
        layers_to_quantize,
        nf4_bytes,
        quantize,
        scales,
    )
    from agenttrain.training.recomputation import recomputed_modules, recomputing

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM._from_config(Qwen3Config(**SHAPE), dtype=torch.bfloat16)
    formula = _bytes(model.parameters())
    if kind == "nf4":
        numbers = [layer.weight.numel() for layer in layers_to_quantize(model).values()]
        formula += sum(nf4_bytes(count, double=True) - 2 * count for count in numbers)
        quantize(model, double=True)
    weights = _bytes([*model.parameters(), *scales(model)])
    add_lora(model, LoraSettings(rank=16))
    optimizer: Any = build_optimizer(model, AdamWSettings())
    ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens))

    def step() -> None:
        with recomputing(recomputed_modules(model, ActivationCheckpointing.all)):
            hidden = model.model(ids, use_cache=False).last_hidden_state
            hidden.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()  # makes the optimizer's state
    states = [t for part in optimizer.parts for s in part.state.values() for t in s.values()]
    copies = [master for _, master in optimizer.pairs]
    held = _bytes([*model.parameters(), *scales(model), *states, *copies])
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    started = time.perf_counter()
    step()
    seconds = time.perf_counter() - started
    peak = held + _most_allocated(profile)
    return {"peak": peak, "weights": weights, "formula": formula, "seconds": seconds}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of distinct storages."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _most_allocated(profile: Any) -> int:
    """Return the most bytes that were allocated at once within a profile."""
    live = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    return most


if __name__ == "__main__":
    if sys.argv[1:2] == [PART]:
        print(json.dumps(measure_part(sys.argv[2], int(sys.argv[3]))))
    else:
        harness.run(__doc__ or "", measure)
