"""The folder that `model.path` names: a local one, `bundled:<name>`, or a model of the hub."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from agenttrain.types import ConfigError
from agenttrain.utils.files import PACKAGE
from agenttrain.utils.gguf import PACKAGE as INSTALLED
from agenttrain.utils.gguf import converted, gguf_file
from agenttrain.utils.hub import fetch_weights, is_hub_id, revision_key, snapshot
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import shown

BUNDLED = "bundled:"
MODELS = PACKAGE / "data" / "models"
ADAPTER_CONFIG = "adapter_config.json"
BASE_QUANTIZATION = "base_quantization.json"
"""Beside adapters that were trained on a base in 4 bits: model.quantization and its keys."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SENT_MERGED = ("rank_pattern", "alpha_pattern", "use_rslora")
"""Keys of adapters that have not one rank and one scale of alpha / rank."""
NOT_MERGED = ("use_dora", "lora_bias", "bias", "modules_to_save", "trainable_token_indices")
"""Keys of adapters that are more than a product of two matrices."""
WEIGHTS = "file of weights (*.safetensors, *.bin)"
PARTS = {
    "config.json": ("config.json", ADAPTER_CONFIG),
    WEIGHTS: ("*.safetensors", "*.bin"),
    "tokenizer (tokenizer.json)": ("tokenizer*", "*.model", "vocab.*", "*.tiktoken", "tekken.json"),
}
"""Parts of a model folder: name -> files, of which one is enough."""
SIZES = ("config.json",)
"""The part from which a model's size is computed."""
SIZE_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
BASE = "model.base_path"
"""Name of the base model of adapters in messages; its revision is model.base_revision."""
TOKENIZER_CONFIG = "tokenizer_config.json"
FORMS = "a folder that transformers' from_pretrained can load, bundled:shop, or an id of the hub"


def model_folder(
    path: str,
    parts: Collection[str] = tuple(PARTS),
    *,
    revision: str | None = None,
    key: str = "model.path",
) -> Path:
    """Return a folder that transformers can load: `bundled:shop`, one of the user's, `org/name`.

    A model of the hub is brought into its cache without the weights: see `weights_folder`. A GGUF
    file is converted into a folder, once. Raises ConfigError when there is none, or when one of
    `parts` is missing, e.g. ``config.json`` (the names are those of PARTS).
    """
    setting = revision_key(key)
    if not isinstance(revision, str | None):
        raise ConfigError(f"""{setting}={revision}: expected a text; quote it: '"{revision}"'""")
    if revision is not None and not is_hub_id(path):
        raise ConfigError(
            f"{setting}={revision}: {key}={path} is no model of the hub, and has no "
            "revisions; leave it out"
        )
    if path.startswith(BUNDLED):
        return _bundled(path, key)
    if (file := gguf_file(path)) is not None:
        return converted(file)
    folder = Path(path).expanduser()
    place = "in that folder"
    if is_hub_id(path):
        folder = snapshot(path, revision, key)
        parts = [part for part in parts if part != WEIGHTS]
        place = "in that model of the hub"
    elif not folder.is_dir():
        near = [file.name for file in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        hint = did_you_mean(folder.name, near)
        raise ConfigError(f"{key}={path}: there is no such folder{hint}; give {FORMS}")
    for part in parts:
        if not any(file.is_file() for pattern in PARTS[part] for file in folder.glob(pattern)):
            raise ConfigError(f"{key}={path}: there is no {part} {place}; give {FORMS}")
    return folder


def weights_folder(path: str, *, revision: str | None = None, key: str = "model.path") -> Path:
    """Return `model_folder`; the weights of a model of the hub are downloaded if need be."""
    folder = model_folder(path, revision=revision, key=key)
    return fetch_weights(path, revision, key) if is_hub_id(path) else folder


def base_model(path: str, revision: str | None = None) -> tuple[str, str | None] | None:
    """Return the path and the revision of the model that adapters are for; None: it has none.

    Example: ``("Qwen/Qwen3-0.6B", None)``, as the adapters' own adapter_config.json has them.
    """
    # Bundled models and GGUF files hold no adapters.
    if not (is_hub_id(path) or Path(path).expanduser().is_dir()):
        return None
    file = model_folder(path, (), revision=revision) / ADAPTER_CONFIG
    if not file.is_file():
        return None
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        return str(saved["base_model_name_or_path"]), saved.get("revision")
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.path={path}: {ADAPTER_CONFIG} in it names no base model ({error}); save the "
            "adapters with peft"
        ) from error


def base_folder(
    path: str,
    revision: str | None = None,
    base_revision: str | None = None,
    *,
    weights: bool = True,
) -> Path | None:
    """Return the folder of the base model of the adapters at `path`; None if it holds no adapters.

    A base model of the hub is downloaded if need be; without `weights` only its small files, from
    which its size is computed. Raises ConfigError.
    """
    base = base_model(path, revision)
    if base is None:
        return None
    name, saved_revision = base
    pinned = None
    if is_hub_id(name):  # no other model has revisions
        pinned = base_revision or saved_revision
    try:
        if weights:
            return weights_folder(name, revision=pinned, key=BASE)
        return model_folder(name, SIZES, revision=pinned, key=BASE)
    except ConfigError as error:
        raise ConfigError(f"model.path={path}: holds adapters, and {error}") from error


