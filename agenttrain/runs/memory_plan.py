"""Memory of a run in bytes, part by part and moment by moment: of a GPU, and of a node.

The model's `Sizes` come from its config.json and from traces without weights. With distributed=ddp
every GPU holds everything. fsdp2 divides weights, gradients, optimizer state and reference by the
number of GPUs, of the run or of a node, and gathers one layer at a time. The engine estimates its
own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from agenttrain.algorithms.config import TeacherConfig
from agenttrain.data.config import has_questions
from agenttrain.engines.language_model import language_model
from agenttrain.engines.memory import EVER, EngineLoad, EngineMemory, MemoryItem, When
from agenttrain.engines.registry import spec_of, specs
from agenttrain.launch.config import DistributedName, ShardWithin
from agenttrain.settings.engine_checks import has_rollout_process, run_spec, sends_adapters
from agenttrain.settings.role_checks import server_shares_gpu
from agenttrain.settings.run_config import RunConfig
from agenttrain.settings.sizes import PROMPT_TOKENS, Arithmetic, arithmetic
from agenttrain.training import sharding
from agenttrain.training.config import (
    ActivationCheckpointing,
    Init,
    LoraSettings,
    MixedPrecision,
    ModelConfig,
    Transport,
    VisionTower,
)
from agenttrain.training.footprint import (
    FLOAT32_BYTES,
    LAYER_GRADIENTS,
    RESERVE,
    Activations,
    CachedLayer,
    SavedActivations,
    cached_layers,
    empty_model,
    head_bytes,
    updating,
    weight_bytes,
)
from agenttrain.training.images import freeze_encoders
from agenttrain.training.lora import adapted_experts, adapter_parameters
from agenttrain.training.quantization import nf4_bytes, numbers_of, scale_bytes
from agenttrain.training.recomputation import possible_levels, recomputed_modules
from agenttrain.types import ConfigError
from agenttrain.utils.host_memory import host_memory
from agenttrain.utils.model_path import SIZES, base_folder, model_folder, why_merged

GIB = 2**30
BFLOAT16 = 2
"""Bytes of a bfloat16 number."""
PYTHON_ON_CPU, PYTHON_ON_GPU = GIB // 2, 3 * GIB
"""Bytes of Python and its libraries in the host's memory. On a CPU 0.35 GiB were measured after the
imports. With a GPU the value is assumed, and includes the libraries of CUDA and vLLM."""
GPUS_PER_NODE = 8
"""Processes of a node if `distributed.processes` is not set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedHardware:
    """The hardware that the run is planned for."""

    devices: int = 1
    """GPUs, for a run without `distributed.processes`."""
    memory: int | None = None
    """Bytes of a GPU (`kind` is cuda), or of a node (`cpu`). None: not known, and the plan does not
    say whether the run fits."""
    host: int | None = None
    """Bytes of host memory of a node with GPUs, None if not known. With `kind` cpu always None:
    there `memory` is the host's."""
    kind: str = "cuda"
    """`cuda` or `cpu`, where the tiles of logits are smaller and all is in the host's memory."""
    shared: bool = False
    """The trainer shares the only GPU with a server, or with the rollout process's copy of the
    policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Numbers of processes, rollouts and tokens that are in memory at once.

    Lengths in tokens: `prompt` <= `context` <= `sampled` <= `limit`. Example: prompts of 200,
    completions of at most 1,000 in training and 3,000 in evaluations, and an engine whose context
    is 4,096: 200, 1200, 3200 and 4096.
    """

    arithmetic: Arithmetic
    """Tasks, rollouts and updates of a step and of the run."""
    devices: int
    """Training processes, each with its own GPU."""
    local: int
    """Training processes of a node."""
    prompt: int
    """Tokens of a prompt."""
    context: int
    """Most tokens of one training rollout: prompt and completion, within the engine's context."""
    sampled: int
    """Most tokens of one rollout of training or of an evaluation, which may allow more."""
    limit: int
    """The engine's context: the most tokens that its cache may hold for one rollout."""
    rows: int
    """Rollouts in flight in one engine."""
    in_flight: int
    """Rollouts in flight in the whole run."""
    packed: int
    """Tokens of the largest microbatch; with distributed.context_parallel a process's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """The parts of one process's memory, on its GPU and on its host, and what exceeds them.

    All sizes are in bytes. Without GPUs (`machine.kind` is cpu) all parts are in the node's memory:
    `machine.memory` is then the node's, and `machine.host` is None, so that nothing counts twice.
    """

    parts: tuple[MemoryItem, ...]
    load: Load
    """Tokens, rollouts and processes; `load.local`: training processes of a node."""
    machine: PlannedHardware
    engine: EngineMemory
    """The engine's own estimate; its items are among the parts."""
    level: ActivationCheckpointing
    """Activation checkpointing: that of the settings, or with `auto` the chosen level."""

    def at(self, when: When) -> int:
        """Return the bytes of a GPU at a moment, or without GPUs of a process."""
        return sum(part.bytes for part in self.parts if when in part.when and not part.on_host)

    def host(self, when: When) -> int:
        """Return the bytes of a node's host memory at a moment.

        Each process of the node holds the parts, except those that one process holds `once`.
        """
        on_cpu = self.machine.kind == "cpu"
        return sum(
            part.bytes * (1 if part.once else self.load.local)
            for part in self.parts
            if when in part.when and (on_cpu or part.on_host)
        )

    @property
    def largest(self) -> When:
        """The moment at which a GPU holds most; of equal moments the first of this list."""
        return max(
            (When.rollouts, When.update, When.start, When.sync, When.checkpoint), key=self.at
        )

    @property
    def peak(self) -> int:
        """Bytes of a GPU at its `largest` moment."""
        return self.at(self.largest)

    @property
    def largest_on_host(self) -> When:
        """The moment at which a node's host memory holds most."""
        return max(When, key=self.host)

    @property
    def update_fits(self) -> bool:
        """True if an update fits a GPU, or without GPUs the node; also if the size is not known."""
        on_cpu, limit = self.machine.kind == "cpu", self.machine.memory
        update_bytes = self.host(When.update) if on_cpu else self.at(When.update)
        return limit is None or update_bytes <= limit

    @property
    def over(self) -> int:
        """Bytes beyond a GPU's memory, or without GPUs beyond the node's."""
        limit = self.machine.memory
        on_cpu = self.machine.kind == "cpu"
        needed = self.host(self.largest_on_host) if on_cpu else self.peak
        return 0 if limit is None else max(0, needed - limit)

    @property
    def over_on_host(self) -> int:
        """Bytes beyond the host memory of a node with GPUs; 0 without GPUs."""
        limit = self.machine.host  # None without GPUs: `over` counts the node's memory then
        return 0 if limit is None else max(0, self.host(self.largest_on_host) - limit)

    @property
    def excess(self) -> int:
        """Missing bytes of all memories. 0: the run fits, as far as the memories are known."""
        return self.over + self.over_on_host + (self.engine.room.missing if self.engine.room else 0)


