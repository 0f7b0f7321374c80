"""`agenttrain export`: a checkpoint as a model folder or a model of the hub, with its card."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from agenttrain.settings.saved import checkpoint_of, run_of
from agenttrain.tracking.run_folder import read_summary
from agenttrain.types import AgenttrainError, ConfigError
from agenttrain.utils.hub import ID, is_hub_id
from agenttrain.utils.model_path import BASE_QUANTIZATION
from agenttrain.utils.temporary import TemporaryFolder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LATEST = Path("checkpoints", "latest")
HUB = "hub:"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
GENERATION_FILE = "generation_config.json"
"""Has the tokens that end a turn."""
READABLE, ENTERABLE = 0o644, 0o755
"""Modes of files and folders: a server of another user has to read them."""


def export_checkpoint(args: Namespace) -> int:
    """Run `export`; return the exit code. Raises ConfigError."""
    if (args.folder is None) == (args.run is None):  # neither, or both
        raise ConfigError("export: name one run: agenttrain export <run folder> --to <new folder>")
    if not args.to:
        raise ConfigError(f"--to: where to? give a new folder, or {HUB}org/name")
    to, form, dtype = args.to, args.format, args.dtype
    if args.public and not to.startswith(HUB):
        raise ConfigError(f"--public {args.public}: goes with --to {HUB}org/name; leave it out")
    checkpoint = checkpoint_to_export(args.folder or args.run, args.step)
    adapted = (checkpoint / ADAPTER_FILES[0]).is_file()
    if form != "transformers" and not adapted:
        raise ConfigError(
            f"--format {form}: {checkpoint} has no adapters, its weights are complete; leave "
            "--format out"
        )
    if form == "adapter" and dtype != "auto":
        raise ConfigError(f"--dtype {dtype}: adapters are copied as they are; leave it out")
    try:
        if to.startswith(HUB):
            public = args.public == "true"
            url = publish(checkpoint, to.removeprefix(HUB), dtype, form, public=public)
            print(f"{checkpoint} -> {url}")
            return 0
        folder = Path(to)
        if folder.resolve() == Path.cwd():
            raise ConfigError(f"--to {to}: is the folder that you are in; name a new folder")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ConfigError(f"--to {folder}: holds something already; name a new folder")
        export(checkpoint, folder, dtype, form)
    except ConfigError:
        raise
    except (AgenttrainError, OSError, ValueError) as error:
        raise ConfigError(f"export {checkpoint}: {error}") from error
    print(f"{checkpoint} -> {folder}")
    return 0


def checkpoint_to_export(source: Path, step: str | None) -> Path:
    """Return the checkpoint of a `--step`, else the newest of a run, else `source` itself.

    Raises ConfigError if that is no checkpoint.
    """
    if step is not None:
        return checkpoint_of(source, step).resolve()
    checkpoint = source / LATEST if (source / LATEST).is_dir() else source
    if not (checkpoint / "manifest.json").is_file():
        raise ConfigError(
            f"export {source}: neither a run with a checkpoint nor a checkpoint; name a folder as "
            "outputs/<experiment>/<run> or <run>/checkpoints/step-000010"
        )
    return checkpoint.resolve()


def export(
    checkpoint: Path,
    folder: Path,
    dtype: str = "auto",
    form: str = "transformers",
    *,
    name: str | None = None,
) -> None:
    """Write the model of `checkpoint` to `folder`, for transformers, vLLM and others to load.

    `form` is `adapter`, which copies the adapters alone, or `transformers` or `merged`, which both
    merge adapters into their base model (the command refuses `merged` without adapters). The
    tokenizer has the chat template that the run was trained with, and the files name the tokens
    that ended its turns. `dtype`: `auto` (that of the training), `float32`, `bfloat16` or
    `float16`. The folder appears once it is complete. `name` is the model's in its card. Raises
    CheckpointError for an incomplete checkpoint.
    """
    from transformers import AutoTokenizer

    from agenttrain.engines.vision import copy_processors
    from agenttrain.training.checkpoint_files import verify

    verify(checkpoint)
    # Filled under another name, and renamed once it is complete.
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of an export that was killed
    part.mkdir(parents=True)
    try:
        description = "complete"  # of the weights, for the model card
        if form == "adapter":
            for file in (*ADAPTER_FILES, BASE_QUANTIZATION, GENERATION_FILE):
                if (checkpoint / file).is_file():
                    shutil.copyfile(checkpoint / file, part / file)
        else:
            model, merging, rounding = _load_model(checkpoint, dtype)
            model.save_pretrained(part)
            description += f"{merging}, saved in {str(model.dtype).removeprefix('torch.')}"
            if rounding:
                description += (
                    f", whose rounding moves the adapted weights by {100 * rounding:.2g} % of what "
                    "the adapters change"
                )
                print(description)  # a loss that --dtype float32 avoids
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(part)
        copy_processors(checkpoint, part)
        _describe(checkpoint, part, name or folder.name, form, description)
        # safetensors writes weights that only their owner may read.
        for path in (part, *part.rglob("*")):
            path.chmod(ENTERABLE if path.is_dir() else READABLE)
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_checkpoint(checkpoint: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer of `checkpoint`, as `export` writes them.

    Raises CheckpointError for an incomplete checkpoint.
    """
    from transformers import AutoTokenizer

    from agenttrain.training.checkpoint_files import verify

    verify(checkpoint)
    return _load_model(checkpoint, "auto").model, AutoTokenizer.from_pretrained(checkpoint)


