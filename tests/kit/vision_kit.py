"""Tiny random models that see, with a tokenizer, a template and an image processor to fit."""

from __future__ import annotations

import copy
import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tiny
import torch
from PIL import Image as Pillow
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from agenttrain.chat.chat import Chat
from agenttrain.chat.loading import load_spec
from agenttrain.engines.vision import Vision
from agenttrain.types import Image
from agenttrain.utils.image_files import read_image
from agenttrain.utils.placeholders import Placeholders

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CONTENT = """\
{%- macro show(content) %}
{%- if content is string %}{{- content }}{%- else %}
{%- for part in content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
"""
TEMPLATE = CONTENT + tiny.TEMPLATE.replace("+ m.content +", "+ show(m.content) +").replace(
    "messages[0].content +", "show(messages[0].content) +"
)
PATCH = 4
LEAST, MOST = 64, 4096
"""Pixels: 1 to 64 placeholders of 8 x 8 pixels."""
KINDS = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")
"""Types of models; the first is the default. There is `qwen3_5_moe` too."""
CLASSES = {
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
}


@cache
def tokenizer() -> Any:
    """The tiny tokenizer with the tokens of images."""
    tok = copy.deepcopy(tiny.tokenizer())
    tok.add_special_tokens({"additional_special_tokens": [*tiny.SPECIAL[1:], *TOKENS]})
    tok.chat_template = TEMPLATE
    return tok


def pad() -> int:
    """The id of the placeholder."""
    return tokenizer().convert_tokens_to_ids("<|image_pad|>")


def placeholders() -> Placeholders:
    """The placeholders of `model()`."""
    return Placeholders(
        token_id=pad(),
        patch=PATCH,
        merge=2,
        least_pixels=LEAST,
        most_pixels=MOST,
    )


@cache
def chat() -> Chat:
    """A Chat over the tiny tokenizer, for a model that sees."""
    return Chat(
        tokenizer(), TEMPLATE, load_spec("hermes"), eos_token_ids=[2], placeholders=placeholders()
    )


def picture(width: int = 16, height: int = 8, seed: int = 0) -> Image:
    """A picture of noise; 16 x 8 pixels are 1 x 2 placeholders."""
    return read_image(pixels(width, height, seed))


def pixels(width: int = 16, height: int = 8, seed: int = 0) -> np.ndarray:
    """The pixels of a picture, [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def file_bytes(width: int = 16, height: int = 8, seed: int = 0, kind: str = "PNG") -> bytes:
    """A picture as the bytes of a file."""
    file = io.BytesIO()
    Pillow.fromarray(pixels(width, height, seed)).save(file, kind, compress_level=1)
    return file.getvalue()


def config(kind: str = KINDS[0], **overrides: Any) -> Any:
    """Three layers of language model and three of vision.

    Two of Qwen3-VL's give deepstack features; two of Qwen2.5-VL's attend within windows of 2 x 2
    vectors; two layers of Qwen3.5's language model are recurrent.
    """
    ids = {name: tokenizer().convert_tokens_to_ids(name) for name in TOKENS}
    text = {
        "vocab_size": len(tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 2048,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "initializer_range": 0.2,
        **overrides,
    }
    vision = {
        "depth": 3,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": PATCH,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        "initializer_range": 0.2,
    }
    made: Any = Qwen3VLConfig
    if kind in ("qwen3_5", "qwen3_5_moe"):
        made = Qwen3_5Config
        text |= {
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        }
        text["rope_parameters"]["partial_rotary_factor"] = 1.0
        vision |= {"num_position_embeddings": 16}
        if kind == "qwen3_5_moe":
            made = Qwen3_5MoeConfig
            sizes = ("moe_intermediate_size", "shared_expert_intermediate_size")
            text |= {"num_experts": 4, "num_experts_per_tok": 2, **dict.fromkeys(sizes, 16)}
    elif kind == "qwen2_5_vl":
        made = Qwen2_5_VLConfig
        text |= {"bos_token_id": None, "head_dim": None}
        text["rope_parameters"].pop("mrope_interleaved")
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    return made(
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def model(seed: int = 0, kind: str = KINDS[0], **overrides: Any) -> Any:
    """The model with random weights that are large enough to tell pictures apart."""
    torch.manual_seed(seed)
    return CLASSES[kind](config(kind, **overrides)).float().eval()


PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "patch_size": PATCH,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": LEAST, "longest_edge": MOST},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def vision(*, frozen: bool = True) -> Vision:
    """The image processor of `model()`."""
    names = ("patch_size", "merge_size", "temporal_patch_size", "size", "image_mean", "image_std")
    processor = Qwen2VLImageProcessorPil(**{name: PREPROCESSOR[name] for name in names})
    return Vision(placeholders(), processor, frozen=frozen)


def save(folder: Path, kind: str = KINDS[0]) -> Path:
    """Write model, tokenizer and image processor to a folder."""
    model(kind=kind).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder
