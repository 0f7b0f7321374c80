"""A run's model with an engine and nothing else: to be talked to, not trained.

Importing torch and transformers takes most of the start, so this imports little besides.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agenttrain.chat.vision import load_placeholders
from agenttrain.engines.base import Engine
from agenttrain.engines.config import DEFAULT_ENGINE
from agenttrain.engines.registry import names_with, spec_of, specs
from agenttrain.engines.spec import EngineInputs
from agenttrain.launch.config import DistributedName
from agenttrain.settings.checks import base_problems
from agenttrain.settings.engine_checks import (
    merges_adapters,
    replays_routes,
    run_spec,
    sends_adapters,
)
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.checkpoint_files import (
    MANIFEST,
    auto_class,
    only_tensors,
    verify,
)
from agenttrain.training.config import Init, VisionTower
from agenttrain.types import ConfigError
from agenttrain.utils.hub import COMMIT
from agenttrain.utils.model_path import base_folder, model_folder, weights_folder
from agenttrain.utils.placeholders import Placeholders
from agenttrain.utils.sections import raise_config_error

if TYPE_CHECKING:
    from agenttrain.engines.vision import Vision

SMALL = 10_000_000
"""Parameters below which the operations on a CPU are so short that threads which share them wait
longer than they compute: the bundled agent takes 1.5 times as long with two."""


def verify_model(config: RunConfig, index: int = 0, count: int = 1) -> None:
    """Raise CheckpointError if the model is a checkpoint of ours that is incomplete.

    `count` processes verify it together: the process `index` reads its part of the files.
    """
    folder = model_folder(config.model.path, revision=config.model.revision)
    if (folder / MANIFEST).is_file():
        verify(folder, index, count)


def placeholders_of(config: RunConfig) -> Placeholders | str:
    """Return the tokens that stand for an image in the model's prompts.

    A str is the reason why the run has no images.
    """
    placeholders = load_placeholders(architecture_folder(config))
    if isinstance(placeholders, str):
        return placeholders
    spec = run_spec(config)
    # The rollout process samples from a copy of the model, with an engine of its own.
    has_copy = spec is not spec_of(config.engine)
    if not spec.reads_images and has_copy:
        remedy = "rollout.process=same"
        if config.is_asynchronous:
            remedy = "async_training.max_staleness=0"
        return f"the model's copy in the rollout process reads token ids alone; set {remedy}"
    if not spec.reads_images:
        remedy = names_with(reads_images=True)
        return f"engine={config.engine.name} reads token ids alone; set {remedy}"
    if config.rollout.compact_at is not None:
        return "rollout.compact_at shortens contexts, and those with images cannot be; leave it out"
    if config.algorithm.teacher is not None:
        return "algorithm.teacher reads token ids alone; leave it out"
    if config.agent.outside:
        return "an outside agent's requests hold text alone; leave agent out"
    if config.distributed.name is DistributedName.fsdp2:
        return "distributed=fsdp2 does not share a vision tower; set distributed=ddp or single"
    if (context := config.distributed.context_parallel) > 1:
        return f"distributed.context_parallel={context} divides token ids alone; set it to 1"
    return placeholders


def vision_of(config: RunConfig) -> Vision | None:
    """Load the vision tower of the run's model; return None if the run has no images.

    Raises ConfigError for model.vision=trained in such a run.
    """
    placeholders = placeholders_of(config)
    trained = config.model.vision is VisionTower.trained
    if isinstance(placeholders, str):  # the reason why the run has no images
        if trained:
            raise ConfigError(f"model.vision=trained: {placeholders}; leave model.vision out")
        return None
    from agenttrain.engines.vision import load_vision

    return load_vision(architecture_folder(config), placeholders, frozen=not trained)


def architecture_folder(config: RunConfig) -> Path:
    """Return the folder of config.json: the model's, or its base model's if it has adapters."""
    model = config.model
    folder = base_folder(model.path, model.revision, model.base_revision, weights=False)
    return model_folder(model.path, revision=model.revision) if folder is None else folder


def load_model(config: RunConfig) -> Any:
    """Load the model of `model.path`, or build it with random weights."""
    from agenttrain.training.kernels import disable_cudnn_attention

    disable_cudnn_attention()  # it would plan anew for each length of a rollout
    # torch's own number, read once per process: after a small model torch's number is 1, which a
    # large model loaded later must not keep.
    threads = _initial_threads()
    model = _load(config)
    _set_threads(model, threads)
    return model


def load_empty(config: RunConfig, rank: int) -> tuple[Any, Any] | None:
    """Return the model on the meta device, and its `SlicedWeights` to read once it is sharded.

    Return None if its weights can only be loaded whole. Process 0 prints why.
    """
    import torch

    from agenttrain.training.kernels import disable_cudnn_attention
    from agenttrain.training.lora import load_saved_adapters
    from agenttrain.training.quantization import check_quantizable, quantize
    from agenttrain.training.sliced_weights import (
        SlicedWeights,
        empty_model,
        stand_ins,
        why_not_sliced,
    )

    path, revision = config.model.path, config.model.revision
    source = weights_folder(path, revision=revision)
    # The model that the adapters in `source` are for; None if `source` is a whole model.
    base = base_folder(path, revision, config.model.base_revision)
    reason = why_not_sliced(base or source)
    if config.model.init is Init.random:
        reason = "model.init=random draws all weights with one generator"
    if reason is not None:
        if rank == 0:
            print(f"every process loads all weights of model.path={path}: {reason}", flush=True)
        return None
    disable_cudnn_attention()  # it would plan anew for each length of a rollout
    # Asked before `_set_threads` changes torch's number at the end of this function.
    threads = _initial_threads()
    dtype = getattr(torch, config.model.dtype)
    model: Any = empty_model(base or source, dtype, uniform=_needs_one_dtype(config))
    weights = SlicedWeights(model, base or source, rank)
    if config.model.quantization is not None:
        check_quantizable(model, config.model)
        quantize(model, double=config.model.double_quantization)
    if base is not None:
        # `stand_ins`: peft draws no adapters on the meta device. `only_tensors`: files of adapters
        # may be pickles, of which those that could run code are refused.
        with stand_ins(model), only_tensors(source):
            load_saved_adapters(model, source)
        _record_revision(model, base)
    _set_threads(model, threads)
    return model, weights


def _needs_one_dtype(config: RunConfig) -> bool:
    """Return True if FSDP2 trains the weights themselves: they then have one number format."""
    return config.distributed.name is DistributedName.fsdp2 and not config.model.lora.rank


def _set_threads(model: Any, threads: int) -> None:
    """Use one thread for a small model, `threads` for others; OMP_NUM_THREADS overrides both."""
    import torch

    # Weights in 4 bits count as bytes, of two numbers each: near enough.
    is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if is_small else threads)


def _record_revision(model: Any, base: Path) -> None:
    """Record the commit of the adapters' base model, which checkpoints save with the adapters."""
    if COMMIT.fullmatch(base.name):
        for adapters in model.peft_config.values():
            adapters.revision = base.name


