"""The folder that `model.path` names: a local one, `bundled:<name>`, or a model of the hub."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from agenttrain.types import ConfigError
from agenttrain.utils.files import PACKAGE
from agenttrain.utils.hub import fetch_weights, is_hub_id, snapshot
from agenttrain.utils.names import did_you_mean

BUNDLED = "bundled:"
WEIGHTS = "file of weights (*.safetensors, *.bin)"
PARTS = {
    "config.json": ("config.json", "adapter_config.json"),
    WEIGHTS: ("*.safetensors", "*.bin"),
    "tokenizer (tokenizer.json)": ("tokenizer*", "*.model", "vocab.*", "*.tiktoken", "tekken.json"),
}
"""Parts of a model folder: name -> files, of which one is enough."""
SIZES = ("config.json",)
"""The part from which a model's size is computed."""
FORMS = "a folder that transformers' from_pretrained can load, bundled:shop, or an id of the hub"


def model_folder(
    path: str,
    parts: Collection[str] = tuple(PARTS),
    *,
    revision: str | None = None,
    key: str = "model.path",
) -> Path:
    """Return a folder that transformers can load: `bundled:shop`, one of the user's, `org/name`.

    A model of the hub is brought into its cache without the weights: see `weights_folder`. Raises
    ConfigError when there is none, or when one of `parts` is missing.
    """
    if path.startswith(BUNDLED):
        return _bundled(path, key)
    folder = Path(path).expanduser()
    place = "in that folder"
    if is_hub_id(path):
        folder = snapshot(path, revision, key)
        parts = [part for part in parts if part != WEIGHTS]
        place = "in that model of the hub"
    elif revision is not None:
        raise ConfigError(
            f"{key.removesuffix('path')}revision={revision}: {path} is a folder, which has no "
            "revisions; leave it out"
        )
    for part in parts:
        if not any(file.is_file() for pattern in PARTS[part] for file in folder.glob(pattern)):
            raise ConfigError(f"{key}={path}: there is no {part} {place}; give {FORMS}")
    return folder


def weights_folder(path: str, *, revision: str | None = None, key: str = "model.path") -> Path:
    """Return `model_folder`; the weights of a model of the hub are downloaded if need be."""
    folder = model_folder(path, revision=revision, key=key)
    return fetch_weights(path, revision, key) if is_hub_id(path) else folder


def _bundled(path: str, key: str) -> Path:
    models = PACKAGE / "data" / "models"
    names = sorted(file.parent.name for file in models.glob("*/config.json"))
    name = path.removeprefix(BUNDLED)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"{key}={path}: no such bundled model{hint}; there are: {', '.join(names)}"
        )
    return models / name
