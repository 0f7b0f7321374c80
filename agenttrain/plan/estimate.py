"""Bytes per GPU of a run, part by part, and at its largest moment.

With distributed=ddp everything is on every GPU; fsdp2 divides weights, gradients, optimizer state
and reference by their number, and gathers one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from agenttrain.config.arithmetic import Arithmetic, arithmetic
from agenttrain.config.distributed import DistributedConfig, DistributedName
from agenttrain.config.schema import RunConfig
from agenttrain.engine.cache import final_capacity
from agenttrain.plan.sizes import Sizes
from agenttrain.training.footprint import LAYER_GRADIENTS, head_bytes

GIB = 2**30
RESERVE = 3 * GIB // 2
"""Of a GPU: its context, libraries' workspaces, what the allocator cannot fill. Assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the run is to run on."""

    devices: int = 1
    """GPUs, for a run that does not say how many processes it has."""
    memory: int | None = None
    """Bytes of a GPU; None: not known, so nothing is said of what fits."""
    kind: str = "cuda"
    """`cpu` has smaller tiles of logits, and nothing in reserve."""


class When(StrEnum):
    """When a part is there."""

    always = "always"
    rollouts = "rollouts"
    update = "update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that takes memory."""

    name: str
    bytes: int
    why: str
    """What it is made of."""
    when: When = When.always
    on_host: bool = False
    """It is in the host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How many tokens there are at once, per GPU."""

    arithmetic: Arithmetic
    devices: int
    """Processes, each with a GPU of its own."""
    prompt: int
    context: int
    """Most tokens of one rollout: prompt and completion, within the engine's context."""
    sampled: int
    """As many of one that the engine holds: an evaluation may let its rollouts grow longer."""
    limit: int
    """The engine's context, to which rows of its cache may grow."""
    rows: int
    """Rollouts in flight."""
    packed: int
    """Tokens of the largest microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The parts of one GPU's memory."""

    parts: tuple[Part, ...]
    load: Load

    def at(self, when: When) -> int:
        """Bytes at a moment."""
        return sum(
            part.bytes
            for part in self.parts
            if part.when in (When.always, when) and not part.on_host
        )

    @property
    def largest(self) -> When:
        """The moment that takes most."""
        return max((When.rollouts, When.update), key=self.at)

    @property
    def peak(self) -> int:
        """Bytes at that moment."""
        return self.at(self.largest)


def estimate(config: RunConfig, sizes: Sizes, machine: Machine, prompt_tokens: int) -> Estimate:
    """What each GPU holds."""
    load = _load(config, sizes, machine, prompt_tokens)
    parts = [*_training(config, sizes, machine, load)]
    engine = _vllm if config.engine.name == "vllm" else _transformers
    parts += engine(config, sizes, machine, load)
    if machine.kind != "cpu":
        parts.append(Part(name="reserve", bytes=RESERVE, why="context and workspaces: assumed"))
    return Estimate(parts=tuple(parts), load=load)


def processes(config: DistributedConfig, machine: Machine) -> int:
    """Of all nodes."""
    if config.name is DistributedName.single:
        return 1
    return machine.devices if config.processes is None else config.processes * config.nodes


def _load(config: RunConfig, sizes: Sizes, machine: Machine, prompt_tokens: int) -> Load:
    sums = arithmetic(config)
    wanted = prompt_tokens + config.rollout.max_completion_tokens
    limit = config.engine.max_context or sizes.max_context or wanted
    context = min(wanted, limit)
    evaluated = prompt_tokens + (config.eval.max_completion_tokens or 0)
    longest = max(context, min(evaluated, limit)) if config.eval.questions else context
    devices = processes(config.distributed, machine)
    # An evaluation's greedy rollouts come after its sampled ones.
    samples, greedy = config.eval.samples, config.eval.greedy
    evaluation = sums.rollouts_per_evaluation * samples // (samples + greedy)
    at_once = max(sums.most_tasks_per_step * sums.group_size, evaluation)
    update = ceil(sums.rollouts_per_update / devices)
    return Load(
        arithmetic=sums,
        devices=devices,
        prompt=min(prompt_tokens, context),
        context=context,
        sampled=longest,
        limit=limit,
        rows=min(_most_rows(config), ceil(at_once / devices)),
        packed=min(max(config.training.token_budget, context), update * context),
    )


def _most_rows(config: RunConfig) -> int:
    """Sequences that an engine may hold at once."""
    rollout, rows = config.rollout, config.engine.max_rows
    in_step = config.engine.name == "transformers" and rollout.deterministic is not False
    return rows if in_step else min(rows, rollout.concurrency)