@cache
def _initial_threads() -> int:
    """Return torch's number of threads before the first model of this process."""
    import torch

    return torch.get_num_threads()


def _load(config: RunConfig) -> Any:
    """Load the model, with its saved adapters if it has any, or draw random weights."""
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    from agenttrain.engines.mixers import keep_float32
    from agenttrain.training.lora import load_saved_adapters
    from agenttrain.training.quantization import check_quantizable, quantize
    from agenttrain.training.sliced_weights import load_whole

    logging.disable_progress_bar()  # bars for each checkpoint would tear up the live display
    path, revision = config.model.path, config.model.revision
    dtype = getattr(torch, config.model.dtype)
    # True: all weights get `dtype`. False: weights that need float32, as in some mixers, keep it.
    uniform = _needs_one_dtype(config)
    if config.model.init is Init.random:
        folder = model_folder(path, revision=revision)
        architecture = AutoConfig.from_pretrained(folder)
        model = auto_class(folder).from_config(architecture, dtype=dtype)
        if not uniform:
            keep_float32(model)
        return model
    source = weights_folder(path, revision=revision)
    raise_config_error(base_problems(config.model, source))  # before the base is downloaded
    # The model that the adapters in `source` are for; None if `source` is a whole model.
    base = base_folder(path, revision, config.model.base_revision)
    with only_tensors(source):
        # The base of adapters is loaded here: transformers would look it up by its name, in any
        # revision.
        model = load_whole(base or source, dtype, uniform=uniform)
        if config.model.quantization is not None:
            check_quantizable(model, config.model)
            # With fsdp2 each process holds the whole model until it is sharded, after loading. On
            # the host, where it is quantised and stays until then, it needs no memory of the GPU.
            will_be_sharded = config.distributed.name is DistributedName.fsdp2
            quantize(model, double=config.model.double_quantization, on_host=will_be_sharded)
        if base is None:
            return model
        load_saved_adapters(model, source)
    _record_revision(model, base)  # checkpoints save it, and a resumed run loads the same base
    return model


