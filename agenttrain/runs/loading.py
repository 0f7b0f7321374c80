"""Model, policy and engine of a run: built from its configuration, and checked before they load.

The checks need no weights: a model's architecture is built without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.engines.base import Engine, Separate
from agenttrain.engines.registry import spec_of
from agenttrain.engines.spec import EngineInputs
from agenttrain.launch.config import DistributedName
from agenttrain.runs.sampling import load_model, vision_of
from agenttrain.settings.machine import float32_on_gpu
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.checkpoint import random_states, seed_random, set_random_states
from agenttrain.training.checkpoint_files import auto_class
from agenttrain.training.config import Init
from agenttrain.training.logprobs import checkpoint_layers
from agenttrain.training.lora import add_lora, is_adapted
from agenttrain.training.optimizers import build_optimizer
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import Sharding
from agenttrain.training.world import World
from agenttrain.types import ConfigError
from agenttrain.utils.hub import is_hub_id
from agenttrain.utils.model_path import base_folder, model_folder
from agenttrain.utils.seeds import derive_seed


def check_model(config: RunConfig, *, sampled: bool = True) -> None:
    """Raise if the model's architecture cannot do what the run needs, or if weights are missing.

    The model is built without weights, before they are loaded. `sampled`: an engine samples from
    it.
    """
    import torch
    from transformers import AutoConfig

    folder = model_folder(config.model.path, revision=config.model.revision)
    if (folder / "adapter_config.json").is_file():  # its base may be anywhere; adapters fit it
        return
    try:
        architecture = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            dtype = getattr(torch, config.model.dtype)
            model = auto_class(folder).from_config(architecture, dtype=dtype)
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"model.path={config.model.path}: cannot be loaded: {error}") from error
    complete = config.model.init is Init.random or is_hub_id(config.model.path)
    for index in () if complete else folder.glob("*.safetensors.index.json"):
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in named if not (folder / name).is_file())
        if missing:
            raise ValueError(
                f"model.path={config.model.path}: {index.name} names {', '.join(missing)}, which "
                "the folder lacks; copy the whole model"
            )
    if sampled:
        spec_of(config.engine).check_model(config.engine, model)
    if config.training.gradient_checkpointing:
        checkpoint_layers(model)
    if config.model.lora.rank:
        add_lora(model, config.model.lora)
    build_optimizer(model, config.optimizer)


def make_policy(
    config: RunConfig,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    reward_weights: Mapping[str, float] | None = None,
    world: World | None = None,
    sampled: bool = True,
) -> Policy:
    """Build model and optimizer; seed every generator, in each process of `world` differently."""
    world = world or World()
    seed_random(derive_seed(config.seed, world.rank) % 2**32 if world.rank else config.seed)
    model = load_model(config)
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
        vision=vision_of(config),
    )
    note = float32_on_gpu(config) if policy.accelerator.device.type == "cuda" else None
    if note and world.is_main:
        print(note, flush=True)
    return policy


def make_engine(config: RunConfig, policy: Policy, folder: Path | None = None) -> Engine:
    """Build the engine that samples from the policy; its log goes to the run's folder.

    Raises ConfigError for an engine that is to get weights and has no methods for them.
    """
    spec, lora = spec_of(config.engine), config.model.lora
    path, revision = config.model.path, config.model.revision
    folder_of_model = model_folder(path, revision=revision)
    inputs = EngineInputs(
        policy=None if spec.own_weights else policy.sampler,
        model=base_folder(path, revision, config.model.base_revision) or folder_of_model,
        dtype=config.model.dtype,
        adapters=lora if lora.rank else None,
        tokenizer=folder_of_model if config.rollout.structured_calls else None,
        sync_mode=config.weight_sync.mode,
        sync_folder=config.weight_sync.folder,
        servers=config.servers,
        seed=config.seed,
        on_gpu=policy.accelerator.device.type == "cuda",
        rank=policy.world.rank,
        run_folder=folder,
        vision=policy.vision,
    )
    # Some engines seed the process's generators; tools and rewards would draw alike on all ranks.
    states = random_states()
    engine = spec.build(config.engine, inputs)
    set_random_states(states)
    if spec.own_weights and not isinstance(engine, Separate):
        raise ConfigError(
            f"engine={config.engine.name}: its SPEC has own_weights=True, so that each step sends "
            f"weights to it, but {type(engine).__name__} lacks a method of "
            "agenttrain.engines.base.Separate; add it"
        )
    return engine
