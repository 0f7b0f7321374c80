"""The folder that `model.path` names."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from agenttrain.types import ConfigError
from agenttrain.utils.files import PACKAGE
from agenttrain.utils.gguf import converted, gguf_file
from agenttrain.utils.names import did_you_mean

BUNDLED = "bundled:"
PARTS = {
    "config.json": ("config.json", "adapter_config.json"),
    "file of weights (*.safetensors, *.bin)": ("*.safetensors", "*.bin"),
    "tokenizer (tokenizer.json)": ("tokenizer*", "*.model", "vocab.*", "*.tiktoken", "tekken.json"),
}
"""Parts of a model folder: name -> files, of which one is enough."""
SIZES = ("config.json",)
"""The part from which a model's size is computed."""


def model_folder(path: str, parts: Collection[str] = tuple(PARTS)) -> Path:
    """Return a folder that transformers can load: ``bundled:shop``, or one of the user's.

    A GGUF file is converted into one, once. Raises ConfigError when there is none, or when one of
    `parts` is missing.
    """
    if (file := gguf_file(path)) is not None:
        return converted(file)
    if not path.startswith(BUNDLED):
        folder = Path(path).expanduser()
        for part in parts:
            patterns = PARTS[part]
            if not any(file.is_file() for pattern in patterns for file in folder.glob(pattern)):
                raise ConfigError(
                    f"model.path={path}: there is no {part} in that folder; give a folder that "
                    "transformers' from_pretrained can load, or bundled:shop"
                )
        return folder
    models = PACKAGE / "data" / "models"
    names = sorted(file.parent.name for file in models.glob("*/config.json"))
    name = path.removeprefix(BUNDLED)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"model.path={path}: no such bundled model{hint}; there are: {', '.join(names)}"
        )
    return models / name
