"""The placeholders of a model's folder, or the reason why its images are not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agenttrain.chat.vision import load_placeholders
from agenttrain.types import Image
from agenttrain.utils.placeholders import Placeholders

QWEN3_VL = {
    "model_type": "qwen3_vl",
    "image_token_id": 151655,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
}
PROCESSOR = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}


def folder_of(path: Path, config: dict[str, Any], processor: dict[str, Any] | None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def test_qwen3_vl_says_what_an_image_takes(tmp_path: Path) -> None:
    placeholders = load_placeholders(folder_of(tmp_path, QWEN3_VL, PROCESSOR))
    assert isinstance(placeholders, Placeholders)
    # 640 x 480 pixels: 20 columns and 15 rows of 32 x 32; 10 x 10 is scaled up to 256 x 256.
    grids = [
        placeholders.grid(Image(data=b"", sha256="", width=width, height=height))
        for width, height in ((640, 480), (10, 10))
    ]
    assert (placeholders.token_id, grids) == (151655, [(15, 20), (8, 8)])


def test_qwen25_vl_has_other_patches(tmp_path: Path) -> None:
    """It has patches of 14 pixels, and names the bounds of the area otherwise."""
    vision = {"patch_size": 14, "spatial_merge_size": 2}
    config = {**QWEN3_VL, "model_type": "qwen2_5_vl", "vision_config": vision}
    processor = {"min_pixels": 3136, "max_pixels": 12845056}
    placeholders = load_placeholders(folder_of(tmp_path, config, processor))
    assert isinstance(placeholders, Placeholders)
    # 640 x 480 pixels: 23 columns and 17 rows of 28 x 28; 10 x 10 is scaled up to 56 x 56.
    grids = [
        placeholders.grid(Image(data=b"", sha256="", width=width, height=height))
        for width, height in ((640, 480), (10, 10))
    ]
    assert grids == [(17, 23), (2, 2)]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "qwen3"}, "this model reads text only"),
        (
            {"model_type": "gemma3", "vision_config": {}},
            "images of model_type=gemma3 are not read: its attention is bidirectional inside",
        ),
        (
            {"model_type": "qwen2_vl", "vision_config": {}},
            "images of model_type=qwen2_vl are not read: only those of Qwen2.5-VL, Qwen3-VL and ",
        ),
        *(
            ({"model_type": kind, "vision_config": {}}, f"images of model_type={kind} are not read")
            for kind in ("gemma4", "lfm2_vl", "mistral3")
        ),
        (QWEN3_VL, "its folder has no preprocessor_config.json"),
    ],
)
def test_other_models_say_why_not(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    placeholders = load_placeholders(folder_of(tmp_path, config, None))
    assert isinstance(placeholders, str) and placeholders.startswith(reason)
