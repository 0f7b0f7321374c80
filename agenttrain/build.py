"""RunConfig -> live objects: the one file that knows every class.

`prepare` comes first and needs no weights, so that a tool that cannot be built or a template that
is refused is told before anything expensive starts; `load` adds the model and its engine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.chat.certificate import Certificate
from agenttrain.chat.response_export import response_template
from agenttrain.chat.template import Chat
from agenttrain.check import (
    Certified,
    certified,
    check_room,
    check_rows,
    prompt_lengths,
    rewards_of,
    splits_of,
)
from agenttrain.config.algorithm import AlgorithmConfig
from agenttrain.config.distributed import DistributedConfig, DistributedName
from agenttrain.config.engine_checks import float32_on_gpu
from agenttrain.config.model_path import model_folder
from agenttrain.config.schema import Init, ModelConfig, RunConfig
from agenttrain.config.suggest import did_you_mean
from agenttrain.data.curriculum import Curriculum
from agenttrain.data.required import check_reward_columns
from agenttrain.data.source import TaskSource, check_columns
from agenttrain.engine.base import Engine
from agenttrain.engine.decoder import refuse_unknown_caches
from agenttrain.engine.transformers import TransformersEngine, max_context
from agenttrain.rewards.rubric import Rubric
from agenttrain.rollout.collect import Collector
from agenttrain.rollout.environments import Environments
from agenttrain.rollout.row_tools import RowTools
from agenttrain.rollout.seeds import derive_seed
from agenttrain.tools.toolbox import Toolbox
from agenttrain.training.checkpoint_files import MANIFEST, only_tensors, verify
from agenttrain.training.logprobs import checkpoint_layers
from agenttrain.training.lora import add_lora, base_of, is_adapted
from agenttrain.training.optimizers import build_optimizer
from agenttrain.training.policy import Policy
from agenttrain.training.random_states import random_states, set_random_states
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
    lengths: dict[str, list[int]]
    """Tokens of the first prompts, by the key of their rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a run works with."""

    policy: Policy
    engine: Engine
    collector: Collector


def prepare(config: RunConfig, *, training: bool = True) -> Prepared:
    """Tokenizer, template, tools, rewards and data; raises with the key to change.

    A model that is one of our checkpoints is verified: CheckpointError if it is torn. `training`:
    the training rows are sampled from too.
    """
    verify_model(config)
    found = certified(config)
    found.certificate.raise_if_refused()
    return complete(config, found, training=training)


def verify_model(config: RunConfig) -> None:
    """Raise CheckpointError for a model that is a torn checkpoint of ours."""
    folder = model_folder(config.model.path)
    if (folder / MANIFEST).is_file():
        verify(folder)


def complete(config: RunConfig, found: Certified, *, training: bool = True) -> Prepared:
    """`prepare` from a certificate that passed; `agenttrain check` goes through it too."""
    check_model(config)
    # What is saved with every checkpoint: whoever serves it shows the model what training did.
    found.tokenizer.chat_template = found.chat.saved_template
    found.tokenizer.response_template = response_template(found.chat)
    tasks = splits_of(config)
    if len(tasks.test):
        check_columns(tasks.test, {"eval.group_by": config.eval.group_by})
    _check_eval_tools(config.eval.tools, (*found.toolbox.names, *found.environments.tool_names))
    row_tools = check_rows(found, tasks.by_key)
    rubric = rewards_of(config, found, row_tools)
    lengths = prompt_lengths(found, tasks.by_key)
    check_room(config, found, tasks, lengths, training=training)
    for key, source in tasks.by_key.items():
        check_reward_columns(source, rubric.columns, key)
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
        lengths=lengths,
    )


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
    if sampled and config.engine.name == "transformers":
        max_context(model, config.engine)
        refuse_unknown_caches(model)
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


def load(
    config: RunConfig,
    prepared: Prepared,
    world: World | None = None,
    folder: Path | None = None,
) -> Loaded:
    """What the run works with: `load_policy`, and an engine, whose log goes to the run's folder."""
    policy = load_policy(config, prepared, world)
    engine = _engine(config, policy, folder)
    collector = Collector(
        engine=engine,
        chat=prepared.chat,
        toolbox=prepared.toolbox,
        rubric=prepared.rubric,
        limits=config.rollout,
        environments=prepared.environments,
    )
    return Loaded(policy=policy, engine=engine, collector=collector)


def first_prompt(prepared: Prepared) -> list[int]:
    """The ids of the first task's prompt; where an environment gives it, those that end a turn."""
    sources = (source for source in (prepared.train_tasks, prepared.test_tasks) if len(source))
    for task in (task for source in sources for task in source.tasks(0, 1)):
        if task.messages:
            tools = RowTools(task, prepared.toolbox, prepared.environments)
            return prepared.chat.prompt_ids(task.messages, tools.schemas)
    return list(prepared.chat.stop_token_ids[:1])


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
        sharding=_sharding(config.distributed),
        sampled=config.engine.name == "transformers",
    )
    note = float32_on_gpu(config) if policy.accelerator.device.type == "cuda" else None
    if note and world.is_main:
        print(note, flush=True)
    return policy


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
    with only_tensors(folder):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def _engine(config: RunConfig, policy: Policy, folder: Path | None) -> Engine:
    world = policy.world
    if config.engine.name == "transformers":
        return TransformersEngine(policy.sampler, config.engine)
    from agenttrain.engine.vllm import VllmEngine

    lora = config.model.lora
    log = folder and folder / ("vllm.log" if world.is_main else f"logs/vllm-{world.rank}.log")
    if world.is_main:
        print(_starting(policy, config, log), flush=True)
    # vLLM seeds the generators of the process: tools and rewards would draw the same on all ranks.
    states = random_states()
    engine = VllmEngine(
        base_of(model_folder(config.model.path)),
        config.engine,
        dtype=config.model.dtype,
        adapters=None if config.engine.vllm.merge_adapters or not lora.rank else lora,
        mode=config.weight_sync.mode,
        tokenizer=model_folder(config.model.path) if config.rollout.structured_calls else None,
        seed=config.seed,
        log=log,
    )
    set_random_states(states)
    return engine


def _starting(policy: Policy, config: RunConfig, log: Path | None) -> str:
    """What to expect of vLLM's start, which shows nothing itself."""
    compiles = policy.accelerator.device.type == "cuda" and not config.engine.vllm.enforce_eager
    what = (
        "compiling, and capturing CUDA graphs: minutes the first time on a machine"
        if compiles
        else "vLLM starts"
    )
    return f"engine: {what}{f' (log: {log})' if log else ''}"