def estimate(
    config: RunConfig,
    sizes: Sizes,
    machine: PlannedHardware,
    prompt_tokens: int,
    *,
    supervised: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of each GPU and of its host.

    With `training.activation_checkpointing=auto` this is the estimate of the first level with which
    an update fits, or of the last one if none of them does. A `supervised` run samples nothing.
    """
    level = config.training.activation_checkpointing
    if level is not ActivationCheckpointing.auto:
        recomputed_modules(sizes.model, level)  # raises ConfigError if the model has none
        return _estimate_at(level, config, sizes, machine, prompt_tokens, supervised)
    for level in possible_levels(sizes.model, compiled=config.training.compile):
        memory = _estimate_at(level, config, sizes, machine, prompt_tokens, supervised)
        if memory.update_fits:
            break
    return memory


def _estimate_at(
    level: ActivationCheckpointing,
    config: RunConfig,
    sizes: Sizes,
    machine: PlannedHardware,
    prompt_tokens: int,
    supervised: bool,
) -> MemoryEstimate:
    """Estimate the memory of training, engine, Python, and a copy of the policy or server beside.

    The activations of `level` are recomputed. A `supervised` run has neither engine nor copy.
    """
    load = _count_load(config, sizes, machine, prompt_tokens)
    if supervised:  # demonstrations fill the microbatches, whatever their lengths
        load = replace(load, packed=config.training.token_budget)
    parts = [
        *_training_parts(config, sizes, machine, load, level),
        *_file_parts(config, sizes, machine, load),
    ]
    on_gpu = machine.kind != "cpu"
    engine_load = EngineLoad(
        rows=load.rows,
        prompt=load.prompt,
        sampled=load.sampled,
        limit=load.limit,
        on_gpu=on_gpu,
        memory=machine.memory,
        # Memory that the engine finds taken: on a CPU by the trainer's weights and Python.
        taken=0 if on_gpu else sizes.held + PYTHON_ON_CPU,
        sharded=config.distributed.name is DistributedName.fsdp2,
        adapters=sends_adapters(config, is_merged=sizes.merges_adapters),
        broadcast=config.weight_sync.transport is Transport.nccl,
        shares_gpu=machine.shared,
    )
    engine = EngineMemory() if supervised else _engine_memory(config, engine_load, sizes)
    parts += engine.items
    # What samples, a server or the copy in the rollout process, has a GPU of its own, unless there
    # is only one (`machine.shared`). Without GPUs the copy is in the node's memory.
    copy_shares_memory = has_policy_copy(config) and not on_gpu
    if not supervised and (machine.shared or copy_shares_memory):
        beside = _sampler_beside(config, sizes, engine_load)
        parts += beside.items
        if run_spec(config).fleet:  # its room and its settings are those of the engine
            engine = replace(engine, room=beside.room, savings=beside.savings)
    parts += _process_parts(on_gpu=on_gpu)
    return MemoryEstimate(
        parts=tuple(parts), load=load, machine=machine, engine=engine, level=level
    )


def _process_parts(*, on_gpu: bool) -> Iterator[MemoryItem]:
    """Yield what a training process takes before it has a model: Python, and a GPU's context."""
    if on_gpu:
        yield MemoryItem(name="reserve", bytes=RESERVE, why="context and workspaces: assumed")
        why = "Python and its libraries: assumed"
        yield MemoryItem(name="process", bytes=PYTHON_ON_GPU, why=why, on_host=True)
    else:
        yield MemoryItem(name="reserve", bytes=PYTHON_ON_CPU, why="Python and its libraries")


def _engine_memory(config: RunConfig, load: EngineLoad, sizes: Sizes) -> EngineMemory:
    """Return the engine's own estimate; raises ConfigError if an engine from outside fails."""
    try:
        return run_spec(config).memory(config.engine, load, sizes)
    except Exception as error:
        if config.engine.name in specs():  # an engine of this package: a bug, not a setting
            raise
        raise ConfigError(
            f"engine._target_={config.engine.name}: its memory() raised {type(error).__name__}: "
            f"{error}"
        ) from error


def level_of(
    config: RunConfig, machine: PlannedHardware, *, supervised: bool
) -> ActivationCheckpointing:
    """Return the level of activation checkpointing with which an update of a run fits a machine.

    It is that of `agenttrain plan` for `auto`. A supervised run has no engine in memory.
    """
    return estimate(
        config, Sizes(config.model), machine, PROMPT_TOKENS, supervised=supervised
    ).level


def device_memory() -> tuple[int | None, str]:
    """Return the bytes of this process's GPU, or of the host without one, and the device's kind.

    The bytes are None if they are not known.
    """
    if not torch.cuda.is_available():
        return host_memory(), "cpu"
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory), "cuda"


