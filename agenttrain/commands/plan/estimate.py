"""Bytes of a run, part by part, at each of its moments: of a GPU, and of a node's own memory.

The model's `Sizes` are read from its config.json and traced without weights. With distributed=ddp
everything is on every GPU; fsdp2 divides weights, gradients, optimizer state and reference by their
number, and gathers one layer at a time. The engine says itself what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from agenttrain.engines.memory import EngineLoad, EngineMemory, MemoryItem, When
from agenttrain.engines.registry import spec_of
from agenttrain.launch.config import DistributedConfig, DistributedName
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.sizes import Arithmetic, arithmetic
from agenttrain.training import sharding
from agenttrain.training.config import ModelConfig, OptimizerConfig
from agenttrain.training.footprint import (
    LAYER_GRADIENTS,
    Saved,
    Updating,
    cached_shapes,
    empty_model,
    head_bytes,
    updating,
    weight_bytes,
)
from agenttrain.types import ConfigError
from agenttrain.utils.model_path import SIZES, model_folder

GIB = 2**30
BFLOAT16 = 2
"""Bytes of a number in it."""
RESERVE = 3 * GIB // 2
"""Bytes of a GPU for its context, workspaces, and gaps that the allocator cannot fill. Assumed."""
PYTHON_ON_CPU, PYTHON_ON_GPU = GIB // 2, 3 * GIB
"""In the host's memory: Python and its libraries. On a CPU 0.35 GiB as measured after the imports;
beside a GPU assumed, CUDA's libraries and vLLM's included."""
GPUS_PER_NODE = 8
"""Where nobody says how many processes a node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHardware:
    """The hardware that the run is to run on."""

    devices: int = 1
    """GPUs, for a run that does not say how many processes it has."""
    memory: int | None = None
    """Bytes of a GPU, on a CPU of a node; None: not known, so nothing is said of what fits."""
    host: int | None = None
    """Bytes of a node's own memory; None: not known, or `memory` is it."""
    kind: str = "cuda"
    """`cpu` has smaller tiles of logits, and everything in a node's own memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many tokens there are at once, per GPU."""

    arithmetic: Arithmetic
    devices: int
    """Processes, each with a GPU of its own."""
    local: int
    """Processes of a node."""
    prompt: int
    context: int
    """Most tokens of one rollout: prompt and completion, within the engine's context."""
    sampled: int
    """The same for one that the engine holds: an evaluation may let its rollouts grow longer."""
    limit: int
    """The engine's context, to which rows of its cache may grow."""
    rows: int
    """Rollouts in flight."""
    packed: int
    """Tokens of the largest microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The parts of one process's memory, on its GPU and on its host."""

    parts: tuple[MemoryItem, ...]
    load: Load
    machine: PlannedHardware
    engine: EngineMemory
    """The engine's own estimate; its items are among the parts."""

    def at(self, when: When) -> int:
        """Return the bytes of a GPU at a moment; on a CPU of a process."""
        return sum(part.bytes for part in self.parts if when in part.when and not part.on_host)

    def host(self, when: When) -> int:
        """Return the bytes of a node's own memory at a moment."""
        on_cpu = self.machine.kind == "cpu"
        return sum(
            part.bytes * (1 if part.once else self.load.local)
            for part in self.parts
            if when in part.when and (on_cpu or part.on_host)
        )

    @property
    def largest(self) -> When:
        """The moment that takes most of a GPU."""
        return max(
            (When.rollouts, When.update, When.start, When.sync, When.checkpoint), key=self.at
        )

    @property
    def peak(self) -> int:
        """Bytes at that moment."""
        return self.at(self.largest)

    @property
    def largest_on_host(self) -> When:
        """The moment that takes most of a node's own memory."""
        return max(When, key=self.host)

    @property
    def over(self) -> int:
        """Bytes that a GPU does not have, or a node that has no GPU."""
        limit = self.machine.memory
        if self.machine.kind == "cpu":
            return 0 if limit is None else max(0, self.host(self.largest_on_host) - limit)
        return 0 if limit is None else max(0, self.peak - limit)

    @property
    def over_on_host(self) -> int:
        """Bytes that a node with GPUs does not have beside them."""
        limit = self.machine.host
        return 0 if limit is None else max(0, self.host(self.largest_on_host) - limit)

    @property
    def excess(self) -> int:
        """Bytes that are wanting anywhere; 0: nothing that is known speaks against the run."""
        return self.over + self.over_on_host + (self.engine.room.missing if self.engine.room else 0)