def sampling_engine(config: RunConfig) -> Engine:
    """Load the model and build an engine on it, on the GPU if there is one.

    An engine with weights of its own takes long to start. engine=transformers with the same
    max_context takes its place.
    """
    import torch

    model = load_model(config).eval().requires_grad_(False)
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        model = model.cuda()
    settings: Any = config.engine
    if spec_of(settings).own_weights:
        settings = specs()[DEFAULT_ENGINE].settings(max_context=config.engine.max_context)
    spec = spec_of(settings)
    spec.check_model(settings, model)
    inputs = engine_inputs(config, model, None, on_gpu=on_gpu, rank=0, verb="play")
    # Nothing is trained, so no weights will be sent; no calls are held to a grammar either.
    inputs = replace(
        inputs,
        model=model_folder(config.model.path, revision=config.model.revision),
        adapters=None,
        tokenizer=None,
        sync_folder=None,
        max_staleness=0,
        vision=vision_of(config),
    )
    return spec.build(settings, inputs)


def engine_inputs(
    config: RunConfig,
    policy: Any,
    folder: Path | None,
    *,
    on_gpu: bool,
    rank: int,
    verb: str,
) -> EngineInputs:
    """Return the inputs from which the engine of a run of `verb` is built.

    `policy` is the trainer's model, from which some engines sample; None where it is not loaded.
    `folder` is the run folder, and `rank` that of this process.
    """
    lora = config.model.lora
    path, revision = config.model.path, config.model.revision
    source_folder = model_folder(path, revision=revision)
    # The model that the adapters in `source_folder` are for; None if it holds a whole model.
    base = base_folder(path, revision, config.model.base_revision)
    # An engine without weights of its own samples from the policy, adapters and all. One with its
    # own is sent the adapters, or all weights with the adapters merged into them.
    samples_from_policy = not run_spec(config).own_weights
    has_adapters = lora.rank > 0 and (samples_from_policy or adapters_are_sent(config))
    return EngineInputs(
        policy=policy,
        model=base or source_folder,
        dtype=config.model.dtype,
        adapters=lora if has_adapters else None,
        tokenizer=source_folder if config.rollout.structured_calls else None,  # for grammars
        sync_mode=config.weight_sync.mode,
        sync_folder=config.weight_sync.folder,
        transport=config.weight_sync.transport,
        servers=config.servers,
        seed=config.seed,
        on_gpu=on_gpu,
        rank=rank,
        run_folder=folder,
        mixed_precision=config.training.mixed_precision,
        max_staleness=config.async_training.max_staleness,
        record_routes=replays_routes(config, verb),
    )


def adapters_are_sent(config: RunConfig) -> bool:
    """Return True if the engine is sent the adapters of `model.lora` as they are."""
    is_merged = merges_adapters(config)
    if is_merged is None:  # the settings do not tell: adapters are merged if they are on experts
        is_merged = _adapts_experts(config)
    return sends_adapters(config, is_merged=is_merged)


def _adapts_experts(config: RunConfig) -> bool:
    """Return True if the adapters of `model.lora` are on experts, by the model's architecture."""
    import torch
    from transformers import AutoConfig

    from agenttrain.training.footprint import empty_model
    from agenttrain.training.lora import adapted_experts

    architecture = AutoConfig.from_pretrained(
        model_folder(config.model.path, revision=config.model.revision)
    )
    dtype = getattr(torch, config.model.dtype)
    return bool(adapted_experts(empty_model(architecture, dtype, config.model.lora)))


def server_inputs(config: RunConfig, folder: Path, *, on_gpu: bool) -> EngineInputs:
    """Return the inputs for the engine of a server for other runs; its files go to `folder`."""
    # Routes are recorded if the runs that it serves replay them.
    inputs = engine_inputs(config, None, folder, on_gpu=on_gpu, rank=0, verb="train")
    model = model_folder(config.model.path, revision=config.model.revision)
    # No process trains beside it: its first GPU is the machine's first.
    return replace(inputs, tokenizer=model, sync_folder=None, trainers=0)
