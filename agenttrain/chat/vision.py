"""The placeholders of a model's images, read from its folder, or the reason why it reads none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agenttrain.utils.placeholders import SEEING, Placeholders

BIDIRECTIONAL = "its attention is bidirectional inside images, which packed training does not have"
UNREAD = {
    "gemma3": BIDIRECTIONAL,
    "gemma3n": BIDIRECTIONAL,
    "gemma4": f"{BIDIRECTIONAL}, or a placeholder has embeddings of its own in each layer",
    "lfm2_vl": "an image becomes several tiles, of which no position in the text is known here",
    "mistral3": "tokens stand between the rows of an image, which are not known here",
}
"""Other model types with vision, and the reason why agenttrain does not read their images."""


def load_placeholders(folder: Path) -> Placeholders | str:
    """Return the placeholders of the model in a folder, or the reason why it reads no images.

    SEEING are the model types whose images agenttrain reads.
    """
    config = _read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind not in SEEING:
        if "vision_config" not in config:
            return "this model reads text only"
        why = UNREAD.get(kind, "only those of Qwen2.5-VL, Qwen3-VL and Qwen3.5 are")
        return f"images of model_type={kind} are not read: {why}"
    processor, vision = _read_json(folder / "preprocessor_config.json"), config["vision_config"]
    if not processor:
        return (
            "its folder has no preprocessor_config.json, which says how images are scaled; copy it "
            "from the model"
        )
    # In spite of their names, `shortest_edge` and `longest_edge` are numbers of pixels of an image.
    # Older files name them min_pixels and max_pixels.
    size = processor.get("size") or {}
    return Placeholders(
        token_id=config["image_token_id"],
        patch=vision["patch_size"],
        merge=vision["spatial_merge_size"],
        least_pixels=size.get("shortest_edge") or processor["min_pixels"],
        most_pixels=size.get("longest_edge") or processor["max_pixels"],
    )


def _read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