def estimate(
    config: RunConfig, sizes: Sizes, machine: PlannedHardware, prompt_tokens: int
) -> MemoryEstimate:
    """Estimate what each GPU and its host hold."""
    load = _load(config, sizes, machine, prompt_tokens)
    parts = [*_training(config, sizes, machine, load), *_files(config, sizes, machine, load)]
    engine = _engine(config, sizes, machine, load)
    parts += engine.items
    if machine.kind == "cpu":
        parts.append(
            MemoryItem(name="reserve", bytes=PYTHON_ON_CPU, why="Python and its libraries")
        )
    else:
        parts.append(
            MemoryItem(name="reserve", bytes=RESERVE, why="context and workspaces: assumed")
        )
        why = "Python and its libraries: assumed"
        parts.append(MemoryItem(name="process", bytes=PYTHON_ON_GPU, why=why, on_host=True))
    return MemoryEstimate(parts=tuple(parts), load=load, machine=machine, engine=engine)


def processes(config: DistributedConfig, machine: PlannedHardware) -> int:
    """Return the number of processes on all nodes."""
    if config.name is DistributedName.single:
        return 1
    return machine.devices if config.processes is None else config.processes * config.nodes


def _load(config: RunConfig, sizes: Sizes, machine: PlannedHardware, prompt_tokens: int) -> Load:
    sums = arithmetic(config)
    wanted = prompt_tokens + config.rollout.max_completion_tokens
    limit = config.engine.max_context or sizes.max_context or wanted
    context = min(wanted, limit)
    evaluated = prompt_tokens + (config.eval.max_completion_tokens or 0)
    longest = max(context, min(evaluated, limit)) if config.eval.questions else context
    distributed = config.distributed
    devices = processes(distributed, machine)
    local = 1
    if distributed.name is not DistributedName.single:
        local = distributed.processes or min(devices, GPUS_PER_NODE)
    # An evaluation's greedy rollouts come after its sampled ones.
    samples, greedy = config.eval.samples, config.eval.greedy
    evaluation = sums.rollouts_per_evaluation * samples // (samples + greedy)
    at_once = max(sums.most_tasks_per_step * sums.group_size, evaluation)
    update = ceil(sums.rollouts_per_update / devices)
    rows = config.engine.max_rows
    in_step = config.rollout.deterministic is not False
    if not (spec_of(config.engine).deterministic and in_step):
        rows = min(rows, config.rollout.concurrency)
    return Load(
        arithmetic=sums,
        devices=devices,
        local=local,
        prompt=min(prompt_tokens, context),
        context=context,
        sampled=longest,
        limit=limit,
        rows=min(rows, ceil(at_once / devices)),
        packed=min(max(config.training.token_budget, context), update * context),
    )


