"""Tiny random models with encoders of images, and of sound, beside their language model."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from packing_families import FAMILIES, SMALL
from recurrent_families import CONVOLUTIONS, DELTA, enlarge
from transformers import PreTrainedModel

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
PROJECTED = ("model.vision_tower.", "model.multi_modal_projector.")
ENCODERS: dict[str, tuple[str, ...]] = {
    # family: beginnings of the names of its encoders' weights
    "Gemma3": PROJECTED,
    "Gemma4": (
        *("model.vision_tower.", "model.embed_vision."),
        *("model.audio_tower.", "model.embed_audio."),
    ),
    "Lfm2Vl": PROJECTED,
    "Mistral3": PROJECTED,
    "Qwen3_5": ("model.visual.",),
}
LANGUAGE_MODELS = {
    "Gemma3": "Gemma3ForCausalLM",
    "Gemma4": "Gemma4ForCausalLM",
    "Lfm2Vl": "Lfm2ForCausalLM",
    "Mistral3": "Ministral3ForCausalLM",
    "Qwen3_5": "Qwen3_5ForCausalLM",
}
"""Family -> class of its language model alone."""
SETTINGS: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": {**SMALL, **FAMILIES["Gemma3"]},
        "vision_config": {**SIZES, "image_size": 28, "patch_size": 14},
        "mm_tokens_per_image": 4,
    },
    "Gemma4": {
        "text_config": {**SMALL, **FAMILIES["Gemma4"], "global_head_dim": 16},
        "vision_config": {
            **SIZES,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 32,
        },
        "audio_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [4, 4],
            "output_proj_dims": 16,
        },
    },
    "Lfm2Vl": {
        "text_config": {"model_type": "lfm2", **SMALL, **CONVOLUTIONS, "block_multiple_of": 16},
        "vision_config": {"model_type": "siglip2_vision_model", **SIZES, "num_patches": 16},
        "projector_hidden_size": 16,
    },
    "Mistral3": {
        "text_config": {"model_type": "ministral3", **SMALL},
        "vision_config": {"model_type": "pixtral", **SIZES, "image_size": 28, "patch_size": 14},
    },
    "Qwen3_5": {
        "text_config": {**SMALL, **DELTA},
        "vision_config": {
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "out_hidden_size": SMALL["hidden_size"],
            "patch_size": 4,
        },
    },
}


def tiny_with_encoders(name: str) -> PreTrainedModel:
    """A random model of the family, fp32, with weights large enough for leaks to show."""
    config = getattr(transformers, f"{name}Config")(**SETTINGS[name])
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    enlarge(model)
    return model