def _training(config: RunConfig, sizes: Sizes, machine: Machine, load: Load) -> Iterator[Part]:
    distributed = config.distributed
    sharded, host = distributed.name is DistributedName.fsdp2, distributed.cpu_offload
    by, whole = (load.devices, f" / {load.devices}") if sharded else (1, "")
    updating = sizes.updating(config.optimizer)
    count = f"{sizes.parameters:,} x {config.model.dtype}{whole}"
    yield Part(name="weights", bytes=sizes.weights // by, why=count, on_host=host)
    state = (updating.moments + updating.masters) // by
    copies = " and float32 copies" if updating.masters else ""
    moments = f"{config.optimizer.name}: moments{copies}{whole}"
    yield Part(name="optimizer", bytes=state, why=moments, on_host=host)
    if config.algorithm.beta > 0 and not config.model.lora.rank:
        reference = f"algorithm.beta={config.algorithm.beta:g}: a copy of the weights{whole}"
        yield Part(name="reference", bytes=sizes.weights // by, why=reference)
    yield Part(
        name="gradients",
        bytes=updating.gradients // by,
        why=("float32, and a microbatch's" if updating.masters else str(config.model.dtype))
        + whole,
        when=When.update,
        on_host=host,
    )
    yield from _communication(distributed.name, sizes)
    yield from _microbatch(config, sizes, machine, load)


def _communication(name: DistributedName, sizes: Sizes) -> Iterator[Part]:
    if name is DistributedName.ddp:
        why = "gradients once more, for the exchange"
        yield Part(name="buckets", bytes=sizes.trained_bytes, why=why, when=When.update)
    if name is DistributedName.fsdp2:
        # The layer in use and the next one; what is in no layer stays gathered.
        gathered = sizes.weights - sizes.all_layers + 2 * sizes.largest_layer
        why = "embeddings, head and two layers, whole"
        yield Part(name="gathered", bytes=gathered, why=why, when=When.update)


def _microbatch(config: RunConfig, sizes: Sizes, machine: Machine, load: Load) -> Iterator[Part]:
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
    peak = Part(name="head", bytes=head, why=why, when=When.update)
    if training.gradient_checkpointing:
        inputs = sizes.layers * load.packed * sizes.hidden
        yield Part(
            name="activations", bytes=inputs, why=f"{tokens}: inputs of layers", when=When.update
        )
        # The head's share is gone when the layers are computed again.
        layer = round(saved / sizes.layers * LAYER_GRADIENTS)
        how = f"{tokens}, computed again, and gradients"
        again = Part(name="a layer", bytes=layer, why=how, when=When.update)
        yield max(peak, again, key=lambda part: part.bytes)
    else:
        why = f"{tokens}, kept for the backward pass"
        yield Part(name="activations", bytes=saved, why=why, when=When.update)
        yield peak


def _transformers(config: RunConfig, sizes: Sizes, machine: Machine, load: Load) -> Iterator[Part]:
    if config.distributed.name is DistributedName.fsdp2:
        why = "engine=transformers samples from weights that are whole"
        yield Part(name="engine's weights", bytes=sizes.weights, why=why)
    tokens = final_capacity(load.prompt, load.sampled, load.limit)
    grown = f", in rows that grew to {tokens:,}" if tokens > load.sampled else ""
    yield Part(
        name="keys and values",
        bytes=(load.rows * tokens + 1) * sizes.token_cache,  # one slot takes the padding
        why=f"{load.rows:,} rollouts of {load.sampled:,} tokens{grown}, "
        f"{sizes.token_cache:,} bytes each",
    )


def _vllm(config: RunConfig, sizes: Sizes, machine: Machine, load: Load) -> Iterator[Part]:
    settings = config.engine.vllm
    when = When.rollouts if settings.sleep else When.always
    by = settings.tensor_parallel_size
    weights = sizes.weights // by
    yield Part(name="engine's weights", bytes=weights, why="vLLM has its own", when=when)
    wanted = load.rows * load.sampled * sizes.token_cache // by
    if settings.kv_cache_mb is not None:
        cache, why = settings.kv_cache_mb * 2**20, "engine.vllm.kv_cache_mb"
    elif machine.memory is not None:
        cache = max(0, int(machine.memory * settings.memory_share) - weights)
        why = f"what engine.vllm.memory_share={settings.memory_share:g} leaves"
    else:
        cache, why = wanted, f"{load.rows:,} rollouts of {load.sampled:,} tokens"
    holds = cache * by // (load.sampled * sizes.token_cache)
    if holds < load.rows:
        why += f"; holds {holds:,} of {load.rows:,} rollouts of {load.sampled:,} tokens"
    yield Part(name="keys and values", bytes=cache, why=why, when=when)