def _training(
    config: RunConfig, sizes: Sizes, machine: PlannedHardware, load: Load
) -> Iterator[MemoryItem]:
    distributed = config.distributed
    sharded, host = distributed.name is DistributedName.fsdp2, distributed.cpu_offload
    by, divided = (load.devices, f" / {load.devices}") if sharded else (1, "")
    updating = sizes.updating(config.optimizer)
    count = f"{sizes.parameters:,} x {config.model.dtype}{divided}"
    yield MemoryItem(name="weights", bytes=sizes.weights // by, why=count, on_host=host)
    state = (updating.moments + updating.masters) // by
    copies = " and float32 copies" if updating.masters else ""
    moments = f"{config.optimizer.name}: moments{copies}{divided}"
    yield MemoryItem(name="optimizer", bytes=state, why=moments, on_host=host)
    if config.algorithm.beta > 0 and not config.model.lora.rank:
        reference = f"algorithm.beta={config.algorithm.beta:g}: a copy of the weights{divided}"
        yield MemoryItem(name="reference", bytes=sizes.weights // by, why=reference)
    yield MemoryItem(
        name="gradients",
        bytes=updating.gradients // by,
        why=("float32, and a microbatch's" if updating.masters else str(config.model.dtype))
        + divided,
        when=(When.update,),
        on_host=host,
    )
    if distributed.name is DistributedName.ddp:
        why = "gradients once more, for the exchange"
        yield MemoryItem(name="buckets", bytes=sizes.trained_bytes, why=why, when=(When.update,))
    if sharded:
        # The layer in use and the next one; what is in no layer stays gathered.
        gathered = sizes.weights - sizes.all_layers + 2 * sizes.largest_layer
        why = "embeddings, head and two layers, whole"
        if config.training.mixed_precision == "bf16" and sizes.itemsize > BFLOAT16:
            gathered, why = gathered * BFLOAT16 // sizes.itemsize, f"{why}, in bfloat16"
        yield MemoryItem(name="gathered", bytes=gathered, why=why, when=(When.update,))
        why = "one weight whole, on its way to the files"
        yield MemoryItem(
            name="weight", bytes=sizes.largest_weight, why=why, when=(When.checkpoint,)
        )
    yield from _microbatch(config, sizes, machine, load)


def _files(
    config: RunConfig, sizes: Sizes, machine: PlannedHardware, load: Load
) -> Iterator[MemoryItem]:
    """Yield the parts of the host's memory that loading and saving take."""
    sharded, on_gpu = config.distributed.name is DistributedName.fsdp2, machine.kind != "cpu"
    copied = sharded and config.algorithm.beta > 0 and not config.model.lora.rank
    if sharded or on_gpu:
        yield MemoryItem(
            name="loading",
            bytes=sizes.weights * (2 if copied else 1),
            why="each process loads the whole model" + ", and copies it as reference" * copied,
            when=(When.start,),
            on_host=on_gpu,
        )
    if (sharded or on_gpu) and not config.model.lora.rank:
        why = "the first process writes the weights whole"
        yield MemoryItem(
            name="written weights",
            bytes=sizes.weights,
            why=why,
            when=(When.checkpoint,),
            on_host=on_gpu,
            once=True,
        )
    if sharded:
        updating = sizes.updating(config.optimizer)
        state = (updating.moments + updating.masters) // load.devices
        why = "each process writes a copy of its part of the optimizer"
        when = (When.checkpoint,)
        yield MemoryItem(name="written state", bytes=state, why=why, when=when, on_host=on_gpu)


def _microbatch(
    config: RunConfig, sizes: Sizes, machine: PlannedHardware, load: Load
) -> Iterator[MemoryItem]:
    training, tokens = config.training, f"{load.packed:,} tokens"
    saved = sizes.saved(load.packed, training.mixed_precision)
    head = head_bytes(
        sizes.model,
        load.packed,
        budget_mb=training.logits_budget_mb,
        autocast=training.mixed_precision != "no",
        device=machine.kind,
    )
    why = f"logits up to {training.logits_budget_mb:,} MiB, tiles, the head's gradient"
    peak = MemoryItem(name="head", bytes=head, why=why, when=(When.update,))
    if training.gradient_checkpointing:
        inputs = sizes.layers * load.packed * sizes.hidden
        yield MemoryItem(
            name="activations", bytes=inputs, why=f"{tokens}: inputs of layers", when=(When.update,)
        )
        # The head's share is gone when the layers are computed again.
        layer = round(saved / sizes.layers * LAYER_GRADIENTS)
        how = f"{tokens}, computed again, and gradients"
        again = MemoryItem(name="a layer", bytes=layer, why=how, when=(When.update,))
        yield max(peak, again, key=lambda part: part.bytes)
    else:
        why = f"{tokens}, kept for the backward pass"
        yield MemoryItem(name="activations", bytes=saved, why=why, when=(When.update,))
        yield peak


def _engine(config: RunConfig, sizes: Sizes, machine: PlannedHardware, load: Load) -> EngineMemory:
    on_gpu = machine.kind != "cpu"
    needed = EngineLoad(
        rows=load.rows,
        prompt=load.prompt,
        sampled=load.sampled,
        limit=load.limit,
        on_gpu=on_gpu,
        memory=machine.memory,
        taken=0 if on_gpu else sizes.weights + PYTHON_ON_CPU,
        sharded=config.distributed.name is DistributedName.fsdp2,
        adapters=config.model.lora.rank > 0,
    )
    return spec_of(config.engine).memory(config.engine, needed, sizes)


AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
Value = TypeVar("Value")


class Sizes:
    """A model without weights, and what was traced with it; equal questions are traced once.

    Raises ConfigError for a model that transformers cannot build from its config.json, or run.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._path = config.path
        folder = model_folder(config.path, SIZES)
        dtype = getattr(torch, config.dtype)
        self.model: PreTrainedModel = self._told(
            lambda: empty_model(AutoConfig.from_pretrained(folder), dtype, config.lora)
        )
        self._saved = {name: Saved(self.model, dtype) for name, dtype in AUTOCAST.items()}

    @cached_property
    def parameters(self) -> int:
        """Numbers of all weights; tied ones count once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def trained_bytes(self) -> int:
        """Bytes of the weights that are trained."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights."""
        return weight_bytes(self.model)

    @cached_property
    def largest_weight(self) -> int:
        """Bytes of the largest weight: the embedding of a small model."""
        return max(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the weights."""
        return self.model.dtype.itemsize

    @property
    def width(self) -> int:
        """Numbers of one token's hidden state."""
        size: int = self.model.config.get_text_config().hidden_size
        return size

    @property
    def inner_width(self) -> int:
        """Numbers of one token in the widest linear layer of a decoder layer."""
        linear = (m for m in sharding.layers(self.model)[0].modules() if isinstance(m, nn.Linear))
        return max((max(m.in_features, m.out_features) for m in linear), default=self.width)

    @property
    def vocabulary(self) -> int:
        """Entries of the language-model head."""
        head: Any = self.model.get_output_embeddings()
        size: int = head.weight.shape[0]
        return size

    @property
    def max_context(self) -> int | None:
        """Tokens of one sequence that the model's config allows, if it says so."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def hidden(self) -> int:
        """Bytes of one token's hidden state."""
        return self.width * self.itemsize

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return len(sharding.layers(self.model))

    @cached_property
    def largest_layer(self) -> int:
        """Bytes of the largest layer's weights."""
        return max(map(weight_bytes, sharding.layers(self.model)))

    @cached_property
    def all_layers(self) -> int:
        """Bytes of the weights of all layers."""
        return sum(map(weight_bytes, sharding.layers(self.model)))

    @cached_property
    def token_cache(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        numbers = self._told(lambda: cached_shapes(self.model))
        return sum(key + value for key, value in numbers) * self.model.dtype.itemsize

    def updating(self, config: OptimizerConfig) -> Updating:
        """Gradients and optimizer state."""
        return updating(self.model, config)

    def saved(self, tokens: int, mixed_precision: str) -> int:
        """Bytes that a forward pass over `tokens` keeps for its backward pass."""
        return self._told(lambda: self._saved[mixed_precision](tokens))

    def _told(self, make: Callable[[], Value]) -> Value:
        try:
            return make()
        except Exception as error:
            first = str(error).partition("\n")[0]
            raise ConfigError(
                f"model.path={self._path}: cannot be planned from its config.json: "
                f"{type(error).__name__}: {first}"
            ) from error