class LoadedModel(NamedTuple):
    """A checkpoint's model, with its adapters merged."""

    model: PreTrainedModel
    merging: str
    """What was merged, for the model card; empty without adapters."""
    rounding: float
    """How far the rounding to the model's dtype moves the adapted weights, as a share of what the
    adapters change; 0 without adapters."""


def _load_model(checkpoint: Path, dtype: str) -> LoadedModel:
    """Load the model of a checkpoint in `dtype`: `auto` (as saved), or a name such as `float32`."""
    import torch
    from transformers.utils import logging

    from agenttrain.engines.mixers import keeping_float32
    from agenttrain.training.checkpoint_files import auto_class, only_tensors
    from agenttrain.training.lora import merged

    logging.disable_progress_bar()
    adapted = (checkpoint / ADAPTER_FILES[0]).is_file()
    if adapted and dtype == "auto":  # adapter files do not name their base model's dtype
        dtype = _run_config(checkpoint).get("model", {}).get("dtype", dtype)
    torch_dtype: torch.dtype | str = dtype if dtype == "auto" else getattr(torch, dtype)
    # None: the adapters were trained on a base that was not in 4 bits. Otherwise True if the scales
    # of its 4 bits were quantized too, to 8 bits ("double quantization").
    double_quantization: bool | None = None
    if (quantized := checkpoint / BASE_QUANTIZATION).is_file():
        settings = json.loads(quantized.read_text(encoding="utf-8"))
        double_quantization = settings["double_quantization"]
    with only_tensors(checkpoint):
        if not adapted:
            with keeping_float32():  # as `merged` loads the base
                model = auto_class(checkpoint).from_pretrained(checkpoint, dtype=torch_dtype)
            return LoadedModel(model, merging="", rounding=0.0)
        model, rounding = merged(checkpoint, torch_dtype, double=double_quantization)
    merging = ", adapters (LoRA) merged in float32"
    if double_quantization is not None:
        # The base was quantized and dequantized, so that the adapters meet the weights that they
        # were trained on.
        merging += " into the base as its 4 bits (nf4) stand for it"
    return LoadedModel(model, merging, rounding)


def _run_config(checkpoint: Path) -> dict[str, Any]:
    """Return the settings of a checkpoint's run; empty if it is outside a run folder."""
    file = run_of(checkpoint) / "config.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _describe(checkpoint: Path, folder: Path, name: str, form: str, weights: str) -> None:
    """Write the model card and the run's settings into the exported model's `folder`.

    `name` and `weights` are texts for the card. In the settings of adapters, the path of their base
    model becomes its hub id, if it has one. Does nothing for a checkpoint outside a run folder,
    which has no settings.
    """
    from agenttrain.commands.model_card import SETTINGS, model_card, published_settings
    from agenttrain.engines.vision import PROCESSOR_FILE

    run, config = run_of(checkpoint), _run_config(checkpoint)
    if not config:
        return
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    # A state without a step takes it from the folder's name, step-000010.
    step = int(state.get("step", checkpoint.name.removeprefix("step-")))
    sees = (folder / PROCESSOR_FILE).is_file()  # a model that reads images
    adapter = form == "adapter"
    card = model_card(
        name, config, read_summary(run), step=step, adapter=adapter, weights=weights, sees=sees
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
    (folder / SETTINGS).write_text(published_settings(config), encoding="utf-8")
    model_settings = config.get("model", {})
    # A folder's path may look like an id, org/name; only a model of the hub has a revision too.
    is_of_hub = ID.fullmatch(str(model_settings.get("path"))) and model_settings.get("revision")
    if adapter and is_of_hub:
        # The file may name the base model by its folder in this machine's cache.
        file = folder / ADAPTER_FILES[0]
        adapter_config = json.loads(file.read_text(encoding="utf-8"))
        if not is_hub_id(adapter_config["base_model_name_or_path"]):
            adapter_config["base_model_name_or_path"] = model_settings["path"]
            adapter_config["revision"] = model_settings["revision"]
            file.write_text(json.dumps(adapter_config, indent=2), encoding="utf-8")


def publish(checkpoint: Path, repo: str, dtype: str, form: str, *, public: bool) -> str:
    """Export to a model of the hub, made if there is none, and return its address.

    huggingface_hub reads `HF_TOKEN` and `HF_ENDPOINT`. A new model is private unless `public`; an
    existing one stays what it is. Raises ConfigError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        with TemporaryFolder() as temporary:
            folder = temporary / "model"
            export(checkpoint, folder, dtype, form, name=repo.rpartition("/")[2])
            url = api.create_repo(repo, private=not public, exist_ok=True)
            api.upload_folder(
                repo_id=repo, folder_path=folder, commit_message=f"agenttrain {checkpoint.name}"
            )
        return str(url)
    except HFValidationError as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"--to {HUB}{repo}: {reason}; write org/name") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        remedy = "try again"
        if status == 401:
            remedy = "set HF_TOKEN to a token that may write (huggingface.co/settings/tokens)"
        elif status == 403:
            remedy = f"the token of HF_TOKEN may not write to {repo.partition('/')[0]}"
        elif status == 404:
            remedy = "check the name of the organisation"
        raise ConfigError(f"--to {HUB}{repo}: the hub answered {status}; {remedy}") from error
    except HTTPError as error:
        raise ConfigError(
            f"--to {HUB}{repo}: {api.endpoint} cannot be reached: {error}; try again"
        ) from error
