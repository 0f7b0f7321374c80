"""Model, policy and engine of a run: built from its configuration, and checked before they load.

The checks need no weights: a model's architecture is built without them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.engines.base import Engine, Separate
from agenttrain.engines.registry import names_with, spec_of
from agenttrain.engines.routers import check_experts
from agenttrain.engines.spec import EngineInputs
from agenttrain.launch.config import DistributedName, ShardWithin
from agenttrain.runs.sampling import (
    architecture_folder,
    engine_inputs,
    load_empty,
    load_model,
    vision_of,
)
from agenttrain.settings.checks import base_problems
from agenttrain.settings.engine_checks import (
    merges_adapters,
    replays_routes,
    run_spec,
    sent_problems,
)
from agenttrain.settings.machine import float32_on_gpu
from agenttrain.settings.role_checks import named_gpus, server_shares_gpu
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.checkpoint import random_states, seed_random, set_random_states
from agenttrain.training.checkpoint_files import auto_class
from agenttrain.training.config import Init, Transport
from agenttrain.training.lora import adapted_experts, add_lora, describe_adapters, is_adapted
from agenttrain.training.optimizers import build_optimizer
from agenttrain.training.policy import Policy
from agenttrain.training.quantization import check_quantizable, describe_quantization
from agenttrain.training.recomputation import recomputed_modules
from agenttrain.training.sharding import Sharding
from agenttrain.training.sliced_weights import WrongWeights, stand_ins
from agenttrain.training.world import World
from agenttrain.types import ConfigError
from agenttrain.utils.hub import is_hub_id
from agenttrain.utils.model_path import ADAPTER_CONFIG, model_folder, why_merged, why_not_sent
from agenttrain.utils.sections import raise_config_error
from agenttrain.utils.seeds import derive_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check_model(config: RunConfig, verb: str) -> None:
    """Raise if the architecture cannot do what a run of `verb` needs, or weight files are missing.

    The model is built on the meta device, without weights.
    """
    sampled = verb != "sft"
    folder = model_folder(config.model.path, revision=config.model.revision)
    # model.path holds adapters: they were trained on their base model, so it needs few checks.
    if (folder / ADAPTER_CONFIG).is_file():
        raise_config_error(base_problems(config.model, folder))
        if sampled:
            _check_adapters_are_sent(config, folder)
        if replays_routes(config, verb):
            check_experts(_empty_model(config, architecture_folder(config)))
        return
    model = _empty_model(config, folder)
    # Random weights need no files, and a model of the hub is downloaded later, with its weights.
    may_lack_weights = config.model.init is Init.random or is_hub_id(config.model.path)
    index_files = [] if may_lack_weights else folder.glob("*.safetensors.index.json")
    for index in index_files:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]  # weight -> file
        file_names = set(weight_map.values())
        missing = sorted(name for name in file_names if not (folder / name).is_file())
        if missing:
            raise ConfigError(
                f"model.path={config.model.path}: {index.name} names {', '.join(missing)}, which "
                "the folder lacks; copy the whole model"
            )
    if sampled:
        spec_of(config.engine).check_model(config.engine, model)
        if replays_routes(config, verb):
            check_experts(model)
    # These are called to see them fail: each raises for an architecture that it does not support.
    recomputed_modules(model, config.training.activation_checkpointing)
    if config.model.quantization is not None:
        check_quantizable(model, config.model)
    if config.model.lora.rank:
        add_lora(model, config.model.lora)
        if sampled:
            _check_sent(config, model)
    build_optimizer(model, config.optimizer)


def _empty_model(config: RunConfig, folder: Path) -> PreTrainedModel:
    """Return the model of a folder's config.json on the meta device; raises ConfigError."""
    import torch
    from transformers import AutoConfig

    try:
        architecture = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            dtype = getattr(torch, config.model.dtype)
            model: PreTrainedModel = auto_class(folder).from_config(architecture, dtype=dtype)
    except (ValueError, OSError, KeyError) as error:
        raise ConfigError(f"model.path={config.model.path}: cannot be loaded: {error}") from error
    return model


