"""Low-rank adapters in vLLM: loaded under requests in flight, over base weights that stay."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from agenttrain.engine.vllm_weights import folder_for

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks for which vLLM makes room (0.32, `MaxLoRARanks`)."""
NAME, NUMBER = "policy", 1


def room_for(rank: int) -> dict[str, Any]:
    """Return vLLM's arguments for one set of adapters; it refuses a rank that is too large."""
    room = next((one for one in RANKS if one >= rank), rank)
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}


def load_adapters(llm: Any, weights: Iterable[tuple[str, Tensor]], *, alpha: float) -> Any:
    """Replace the adapters by `weights`, with peft's names; return the `LoRARequest` for them.

    Requests in flight go on with them. vLLM reads adapters from a folder only.
    """
    from vllm.lora.request import LoRARequest

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights}
    # E.g. "….q_proj.lora_A.weight" of 16 rows: rank 16; of embeddings
    # "….embed_tokens.lora_embedding_A".
    below = [name for name in tensors if ".lora_A." in name or name.endswith(".lora_embedding_A")]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": len(tensors[below[0]]),
        "lora_alpha": alpha,
        "target_modules": sorted({name.split(".lora_")[0].split(".")[-1] for name in below}),
    }
    with folder_for(tensors) as name:
        folder = Path(name)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(config))
        llm.add_lora(LoRARequest(NAME, NUMBER, name, load_inplace=True))
    # Without load_inplace, or every step would read the folder again.
    return LoRARequest(NAME, NUMBER, name)


def split_adapters(
    weights: Iterable[tuple[str, Tensor]],
) -> tuple[Iterator[tuple[str, Tensor]], Iterator[tuple[str, Tensor]]]:
    """Split into weights that come before adapters, and the adapters; take them in this order."""
    items = iter(weights)
    first: list[tuple[str, Tensor]] = []

    def base() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in items:
            if "lora_" in name:
                first.append((name, tensor))
                return
            yield name, tensor

    def adapters() -> Iterator[tuple[str, Tensor]]:
        yield from first
        yield from items

    return base(), adapters()
