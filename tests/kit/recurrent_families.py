"""Tiny random models of the recurrent families, whose states remember."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packing_families import EXPERTS, SMALL
from transformers import AutoTokenizer, PreTrainedModel, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from agenttrain.utils.model_path import model_folder

LINEAR, FULL = "linear_attention", "full_attention"
DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": [LINEAR, FULL],
}
SHARED_EXPERT = {**EXPERTS, "shared_expert_intermediate_size": 16}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
CONVOLUTIONS = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]}

RECURRENT: dict[str, tuple[str, dict[str, object]]] = {
    # family: (config class, settings beside `SMALL`)
    "Qwen3_5": ("Qwen3_5TextConfig", DELTA),
    "Qwen3_5Moe": ("Qwen3_5MoeTextConfig", {**DELTA, **SHARED_EXPERT}),
    "Qwen3Next": ("Qwen3NextConfig", {**DELTA, **SHARED_EXPERT}),
    "OlmoHybrid": ("OlmoHybridConfig", DELTA),
    "KimiLinear": (
        "KimiLinearConfig",
        {
            "num_key_value_heads": 4,
            "layer_types": [LINEAR, FULL],
            "linear_num_heads": 4,
            "linear_head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "Lfm2": ("Lfm2Config", {**CONVOLUTIONS, "block_multiple_of": 16}),
    "Lfm2Moe": ("Lfm2MoeConfig", {**CONVOLUTIONS, **EXPERTS, "num_dense_layers": 1}),
    "Lfm3": ("Lfm3Config", {}),
    "GraniteMoeHybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA2,
            "layer_types": [LINEAR, FULL],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "NemotronH": (
        "NemotronHConfig",
        {
            "layer_types": [LINEAR, "moe", FULL],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "FalconH1": ("FalconH1Config", {**MAMBA2, "mamba_d_ssm": 64}),
    "Bamba": ("BambaConfig", {**MAMBA2, "attn_layer_indices": [1]}),
    "Zamba2": (
        "Zamba2Config",
        {
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_expand": 2,
            "chunk_size": 16,
            "hybrid_layer_ids": [1],
            "layers_block_type": ["mamba", "hybrid"],
        },
    ),
}
UNWRAPPED: dict[str, tuple[str, dict[str, object]]] = {
    # families with a scan that takes no layout
    "Jamba": (
        "JambaConfig",
        {
            "num_experts": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
        },
    ),
    "MiniMax": (
        "MiniMaxConfig",
        {
            "block_size": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": [LINEAR, FULL],
        },
    ),
}


def is_installed(name: str) -> bool:
    """Whether the installed transformers has the family."""
    return hasattr(transformers, f"{name}ForCausalLM")


OLDEST = transformers.__version__.startswith("5.16.")
LACKING = {
    # families that the installed transformers lacks, or whose layers drop keywords there
    *(name for name in RECURRENT if not is_installed(name)),
    *(("NemotronH", "FalconH1") if OLDEST else ()),
}


def family_params(names: Iterable[str]) -> list[Any]:
    """Parameters of a test: families that this transformers lacks are skipped."""
    reason = "not in this transformers; scripts/test-families 5.23 runs it"
    return [
        pytest.param(name, marks=pytest.mark.skipif(name in LACKING, reason=reason))
        for name in names
    ]


def tiny_recurrent(name: str, **changes: object) -> PreTrainedModel:
    """A random model of the family, fp32, with slow decay and large weights, so that leaks show."""
    config_name, own = (RECURRENT | UNWRAPPED)[name]
    settings = {**SMALL, **own, **changes}
    if name == "NemotronH":
        del settings["num_hidden_layers"]
    config = getattr(transformers, config_name)(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    enlarge(model)
    return model


def enlarge(model: PreTrainedModel) -> None:
    """Slow decay and large weights."""
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "A_log" in parameter_name:
                parameter.uniform_(-1, 1)
            elif parameter_name.endswith("dt_bias"):
                parameter.uniform_(-3, 0)
            elif "conv" in parameter_name and parameter.ndim == 3:
                parameter.normal_(0, 0.5)
            elif parameter.ndim >= 2:
                parameter.normal_(0, 0.15)


def hybrid_folder(folder: Path) -> Path:
    """A folder with a tiny random Qwen3.5 and the bundled agent's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    config = Qwen3_5TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
