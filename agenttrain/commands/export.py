"""`agenttrain export`: a checkpoint as a plain model folder: weights, configuration, tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.names import did_you_mean

USAGE = "export <run or checkpoint folder> to=<new folder> [dtype=auto|float32|bfloat16|float16]"
DTYPES = ("auto", "float32", "bfloat16", "float16")
LATEST = Path("checkpoints", "latest")


def main(arguments: Sequence[str]) -> int:
    """Run `export`; return the exit code. Raises ConfigError."""
    options = dict(word.split("=", 1) for word in arguments if "=" in word)
    folders = [word for word in arguments if "=" not in word]
    unknown = [name for name in options if name not in ("to", "dtype")]
    if len(folders) != 1 or unknown or "to" not in options:
        problem = f"{unknown[0]}=…: not an option of export; " if unknown else ""
        raise ConfigError(f"{problem}give {USAGE}")
    dtype = options.get("dtype", "auto")
    if dtype not in DTYPES:
        hint = did_you_mean(dtype, DTYPES)
        raise ConfigError(f"dtype={dtype}: expected one of {', '.join(DTYPES)}{hint}")
    source, folder = Path(folders[0]), Path(options["to"])
    checkpoint = source / LATEST if (source / LATEST).is_dir() else source
    if not (checkpoint / "manifest.json").is_file():
        raise ConfigError(
            f"export {source}: neither a run with a checkpoint nor a checkpoint; name a folder as "
            "outputs/<experiment>/<run> or <run>/checkpoints/step-000010"
        )
    checkpoint = checkpoint.resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"to={folder}: holds something already; name a new folder")
    try:
        export(checkpoint, folder, dtype)
    except (AgenttrainError, OSError) as error:
        raise ConfigError(f"export {checkpoint}: {error}") from error
    print(f"{checkpoint} -> {folder}")
    return 0


def export(checkpoint: Path, folder: Path, dtype: str = "auto") -> None:
    """Write the model of `checkpoint` to `folder`, for transformers, vLLM and others to load.

    Adapters are merged into their base model. The tokenizer has the chat template that the run
    was trained with. `dtype`: `auto` (as saved), `float32`, `bfloat16` or `float16`. Raises
    CheckpointError for an incomplete checkpoint.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from agenttrain.training.checkpoint_files import copy_mode, only_tensors, verify
    from agenttrain.training.lora import CONFIG_FILE, merged

    logging.disable_progress_bar()
    verify(checkpoint)
    wanted: torch.dtype | str = dtype if dtype == "auto" else getattr(torch, dtype)
    with only_tensors(checkpoint):
        if (checkpoint / CONFIG_FILE).is_file():
            model = merged(checkpoint, wanted)
        else:
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=wanted)
    model.save_pretrained(folder)
    copy_mode(folder / "config.json", folder.glob("*.safetensors"))
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