def why_merged(folder: Path) -> str | None:
    """Return why engines need the adapters in a folder merged into the weights; None: they do not.

    Adapters that are sent as they are have one rank and one scale.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    settings = (f"{key}={shown(config[key])}" for key in SENT_MERGED if config.get(key))
    return packed_experts(folder) or next(settings, None)


def has_experts(folder: Path) -> bool:
    """Return True if a model's config.json has a number of experts, or cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # reported where the model is built
        return True
    sections = [config, *(part for part in config.values() if isinstance(part, dict))]
    return any("expert" in key and value for part in sections for key, value in part.items())


def packed_experts(folder: Path) -> str | None:
    """Return the setting or weight that shows adapters of packed experts; None without them.

    Packed: one tensor holds the weights of all experts of a layer. vLLM reads such adapters for few
    models, and wrongly for others.
    """
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    if value := config.get("target_parameters"):
        return f"target_parameters={shown(value)}"
    # Older files have adapters of single experts, `….experts.3.w1…`. peft packs them when it loads
    # them.
    return next((name for name in _adapter_names(folder) if ".experts." in name), None)


def _adapter_names(folder: Path) -> list[str]:
    """Return the names of the adapters' weights; none for a file that cannot be read."""
    try:
        with (folder / ADAPTER_WEIGHTS).open("rb") as file:
            # A safetensors file begins with its header: 8 bytes of length, then JSON by name.
            return sorted(json.loads(file.read(int.from_bytes(file.read(8), "little"))))
    except (OSError, ValueError, OverflowError, MemoryError):  # reported where it is loaded
        return []


def why_not_sent(folder: Path) -> str | None:
    """Return the setting of adapters that cannot be merged, ``use_dora=true``; None without one."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    for key in NOT_MERGED:
        value = config.get(key)
        if value and value != "none":
            return f"{key}={shown(value)}"
    return None


def uses_dora(folder: Path) -> bool:
    """Return True if a folder holds adapters that scale the base's weights too (DoRA)."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no adapters, or reported where they are loaded
        return False
    return bool(config.get("use_dora"))


def bundled_models() -> list[str]:
    """Return the names of the models that come with the package, sorted."""
    return sorted(file.parent.name for file in MODELS.glob("*/config.json"))


def is_foreign(path: str) -> bool:
    """Return True for a model of the user's: neither bundled nor trained from a bundled one.

    The default settings, and the experiments of the package, are for bundled models; a run of
    another model has to choose its own. A checkpoint of a bundled model has that model's sizes
    (SIZE_KEYS). Adapters count as their base model. False for a local path without a config.json:
    that there is no model is reported where it is loaded.
    """
    if path.startswith(BUNDLED):
        return False
    place = Path(path).expanduser()
    if is_hub_id(path) or path.startswith(INSTALLED) or place.is_file():
        return True
    own_config = place / "config.json"
    try:
        if (adapters := place / "adapter_config.json").is_file():
            saved = json.loads(adapters.read_text(encoding="utf-8"))
            return is_foreign(str(saved["base_model_name_or_path"]))
        if not own_config.is_file():
            return False
        bundled_sizes = [_sizes(file) for file in MODELS.glob("*/config.json")]
        return _sizes(own_config) not in bundled_sizes
    except (ValueError, KeyError, AttributeError):  # unreadable: reported where the model is built
        return True


def _sizes(config_file: Path) -> list[object]:
    """Return the values of SIZE_KEYS in a config.json; None for a missing one."""
    config = json.loads(config_file.read_text(encoding="utf-8"))
    return [config.get(key) for key in SIZE_KEYS]


def template_file(path: str, revision: str | None = None) -> Path:
    """Return the file with the chat template that `chat_template.path` names.

    It is a Jinja file, or one of a model's folder: chat_template.jinja, else tokenizer_config.json.
    """
    key, file = "chat_template.path", Path(path).expanduser()
    if file.is_file():
        return file
    if not (file.is_dir() or path.startswith(BUNDLED) or is_hub_id(path)):
        raise ConfigError(f"{key}={path}: there is no such file")
    no_parts = ()  # only the template is read: the model may lack its weights or tokenizer
    folder = model_folder(path, no_parts, revision=revision, key=key)
    for name in ("chat_template.jinja", TOKENIZER_CONFIG):
        if (folder / name).is_file():
            return folder / name
    raise ConfigError(
        f"{key}={path}: is a folder; name the file in it, or a model with chat_template.jinja or "
        f"{TOKENIZER_CONFIG}"
    )


def _bundled(path: str, key: str) -> Path:
    """Return the folder of ``bundled:<name>``; raises ConfigError for an unknown name."""
    names = bundled_models()
    name = path.removeprefix(BUNDLED)
    if name not in names:
        hint = did_you_mean(name, names)
        raise ConfigError(
            f"{key}={path}: no such bundled model{hint}; there are: {', '.join(names)}"
        )
    return MODELS / name