def shares_gpu(config: RunConfig) -> bool:
    """Return True if the trainer shares this machine's only GPU with what samples."""
    return sampler_shares_gpu(config, torch.cuda.device_count())


def sampler_shares_gpu(config: RunConfig, gpus: int | None) -> bool:
    """Return True if a server, or the rollout process's copy, has the trainer's GPU.

    It is the only one of the machine's `gpus`; None: their number is not known.
    """
    is_single = config.distributed.name is DistributedName.single
    has_copy = is_single and gpus == 1 and has_policy_copy(config)
    return has_copy or server_shares_gpu(config, gpus)


def check_shared_gpu(config: RunConfig, verb: str) -> None:
    """Raise ConfigError if server and trainer need more than the GPU that they share.

    A run of a `verb` that trains is estimated as `agenttrain plan` does, unless its model cannot
    be. Without a shared GPU nothing is checked.
    """
    if not server_shares_gpu(config, torch.cuda.device_count()):
        return
    total, kind = device_memory()
    assert total is not None, "a GPU's memory is known"
    trainers_share(config, total)  # raises ConfigError
    if verb != "train":
        return
    machine = PlannedHardware(memory=total, kind=kind, shared=True)
    try:
        memory = estimate(config, Sizes(config.model), machine, PROMPT_TOKENS)
    except ConfigError:
        return
    key = f"engine.memory_share={servers_share(config):g}"
    room = memory.engine.room
    if room is not None and room.missing:
        if (cache_mb := getattr(config.engine, "kv_cache_mb", None)) is not None:
            key = f"engine.kv_cache_mb={cache_mb}"  # the share does not count then
        raise ConfigError(
            f"{key}: leaves the server on the trainer's GPU {room.has / GIB:.2f} GiB of keys and "
            f"values, and one sequence of {room.tokens:,} tokens (engine.max_context) needs "
            f"{room.needs / GIB:.2f}; raise it, or lower engine.max_context"
        )
    if memory.over:
        server = sum(part.bytes for part in memory.parts if part.once and not part.on_host)
        raise ConfigError(
            f"{key}: the server takes {server / GIB:.2f} GiB of the trainer's GPU, and with the "
            f"trainer {memory.peak / GIB:.2f} of its {total / GIB:.2f}; lower it, or use a "
            "setting that agenttrain plan names"
        )


def keep_servers_share(config: RunConfig) -> None:
    """Keep this process from allocating the server's share of a GPU that they have together.

    A server that starts again needs its share free. Call it before the process uses the GPU.
    """
    if server_shares_gpu(config, torch.cuda.device_count()):
        total, _ = device_memory()
        assert total is not None, "a GPU's memory is known"
        torch.cuda.set_per_process_memory_fraction(trainers_share(config, total))


def servers_share(config: RunConfig) -> float:
    """Return the share that a server takes of the trainer's GPU."""
    share_of = spec_of(config.engine).trainers_gpu_share
    assert share_of is not None, "see `server_shares_gpu`"
    return share_of(config.engine)


