"""Model, policy and engine of a run: built from its configuration, and checked before they load.

The checks need no weights: a model's architecture is built without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.tasks import TaskSource
from agenttrain.engines.base import Engine
from agenttrain.engines.registry import spec_of
from agenttrain.engines.spec import EngineInputs
from agenttrain.launch.config import DistributedName
from agenttrain.settings.machine import float32_on_gpu
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.checkpoint import random_states, seed_random, set_random_states
from agenttrain.training.checkpoint_files import MANIFEST, only_tensors, verify
from agenttrain.training.config import Init, ModelConfig
from agenttrain.training.logprobs import checkpoint_layers
from agenttrain.training.lora import add_lora, base_of, is_adapted
from agenttrain.training.optimizers import build_optimizer
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import Sharding
from agenttrain.training.world import World
from agenttrain.utils.model_path import model_folder
from agenttrain.utils.seeds import derive_seed


def verify_model(config: RunConfig) -> None:
    """Raise CheckpointError for a model that is a torn checkpoint of ours."""
    folder = model_folder(config.model.path)
    if (folder / MANIFEST).is_file():
        verify(folder)


def check_model(config: RunConfig, *, sampled: bool = True) -> None:
    """Raise for what the run asks of a model that its architecture does not have.

    The model is built without weights, so that this is known before they are loaded. `sampled`:
    an engine samples from it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_folder(config.model.path)
    if (folder / "adapter_config.json").is_file():  # its base may be anywhere; adapters fit it
        return
    try:
        architecture = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            dtype = getattr(torch, config.model.dtype)
            model = AutoModelForCausalLM.from_config(architecture, dtype=dtype)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"model.path={config.model.path}: cannot be loaded: {error}") from error
    _check_shards(folder, config.model)
    if sampled:
        spec_of(config.engine).check_model(config.engine, model)
    if config.training.gradient_checkpointing:
        checkpoint_layers(model)
    if config.model.lora.rank:
        add_lora(model, config.model.lora)
    build_optimizer(model, config.optimizer)


def _check_shards(folder: Path, model: ModelConfig) -> None:
    """Raise ValueError for a file of weights that the folder's index names and lacks."""
    for index in folder.glob("*.safetensors.index.json"):
        if model.init is Init.random:
            continue
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise ValueError(
                f"model.path={model.path}: {index.name} names {', '.join(missing)}, which the "
                "folder lacks; copy the whole model"
            )


def curriculum_of(config: RunConfig, tasks: TaskSource) -> Curriculum | None:
    """Return what chooses among the training tasks, at its start; None: their own order."""
    settings = config.data.curriculum
    return Curriculum(tasks, settings, seed=config.seed) if settings.enabled else None


def make_policy(
    config: RunConfig,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    reward_weights: Mapping[str, float] | None = None,
    world: World | None = None,
    sampled: bool = True,
) -> Policy:
    """Build model and optimizer, every generator seeded: in each process of `world` differently."""
    world = world or World()
    seed_random(derive_seed(config.seed, world.rank) % 2**32 if world.rank else config.seed)
    model = _model(config)
    if config.model.lora.rank or is_adapted(model):
        add_lora(model, config.model.lora)
    sharding = None
    if config.distributed.name is DistributedName.fsdp2:
        sharding = Sharding(cpu_offload=config.distributed.cpu_offload)
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
        sampled=sampled and not spec_of(config.engine).own_weights,
    )
    note = float32_on_gpu(config) if policy.accelerator.device.type == "cuda" else None
    if note and world.is_main:
        print(note, flush=True)
    return policy


def _model(config: RunConfig) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # bars for each checkpoint would tear up the live display
    folder, dtype = model_folder(config.model.path), getattr(torch, config.model.dtype)
    if config.model.init is Init.random:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    with only_tensors(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def make_engine(config: RunConfig, policy: Policy, folder: Path | None = None) -> Engine:
    """Build the engine that samples from the policy; its log goes to the run's folder."""
    spec, lora = spec_of(config.engine), config.model.lora
    inputs = EngineInputs(
        policy=None if spec.own_weights else policy.sampler,
        model=base_of(model_folder(config.model.path)),
        dtype=config.model.dtype,
        adapters=lora if lora.rank else None,
        tokenizer=model_folder(config.model.path) if config.rollout.structured_calls else None,
        sync_mode=config.weight_sync.mode,
        seed=config.seed,
        on_gpu=policy.accelerator.device.type == "cuda",
        rank=policy.world.rank,
        run_folder=folder,
    )
    # Some seed the generators of the process: tools and rewards would draw the same on all ranks.
    states = random_states()
    engine = spec.build(config.engine, inputs)
    set_random_states(states)
    return engine
