"""RunConfig -> live objects: the one file that knows every class.

`prepare` comes first and needs no weights, so that a tool that cannot be built or a template that
is refused is told before anything expensive starts; `load` adds the model and its engine.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agenttrain.chat.certificate import Certificate
from agenttrain.chat.template import Chat
from agenttrain.check import certified, check_rows, prompt_lengths, rewards_of, splits_of
from agenttrain.config.algorithm import AlgorithmConfig
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import Init, RunConfig
from agenttrain.data.required import check_reward_columns
from agenttrain.data.source import TaskSource, check_columns
from agenttrain.engine.base import Engine
from agenttrain.engine.transformers import TransformersEngine
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collect import Collector
from agenttrain.rollout.environments import Environments
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.checkpoint import MANIFEST, verify
from agenttrain.training.lora import add_lora, base_of, is_adapted
from agenttrain.training.policy import Policy


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


def seed_all(seed: int) -> None:
    """Seed the generators that anyone's tool, reward or data may draw from."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_policy(config: RunConfig, prepared: Prepared) -> Policy:
    """The policy of a run's own algorithm."""
    return make_policy(
        config,
        config.algorithm,
        temperature=config.rollout.temperature,
        reward_weights=prepared.rubric.weights,
    )


def load(config: RunConfig, prepared: Prepared) -> Loaded:
    """What the run works with: `load_policy`, and an engine."""
    policy = load_policy(config, prepared)
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


def make_policy(
    config: RunConfig,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    reward_weights: Mapping[str, float] | None = None,
) -> Policy:
    """Model and optimizer, with every generator seeded."""
    seed_all(config.seed)
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
    )


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
        return TransformersEngine(policy.model, config.engine)
    from agenttrain.engine.vllm import VllmEngine

    lora = config.model.lora
    return VllmEngine(
        base_of(model_folder(config.model.path)),
        config.engine,
        dtype=config.model.dtype,
        adapters=None if config.engine.vllm.merge_adapters or not lora.rank else lora,
        mode=config.weight_sync.mode,
    )