def trainers_share(config: RunConfig, total: int) -> float:
    """Return the share of a GPU of `total` bytes that a server leaves to the trainer's tensors.

    The contexts of both processes, which are in neither share, come off too. Raises ConfigError.
    """
    share = 1 - servers_share(config) - RESERVE / total
    if share <= 0:
        raise ConfigError(
            f"engine.memory_share={servers_share(config):g}: leaves the trainer nothing of the "
            f"GPU's {total / GIB:.2f} GiB, of which contexts take {RESERVE / GIB:.2f}; lower it"
        )
    return share


def has_policy_copy(config: RunConfig) -> bool:
    """Return True if the engine samples in a process of its own with a copy of the weights."""
    spec = run_spec(config)
    samples_apart = spec is not spec_of(config.engine)  # in a rollout process
    return samples_apart and spec.server_memory is not None


def _sampler_beside(config: RunConfig, sizes: Sizes, load: EngineLoad) -> EngineMemory:
    """Estimate a server, or a copy of the policy, on the GPU or node of the trainer.

    A node has one, however many processes train on it: all items are marked `once`.
    """
    spec = run_spec(config)
    assert spec.server_memory is not None
    one_gpu = 1
    memory: EngineMemory = spec.server_memory(config.engine, load, sizes, one_gpu)
    process = "the server" if spec.fleet else "the rollout process"
    items = [
        *memory.items,
        MemoryItem(
            name="its process",
            bytes=PYTHON_ON_GPU if load.on_gpu else PYTHON_ON_CPU,
            why=f"Python and its libraries, of {process}",
            # `on_host` separates a node's two memories, those of host and GPUs. Without GPUs there
            # is one, and no part is marked.
            on_host=load.on_gpu,
        ),
    ]
    if load.on_gpu:
        why = f"context and workspaces of {process}: assumed"
        items.append(MemoryItem(name="its reserve", bytes=RESERVE, why=why))
    return replace(memory, items=tuple(replace(item, once=True) for item in items))