def _check_adapters_are_sent(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if the engine cannot be sent the adapters in `folder` as they are."""
    path, transport = config.model.path, config.weight_sync.transport
    if run_spec(config).own_weights and (reason := why_not_sent(folder)):
        raise ConfigError(
            f"model.path={path}: its adapters have {reason}, which engine={config.engine.name} "
            f"cannot be sent; merge them into their model with peft, or set "
            f"{names_with(own_weights=False)}"
        )
    if transport is Transport.lora and (reason := why_merged(folder)):
        raise ConfigError(
            f"weight_sync.transport=lora: the adapters of model.path={path} are merged before "
            f"they are sent ({reason}); leave it out"
        )


def _check_sent(config: RunConfig, model: PreTrainedModel) -> None:
    """Raise ConfigError for settings that do not go with the weights that the engine is sent.

    Adapters of experts are merged into the weights before these are sent, others need not be. The
    model, which has its new adapters, tells whether some are on experts.
    """
    names = adapted_experts(model)
    if names and config.weight_sync.transport is Transport.lora:
        raise ConfigError(
            f"weight_sync.transport=lora: the adapters of experts ({names[0]}, …) are merged "
            "before they are sent, because vLLM 0.32 reads them wrongly in most families; leave it "
            "out, or set model.lora.target_parameters=[]"
        )
    # None: the architecture decides whether adapters are merged. Where the settings decide it, this
    # was checked with them.
    if merges_adapters(config) is None:
        raise_config_error(sent_problems(config, is_merged=bool(names)))


def make_policy(
    config: RunConfig,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    reward_weights: Mapping[str, float] | None = None,
    world: World | None = None,
    sampled: bool = True,
) -> Policy:
    """Build the policy: model and optimizer, with the objective of `algorithm`.

    Every random generator is seeded, differently in each process of `world`. `sampled`: an engine
    samples rollouts from the policy; from the same weights in memory, or from its own copy, which
    is sent to it (`own_weights` of the engine's spec). False in supervised runs.
    """
    world = world or World()
    seed = config.seed  # of the first process, which draws as a run of one process does
    if world.rank > 0:
        seed = derive_seed(config.seed, world.rank) % 2**32  # NumPy takes 32 bits
    seed_random(seed)
    sharding = sharding_of(config)
    # A sharded model starts on the meta device, and its weights are read once it is sharded. If
    # they can only be loaded whole, `load_empty` returns None. WrongWeights: files that do not fit
    # the model. Patient: one process may wait minutes longer for its files.
    with world.together("the files of model.path", WrongWeights, patient=True):
        empty_model = None if sharding is None else load_empty(config, world.rank)
    # `weights` are those that a sharded model reads later; None: the model has its weights.
    model, weights = (load_model(config), None) if empty_model is None else empty_model
    if config.model.lora.rank or is_adapted(model):
        # peft draws no adapters on the meta device: `stand_ins` gives the model CPU tensors for it.
        with stand_ins(model) if weights is not None else nullcontext():
            targets = add_lora(model, config.model.lora)
        if world.is_main:
            line = describe_adapters(model, targets)
            in_4_bits = config.model.quantization is not None
            if run_spec(config).own_weights and (adapted_experts(model) or in_4_bits):
                line += "; the engine gets all weights, with them merged"
            if in_4_bits:
                line = f"{describe_quantization(model)}\n{line}"
            print(line, flush=True)
    policy = Policy(
        model,
        algorithm=algorithm,
        optimizer=config.optimizer,
        training=config.training,
        temperature=temperature,
        max_completion_tokens=config.rollout.max_completion_tokens,
        steps=config.steps,
        reward_weights=reward_weights,
        world=world,
        sharding=sharding,
        weights=weights,
        sampled=sampled and not run_spec(config).own_weights,
        vision=vision_of(config),
        context_parallel=config.distributed.context_parallel,
    )
    note = float32_on_gpu(config) if policy.accelerator.device.type == "cuda" else None
    if note and world.is_main:
        print(note, flush=True)
    return policy


def sharding_of(config: RunConfig) -> Sharding | None:
    """Return how the run's processes shard the weights; None if each process holds all weights."""
    distributed = config.distributed
    if distributed.name is not DistributedName.fsdp2:
        return None
    within = None  # all processes of the run share one copy
    if distributed.shard_within is ShardWithin.node:
        # Each node holds all weights, spread over its processes. torchrun or a scheduler sets their
        # number.
        within = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Sharding(cpu_offload=distributed.cpu_offload, within=within)


def make_engine(config: RunConfig, policy: Policy, folder: Path | None, *, verb: str) -> Engine:
    """Build the engine of a run of `verb`, over the policy; its log goes to the run folder.

    Raises ConfigError for an engine whose SPEC says that weights are sent to it, and that has no
    methods for them.
    """
    # An engine with weights of its own is sent them later; others sample from the policy itself.
    sampler = None if run_spec(config).own_weights else policy.sampler
    inputs = engine_inputs(
        config,
        sampler,
        folder,
        on_gpu=policy.accelerator.device.type == "cuda",
        rank=policy.world.rank,
        verb=verb,
    )
    inputs = replace(inputs, vision=policy.vision)
    # Some engines seed the process's generators, alike on all ranks: keep the states, so that tools
    # and rewards draw differently.
    states = random_states()
    engine = _build_engine(config, inputs)
    set_random_states(states)
    return engine


def make_standalone_engine(
    config: RunConfig, folder: Path, verb: str, *, on_gpu: bool, trainers: int
) -> Engine:
    """Build the engine of a run of `verb` in a process that has no policy; see `make_engine`.

    `trainers` is the number of training processes of this machine.
    """
    inputs = engine_inputs(config, None, folder, on_gpu=on_gpu, rank=0, verb=verb)
    taken_gpus = named_gpus(config, verb)
    return _build_engine(config, replace(inputs, trainers=trainers, taken=taken_gpus))


def _build_engine(config: RunConfig, inputs: EngineInputs) -> Engine:
    """Build the engine by its spec; ConfigError if it lacks methods that the spec promises."""
    import torch

    spec = run_spec(config)
    shares_gpu = inputs.on_gpu and server_shares_gpu(config, torch.cuda.device_count())
    engine = spec.build(config.engine, replace(inputs, shares_gpu=shares_gpu))
    if spec.own_weights and not isinstance(engine, Separate):
        raise ConfigError(
            f"engine={config.engine.name}: its SPEC has own_weights=True, so that each step sends "
            f"weights to it, but {type(engine).__name__} lacks a method of "
            "agenttrain.engines.base.Separate; add it"
        )
    return engine
