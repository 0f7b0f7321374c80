"""Low-rank adapters as vLLM reads them: a file of tensors, and its description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LARGEST_RANK = 512
"""Rank of adapters, in vLLM 0.32 (`MaxLoRARanks`)."""


def adapter_config(tensors: Mapping[str, Tensor], alpha: float) -> dict[str, Any]:
    """Return adapter_config.json for adapters by peft's names and shapes.

    Example of a name: ``base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight``, whose
    target module is ``q_proj``.
    """
    lora_a = [name for name in tensors if ".lora_A." in name or name.endswith(".lora_embedding_A")]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": len(tensors[lora_a[0]]),  # A is [rank, inputs]
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".lora_")[0].split(".")[-1] for name in lora_a}),
    }