def _count_load(
    config: RunConfig, sizes: Sizes, machine: PlannedHardware, prompt_tokens: int
) -> Load:
    """Return how many processes, rollouts and tokens are in memory at once."""
    counts = arithmetic(config)
    # Tokens
    longest = prompt_tokens + config.rollout.max_completion_tokens
    limit = config.engine.max_context or sizes.max_context or longest
    context = sampled = min(longest, limit)
    if has_questions(config.data, config.eval.questions):
        # Without a limit of its own an evaluation has that of training, which `context` covers.
        longest_evaluated = prompt_tokens + (config.eval.max_completion_tokens or 0)
        sampled = max(context, min(longest_evaluated, limit))
    # Processes
    distributed = config.distributed
    devices, local = 1, 1
    if distributed.name is not DistributedName.single:
        devices = machine.devices
        if distributed.processes is not None:
            devices = distributed.processes * distributed.nodes
        local = distributed.processes or min(devices, GPUS_PER_NODE)
    # Rollouts. An evaluation's greedy rollouts come after its sampled ones, not beside them.
    samples, greedy = config.eval.samples, config.eval.greedy
    in_evaluation = counts.rollouts_per_evaluation * samples // (samples + greedy)
    staleness = config.async_training.max_staleness
    # Beside the groups of this step, those of the next `staleness` steps are sampled ahead.
    in_training = counts.most_tasks_per_step * counts.group_size * (1 + staleness)
    in_flight = max(in_training, in_evaluation)
    rows = config.engine.max_rows
    # In lockstep all rollouts of a step are in flight: rollout.concurrency has no effect.
    if not (spec_of(config.engine).deterministic and config.may_run_in_lockstep):
        rows = min(rows, config.rollout.concurrency)
        if has_rollout_process(config):
            in_flight = min(in_flight, config.rollout.concurrency)
    per_engine = in_flight if has_policy_copy(config) else ceil(in_flight / devices)
    # A microbatch holds one rollout at least, and at most all rollouts of the update. With
    # distributed.context_parallel the processes of a group divide its tokens.
    group = distributed.context_parallel
    per_update = ceil(counts.rollouts_per_update / max(devices // group, 1))
    budget = config.training.token_budget * group
    packed = ceil(min(max(budget, context), per_update * context) / group)
    return Load(
        arithmetic=counts,
        devices=devices,
        local=local,
        prompt=min(prompt_tokens, context),
        context=context,
        sampled=sampled,
        limit=limit,
        rows=min(rows, per_engine),
        in_flight=in_flight,
        packed=packed,
    )


def _training_parts(
    config: RunConfig,
    sizes: Sizes,
    machine: PlannedHardware,
    load: Load,
    level: ActivationCheckpointing,
) -> Iterator[MemoryItem]:
    """Yield the parts that training takes: weights, optimizer, gradients, microbatch, …

    A part without `when` is held for the whole run (EVER), on the GPU unless `on_host`. `load`
    counts processes and tokens, and `level` is that of activation checkpointing.
    """
    distributed = config.distributed
    sharded, on_host = distributed.name is DistributedName.fsdp2, distributed.cpu_offload
    shards = _shards(config, load)  # 1 without fsdp2: each process has all
    divisor_text = f" / {shards}" if sharded else ""  # at the end of reasons
    state = updating(sizes.model, config.optimizer)
    why = f"{sizes.parameters:,} x {config.model.dtype}{divisor_text}"
    if sizes.in_4_bits:
        why += f", {sum(sizes.in_4_bits):,} of them in {config.model.quantization}"
        if sharded:
            why += f", whose scales ({sizes.scales:,} bytes) are whole"
    # The scales of weights in 4 bits are not divided: each process has all of them.
    size = (sizes.held - sizes.scales) // shards + sizes.scales
    yield MemoryItem(name="weights", bytes=size, why=why, on_host=on_host)
    if sizes.in_4_bits:
        yield MemoryItem(
            name="dequantised",
            bytes=max(sizes.in_4_bits) * sizes.itemsize,
            why=f"the largest layer in {config.model.quantization}, while it multiplies",
            when=(When.rollouts, When.update),
        )
    size = (state.moments + state.masters) // shards
    copies = " and float32 copies" if state.masters else ""
    why = f"{config.optimizer.name}: moments{copies}{divisor_text}"
    if config.training.offload_during_rollouts and machine.kind != "cpu":
        # Two parts of one size: on the GPU during updates only, and a copy on the host for the
        # whole run.
        optimizer = MemoryItem(name="optimizer", bytes=size, why=why, when=(When.update,))
        yield optimizer
        why = f"{why}; pinned, and kept during updates"
        yield replace(optimizer, name="offloaded", why=why, when=EVER, on_host=True)
    else:
        yield MemoryItem(name="optimizer", bytes=size, why=why, on_host=on_host)
    yield from _frozen_models(config, sizes, shards, divisor_text)
    # With float32 copies, gradients are summed in float32 beside those of one microbatch;
    # `state.gradients` counts both.
    why = "float32, and a microbatch's" if state.masters else str(config.model.dtype)
    yield MemoryItem(
        name="gradients",
        bytes=state.gradients // shards,
        why=f"{why}{divisor_text}",
        when=(When.update,),
        on_host=on_host,
    )
    if distributed.name is DistributedName.ddp:
        trained = (p for p in sizes.model.parameters() if p.requires_grad)
        yield MemoryItem(
            name="buckets",
            bytes=sum(p.numel() * p.element_size() for p in trained),
            why="gradients once more, for the exchange",
            when=(When.update,),
        )
    if sharded:
        yield from _gathered_parts(config, sizes)
    yield from _microbatch_parts(config, sizes, machine, load, level)


def _frozen_models(
    config: RunConfig, sizes: Sizes, shards: int, divisor_text: str
) -> Iterator[MemoryItem]:
    """Yield the reference and the teacher; `divisor_text` is `` / 8`` with 8 shards, else empty."""
    kl = config.algorithm.kl
    # With new adapters the reference is the base model, which is in memory already.
    if kl is not None and not config.model.lora.rank:
        why = f"algorithm.kl.beta={kl.beta:g}: a copy of the weights{divisor_text}"
        yield MemoryItem(name="reference", bytes=sizes.weights // shards, why=why)
    elif kl is not None and sizes.continues:  # adapters of an earlier training are trained on
        why = f"algorithm.kl.beta={kl.beta:g}: a copy of the loaded adapters"
        size = sum(weight.nbytes for weight in adapter_parameters(sizes.model).values())
        yield MemoryItem(name="reference", bytes=size, why=why, on_host=True)
    teacher = config.algorithm.loaded_teacher
    if teacher is not None:
        yield MemoryItem(
            name="teacher",
            bytes=weight_bytes(_empty_teacher(teacher)) // shards,
            why=f"{teacher.path}, {teacher.dtype}{divisor_text}",
            on_host=config.distributed.cpu_offload,
        )


def _gathered_parts(config: RunConfig, sizes: Sizes) -> Iterator[MemoryItem]:
    """Yield the weights that fsdp2 gathers for a forward pass, a weight sync and a checkpoint.

    Each is in memory beside the process's share of the weights. Sizes are in bytes.
    """
    size, why = _gathered_bytes(sizes.stored), "embeddings, head and two layers, unsharded"
    if config.training.mixed_precision == "bf16" and sizes.itemsize > BFLOAT16:
        size, why = size * BFLOAT16 // sizes.itemsize, f"{why}, in bfloat16"
    teacher = config.algorithm.loaded_teacher
    if teacher is not None:
        # The teacher scores before the policy's forward pass: only the larger one counts.
        teacher_size = _gathered_bytes(_empty_teacher(teacher))
        if teacher_size >= size:
            size, why = teacher_size, "the teacher's embeddings, head and two layers"
    yield MemoryItem(name="gathered", bytes=size, why=why, when=(When.update,))
    # A sync sends the policy's weights to an engine in another process that has a copy of its own.
    if has_rollout_process(config) and run_spec(config).own_weights:
        why = "a layer, gathered to be sent"
        yield MemoryItem(name="layer", bytes=sizes.gathered, why=why, when=(When.sync,))
    why = "one unsharded weight, while it is written"
    yield MemoryItem(name="weight", bytes=sizes.largest_weight, why=why, when=(When.checkpoint,))


def _shards(config: RunConfig, load: Load) -> int:
    """Return the number of processes that share one copy of the weights."""
    if config.distributed.name is not DistributedName.fsdp2:
        return 1
    return load.local if config.distributed.shard_within is ShardWithin.node else load.devices


def _reads_slices(config: RunConfig, model: PreTrainedModel) -> bool:
    """Return True if each process reads only its rows of the weights (`SlicedWeights`)."""
    quantized = getattr(model.config, "quantization_config", None) is not None
    sharded = config.distributed.name is DistributedName.fsdp2
    return sharded and config.model.init is Init.pretrained and not quantized


def _gathered_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of a sharded model's weights that are gathered during a forward pass.

    These are the layer in use, the next layer, and all weights outside the layers.
    """
    layers = [weight_bytes(layer) for layer in sharding.layers(model)]
    return weight_bytes(model) - sum(layers) + 2 * max(layers)


def _empty_teacher(teacher: TeacherConfig) -> PreTrainedModel:
    """Return the teacher on the meta device: its shapes, without its weights."""
    return _make_empty_teacher(teacher.path, teacher.revision, teacher.dtype)


@cache
def _make_empty_teacher(path: str, revision: str | None, dtype: str) -> PreTrainedModel:
    folder = model_folder(path, SIZES, revision=revision, key="algorithm.teacher.path")
    architecture = AutoConfig.from_pretrained(folder)
    return empty_model(architecture, getattr(torch, dtype), LoraSettings())


def _file_parts(
    config: RunConfig, sizes: Sizes, machine: PlannedHardware, load: Load
) -> Iterator[MemoryItem]:
    """Yield the parts that loading and saving take, on the host if there are GPUs."""
    sharded, on_gpu = config.distributed.name is DistributedName.fsdp2, machine.kind != "cpu"
    shards = _shards(config, load)
    # Otherwise a process trains the weights that it loads, and "weights" counts them.
    if sharded or on_gpu or sizes.in_4_bits:
        size, why = _loading_bytes(config, sizes)
        yield MemoryItem(name="loading", bytes=size, why=why, when=(When.start,), on_host=on_gpu)
    in_background = config.checkpoint.in_background
    # A copy that is written in background stays while training goes on.
    when = EVER if in_background else (When.checkpoint,)
    # With fsdp2 each process writes its part, otherwise the first process all: `once` per node.
    # Adapters are small. Whole weights in the memory of a CPU are written from where they are.
    if (sharded or on_gpu or in_background) and not config.model.lora.rank:
        why = "the first process writes all weights"
        if sharded:
            why = "each process writes its part of the weights"
        if in_background:
            why += ", a copy that is written in background"
        yield MemoryItem(
            name="written weights",
            bytes=sizes.weights // shards,
            why=why,
            when=when,
            on_host=on_gpu,
            once=not sharded,
        )
    # A whole optimizer state is written from where it is.
    if sharded or in_background:
        state = updating(sizes.model, config.optimizer)
        why = "the first process: a copy of the optimizer"
        if sharded:
            why = "each process writes a copy of its part of the optimizer"
        if in_background:
            why += ", in background"
        yield MemoryItem(
            name="written state",
            bytes=(state.moments + state.masters) // shards,
            why=why,
            when=when,
            on_host=on_gpu,
            once=not sharded,
        )


def _loading_bytes(config: RunConfig, sizes: Sizes) -> tuple[int, str]:
    """Return the most bytes that a process needs to load the model or the teacher, and why."""
    if _reads_slices(config, sizes.model):
        size, why = sizes.largest_weight, "each process reads its rows, weight by weight"
    else:
        size, why = sizes.weights, "each process loads the whole model"
        # fsdp2 copies the reference before it shards the two. Elsewhere the part "reference" counts
        # this copy. With adapters the reference is the same model without them.
        sharded = config.distributed.name is DistributedName.fsdp2
        if sharded and config.algorithm.kl is not None and not config.model.lora.rank:
            size, why = 2 * size, f"{why}, and copies it as reference"
    if config.algorithm.loaded_teacher is None:
        return size, why
    # The teacher is loaded after the model: only the larger one counts.
    teacher = _empty_teacher(config.algorithm.loaded_teacher)
    if _reads_slices(config, teacher):
        teacher_size = max(p.nbytes for p in teacher.parameters())
        teacher_why = "each process reads its rows of the teacher, weight by weight"
    else:
        teacher_size = weight_bytes(teacher)
        teacher_why = "each process loads the whole teacher"
    if teacher_size > size:
        return teacher_size, teacher_why
    return size, why


KEPT = {
    ActivationCheckpointing.none: "kept for the backward pass",
    ActivationCheckpointing.blocks: "kept, but for those of feed-forward blocks and norms",
    ActivationCheckpointing.all: "inputs of layers",
}
"""Activations that each level keeps, as the plan prints it."""
RECOMPUTED = {ActivationCheckpointing.blocks: "a block", ActivationCheckpointing.all: "a layer"}
"""Name of a recomputed module at each level."""


def _microbatch_parts(
    config: RunConfig,
    sizes: Sizes,
    machine: PlannedHardware,
    load: Load,
    level: ActivationCheckpointing,
) -> Iterator[MemoryItem]:
    """Yield the activations and logits of the largest microbatch.

    If modules are recomputed, an update has two moments: the head's, in which autocast also holds
    its casts of weights, and later the recomputation of a module. Only the larger one counts.
    """
    training, tokens = config.training, f"{load.packed:,} tokens"
    activations = sizes.activations(load.packed, training.mixed_precision, level)
    head = MemoryItem(
        name="head",
        bytes=head_bytes(
            sizes.model,
            load.packed,
            budget_mb=training.logits_budget_mb,
            autocast=training.mixed_precision != "no",
            device=machine.kind,
        ),
        why=f"logits up to {training.logits_budget_mb:,} MiB, tiles, the head's gradient",
        when=(When.update,),
    )
    yield MemoryItem(
        name="activations",
        bytes=activations.kept,
        why=f"{tokens}, {KEPT[level]}",
        when=(When.update,),
    )
    if level is ActivationCheckpointing.none:  # casts are among the activations that are kept
        yield head
        return
    recomputed = MemoryItem(
        name=RECOMPUTED[level],
        # Beside the activations of the module, their gradients: 4/3 of the activations together.
        bytes=round(activations.recomputed * LAYER_GRADIENTS),
        why=f"{tokens}, computed again, and gradients",
        when=(When.update,),
    )
    casts = MemoryItem(
        name="casts",
        bytes=_cast_bytes(config, sizes, level),
        why=f"recomputed weights in {training.mixed_precision}, until the forward pass ends",
        when=(When.update,),
    )
    if recomputed.bytes > head.bytes + casts.bytes:
        yield recomputed
        return
    yield head
    if casts.bytes:
        yield casts


def _cast_bytes(config: RunConfig, sizes: Sizes, level: ActivationCheckpointing) -> int:
    """Return the bytes of the copies in bfloat16 that autocast makes of trained weights.

    The weights are those of the modules that `level` recomputes. Autocast holds the copies until
    the forward pass ends, also where these modules keep no activations: they come on top of weights
    and activations. There are none with FSDP2, which gathers weights in the shorter format.
    """
    is_cast = config.training.mixed_precision is not MixedPrecision.no
    sharded = config.distributed.name is DistributedName.fsdp2
    if not is_cast or sharded or sizes.itemsize <= BFLOAT16:
        return 0
    modules = recomputed_modules(sizes.model, level)
    weights = (weight for module in modules for weight in module.parameters())
    # Vectors, such as a norm's weights, take part in no matrix product, and are not cast.
    matrices = (weight for weight in weights if weight.requires_grad and weight.dim() > 1)
    return BFLOAT16 * sum(matrix.numel() for matrix in matrices)


Value = TypeVar("Value")


MIXED_PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of `training.mixed_precision`, by name."""


class Sizes:
    """A model on the meta device, and its traced sizes. Each is computed once.

    All sizes are of the whole model, before it is sharded, and in bytes unless they count numbers
    or tokens. `weights` are the bytes in `model.dtype`, and `held` those that the trainer stores:
    fewer with `model.quantization`, which packs most weights into 4 bits.

    Raises ConfigError for a model that transformers cannot build from its config.json, or run.
    """

    def __init__(self, config: ModelConfig, key: str = "model.path") -> None:
        """Build the model of `config` on the meta device; errors name the setting `key`."""
        self._setting = f"{key}={config.path}"
        # model.path is a folder of a whole model, or of adapters. Adapters are for a base model in
        # another folder, `base`, and have no config.json themselves.
        base = base_folder(config.path, config.revision, config.base_revision, weights=False)
        needed_parts = SIZES if base is None else ()
        folder = model_folder(config.path, needed_parts, revision=config.revision, key=key)
        whole_model, adapters = (folder, None) if base is None else (base, folder)
        dtype = getattr(torch, config.dtype)
        architecture = self._with_config_error(lambda: AutoConfig.from_pretrained(whole_model))
        self.model: PreTrainedModel = self._with_config_error(
            lambda: empty_model(architecture, dtype, config.lora, adapters)
        )
        """The model with all weights in `model.dtype`."""
        self.stored = self.model
        """The model as the trainer stores it, some of its weights perhaps in 4 bits."""
        self._double = config.double_quantization
        if config.quantization is not None:
            # With `double` set, `empty_model` puts the base into 4 bits.
            self.stored = self._with_config_error(
                lambda: empty_model(architecture, dtype, config.lora, adapters, double=self._double)
            )
        if config.vision is VisionTower.frozen:
            freeze_encoders(self.model)
        self.continues = base is not None
        """Training continues with adapters of an earlier training."""
        has_adapted_experts = bool(adapted_experts(self.model))
        self.merges_adapters = (
            has_adapted_experts
            or bool(base and why_merged(folder))
            or config.quantization is not None
        )
        """Engines get the adapters merged into the weights. vLLM would read some kinds of adapters
        wrongly, and with `model.quantization` add them to other weights than the trainer does."""
        self.in_4_bits = list(numbers_of(self.stored).values())
        """Number of elements of each weight that the trainer stores in 4 bits."""
        # Precision -> function that returns the bytes of a forward pass.
        self._saved = {
            name: SavedActivations(self.model, dtype) for name, dtype in MIXED_PRECISIONS.items()
        }

    @cached_property
    def parameters(self) -> int:
        """Number of all weights. Tied weights count once."""
        return sum(p.numel() for p in self.model.parameters())

    @cached_property
    def weights(self) -> int:
        """Bytes of all weights in the model's format."""
        return weight_bytes(self.model)

    @property
    def held(self) -> int:
        """Bytes of all weights as the trainer stores them, some of them in 4 bits."""
        packed = sum(nf4_bytes(numbers, double=self._double) for numbers in self.in_4_bits)
        return self.weights - sum(self.in_4_bits) * self.itemsize + packed

    @property
    def scales(self) -> int:
        """Bytes of `held` that are not divided over processes: the scales of weights in 4 bits."""
        return sum(scale_bytes(numbers, double=self._double) for numbers in self.in_4_bits)

    @cached_property
    def largest_weight(self) -> int:
        """Bytes of the largest weight: the embedding of a small model."""
        return max(p.numel() * p.element_size() for p in self.model.parameters())

    @cached_property
    def gathered(self) -> int:
        """Bytes of sharded weights that a weight sync gathers at once: a layer, or embeddings."""
        layers = sharding.layers(self.model)
        in_layers = {id(p) for layer in layers for p in layer.parameters()}
        other_sizes = (p.nbytes for p in self.model.parameters() if id(p) not in in_layers)
        return max(*map(weight_bytes, layers), *other_sizes, 0)

    @property
    def itemsize(self) -> int:
        """Bytes of one element of a weight."""
        return self.model.dtype.itemsize

    @property
    def width(self) -> int:
        """Elements of one token's hidden state."""
        size: int = self.model.config.get_text_config().hidden_size
        return size

    @property
    def inner_width(self) -> int:
        """Elements of one token at the widest linear layer of a decoder layer."""
        first_layer = sharding.layers(language_model(self.model))[0]
        linear = (m for m in first_layer.modules() if isinstance(m, nn.Linear))
        return max((max(m.in_features, m.out_features) for m in linear), default=self.width)

    @property
    def vocabulary(self) -> int:
        """Entries of the language-model head."""
        head: Any = self.model.get_output_embeddings()
        size: int = head.weight.shape[0]
        return size

    @property
    def max_context(self) -> int | None:
        """Most tokens of one sequence by the model's config. None: it names no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @cached_property
    def layers(self) -> int:
        """Number of layers of the language model."""
        return len(sharding.layers(language_model(self.model)))

    @cached_property
    def _cache(self) -> list[CachedLayer]:
        return self._with_config_error(lambda: cached_layers(self.model))

    @property
    def token_cache(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(layer.token for layer in self._cache) * self.itemsize

    def key_cache(self, tokens: int) -> int:
        """Bytes of the keys and values of one sequence; a layer with a window holds no more."""
        held = (layer.token * min(tokens, layer.window or tokens) for layer in self._cache)
        return sum(held) * self.itemsize

    @property
    def states(self) -> int:
        """Bytes of the states of one sequence in convolutions and recurrent layers."""
        return sum(
            layer.convolution * self.itemsize + layer.recurrence * FLOAT32_BYTES
            for layer in self._cache
        )

    def activations(
        self, tokens: int, mixed_precision: str, level: ActivationCheckpointing
    ) -> Activations:
        """Bytes of a forward pass over `tokens`, with the activations of `level` recomputed."""
        return self._with_config_error(lambda: self._saved[mixed_precision](tokens, level))

    def _with_config_error(self, make: Callable[[], Value]) -> Value:
        """Return `make()`; raises its error as a ConfigError about the model's setting."""
        try:
            return make()
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            raise ConfigError(
                f"{self._setting}: cannot be planned from its config.json: "
                f"{type(error).__name__}: {first_line}"
            ) from error
