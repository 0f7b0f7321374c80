"""RunConfig -> live objects: the one file that knows every class.

`prepare` comes first and needs no weights, so that a tool that cannot be built or a template that
is refused is told before anything expensive starts; `load` adds the model and its engine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate
from agenttrain.chat.template import Chat
from agenttrain.check import certified, check_rows, prompt_lengths, rewards_of, splits_of
from agenttrain.config.algorithm import AlgorithmConfig
from agenttrain.config.distributed import DistributedConfig, DistributedName
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import Init, RunConfig
from agenttrain.config.suggest import did_you_mean
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.required import check_reward_columns
from agenttrain.data.source import TaskSource, check_columns
from agenttrain.engine.base import Engine
from agenttrain.engine.transformers import TransformersEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collect import Collector
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.seeds import derive_seed
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.checkpoint_files import MANIFEST, verify
from agenttrain.training.lora import add_lora, base_of, is_adapted
from agenttrain.training.policy import Policy
from agenttrain.training.sharding import Sharding
from agenttrain.training.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What needs no weights: enough to check a run, and to look at its prompts."""

    tokenizer: Any
    chat: Chat
    toolbox: Toolbox
    environments: Environments
    rubric: Rubric
    certificate: Certificate
    train_tasks: TaskSource
    test_tasks: TaskSource
    data_notes: tuple[str, ...]
    """What to tell of the rows: those left out, those held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a run works with."""

    policy: Policy
    engine: Engine
    collector: Collector


def prepare(config: RunConfig) -> Prepared:
    """Tokenizer, template, tools, rewards and data; raises with the key to change.

    A model that is one of our checkpoints is verified: CheckpointError if it is torn.
    """
    folder = model_folder(config.model.path)
    if (folder / MANIFEST).is_file():
        verify(folder)
    found = certified(config)
    found.certificate.raise_if_refused()
    # What is saved with every checkpoint: whoever serves it shows the model what training did.
    found.tokenizer.chat_template = found.chat.saved_template
    tasks = splits_of(config)
    check_columns(tasks.test, {"eval.group_by": config.eval.group_by})
    _check_eval_tools(config.eval.tools, (*found.toolbox.names, *found.environments.tool_names))
    row_tools = check_rows(found, tasks.by_key)
    rubric = rewards_of(config, found, row_tools)
    check_reward_columns(tasks.train, rubric.columns, "data.train")
    check_reward_columns(tasks.test, rubric.columns, "data.test")
    prompt_lengths(found, tasks.by_key)
    return Prepared(
        tokenizer=found.tokenizer,
        chat=found.chat,
        toolbox=found.toolbox,
        environments=found.environments,
        rubric=rubric,
        certificate=found.certificate,
        train_tasks=tasks.train,
        test_tasks=tasks.test,
        data_notes=tasks.notes,
    )


def _check_eval_tools(names: Sequence[str] | None, declared: Sequence[str]) -> None:
    for name in names or ():
        if name not in declared:
            raise ValueError(
                f"eval.tools={name}: is no tool of this run{did_you_mean(name, declared)}; its "
                f"tools are: {', '.join(declared) or 'none'}"
            )


def seed_all(seed: int) -> None:
    """Seed the generators that anyone's tool, reward or data may draw from."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_policy(config: RunConfig, prepared: Prepared, world: World | None = None) -> Policy:
    """The policy of a run's own algorithm."""
    return make_policy(
        config,
        config.algorithm,
        temperature=config.rollout.temperature,
        reward_weights=prepared.rubric.weights,
        world=world,
    )


def load(config: RunConfig, prepared: Prepared, world: World | None = None) -> Loaded:
    """What the run works with: `load_policy`, and an engine."""
    policy = load_policy(config, prepared, world)
    engine = _engine(config, policy)
    collector = Collector(
        engine=engine,
        chat=prepared.chat,
        toolbox=prepared.toolbox,
        rubric=prepared.rubric,
        limits=config.rollout,
        environments=prepared.environments,
    )
    return Loaded(policy=policy, engine=engine, collector=collector)


def curriculum_of(config: RunConfig, tasks: TaskSource) -> Curriculum | None:
    """What chooses among the training tasks, at its beginning; None: their own order."""
    settings = config.data.curriculum
    return Curriculum(tasks, settings, seed=config.seed) if settings.enabled else None


def make_policy(
    config: RunConfig,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    reward_weights: Mapping[str, float] | None = None,
    world: World | None = None,
) -> Policy:
    """Model and optimizer, with every generator seeded: in each process of `world` differently."""
    world = world or World()
    seed_all(derive_seed(config.seed, world.rank) % 2**32 if world.rank else config.seed)
    model = _model(config)
    if config.model.lora.rank or is_adapted(model):
        add_lora(model, config.model.lora)
    return Policy(
        model,
        algorithm=algorithm,
        optimizer=config.optimizer,
        training=config.training,
        temperature=temperature,
        max_completion_tokens=config.rollout.max_completion_tokens,
        steps=config.steps,
        reward_weights=reward_weights,
        world=world,
        sharding=_sharding(config.distributed),
        sampled=config.engine.name == "transformers",
    )


def _sharding(config: DistributedConfig) -> Sharding | None:
    if config.name is not DistributedName.fsdp2:
        return None
    return Sharding(cpu_offload=config.cpu_offload)


def _model(config: RunConfig) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # bars for each checkpoint would tear up the live display
    folder, dtype = model_folder(config.model.path), getattr(torch, config.model.dtype)
    if config.model.init is Init.random:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _engine(config: RunConfig, policy: Policy) -> Engine:
    if config.engine.name == "transformers":
        return TransformersEngine(policy.sampler, config.engine)
    from agenttrain.engine.vllm import VllmEngine

    lora = config.model.lora
    return VllmEngine(
        base_of(model_folder(config.model.path)),
        config.engine,
        dtype=config.model.dtype,
        adapters=None if config.engine.vllm.merge_adapters or not lora.rank else lora,
        mode=config.weight_sync.mode,
        tokenizer=model_folder(config.model.path) if config.rollout.structured_calls else None,
    )
