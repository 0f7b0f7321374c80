"""Tiny random models of the families that packing must leave unchanged."""

from __future__ import annotations

import torch
import transformers
from transformers import PreTrainedModel

WINDOW = 8
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HALF_WINDOWED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

FAMILIES: dict[str, dict[str, object]] = {
    "Qwen2": {},
    "Qwen2-window": {"use_sliding_window": True, **HALF_WINDOWED},
    "Qwen2Moe": {
        "use_sliding_window": True,
        **HALF_WINDOWED,
        **EXPERTS,
        "shared_expert_intermediate_size": 16,
    },
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Llama": {},
    "Mistral": {"sliding_window": WINDOW},
    "Ministral": HALF_WINDOWED,
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "Gemma2": {**HALF_WINDOWED, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "Gemma3": {**HALF_WINDOWED, "query_pre_attn_scalar": 8},
    "Gemma4": {
        **HALF_WINDOWED,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,  # the last two layers use keys of the first two
    },
    "GptOss": {**HALF_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {"sliding_window": WINDOW},
    "Phimoe": {"num_local_experts": 4, "sliding_window": WINDOW},
    "Glm4": {},
    "Glm4Moe": ROUTED,
    "Olmo2": {},
    "Olmo3": HALF_WINDOWED,
    "DeepseekV3": {**LATENT, **ROUTED},
    "Cohere2": HALF_WINDOWED,
    "Granite": {"attention_multiplier": 0.2},
    "SmolLM3": {},
    "Starcoder2": {"sliding_window": WINDOW},
}


def tiny_family(name: str, **changes: object) -> PreTrainedModel:
    """A random model of the family, fp32, with weights large enough for attention to matter."""
    base = {"Gemma3": "Gemma3Text", "Gemma4": "Gemma4Text"}.get(name, name.split("-")[0])
    config = getattr(transformers, f"{base}Config")(**{**SMALL, **FAMILIES[name], **changes})
    head = name.split("-")[0]
    torch.manual_seed(0)
    model = getattr(transformers, f"{head}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0, 0.3)
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model
