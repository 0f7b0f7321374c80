"""Memory of vLLM, for `agenttrain plan`.

vLLM takes all of its share of a GPU: weights, what its own forward passes need, and the remainder
for keys and values. It does not start if that remainder is less than one sequence of
engine.max_context.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from agenttrain.engines.config import EngineDtype
from agenttrain.engines.memory import (
    AWAKE,
    EVER,
    EngineLoad,
    EngineMemory,
    MemoryItem,
    ModelSizes,
    Room,
    Saving,
    When,
    shorter_context,
)
from agenttrain.engines.vllm.config import VllmSettings

GIB = 2**30
BFLOAT16 = 2
"""Bytes of a number in this format."""
FLOAT32 = 4
ITEMSIZES = {EngineDtype.bfloat16: 2, EngineDtype.float16: 2, EngineDtype.float32: 4}
GRAPHS, WORKSPACES = GIB, GIB // 2
"""Bytes of CUDA graphs and of workspaces on a GPU, which stay while vLLM sleeps. Assumed.
FlashInfer's workspace alone is 394 MiB (VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE of vLLM 0.32)."""
BATCHED_TOKENS = 2048
"""Tokens of the forward pass with which vLLM measures its own peak: the default of an `LLMEngine`
(SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS of vLLM 0.32)."""
BATCHED_ON_CPU = 8192
"""The least number of such tokens on a CPU: `setup.py`."""
HIDDEN_STATES, INNER_STATES, LOGITS = 4, 3, 3
"""Tensors that are alive at vLLM's peak. Estimated. For each token of the pass: hidden states, and
states as wide as an MLP's inner layer. For each row: logits in float32 and sampling's copies."""
SYNCED = 3
"""Copies of the largest weight while an engine gets new ones: as gathered, in the engine's number
format, and in the layout of its kernels."""


def memory(settings: VllmSettings, load: EngineLoad, sizes: ModelSizes) -> EngineMemory:
    """Estimate the parts of vLLM's memory, in bytes per GPU, and its room for the KV cache."""
    on_gpu = load.on_gpu
    when = AWAKE if settings.sleep else EVER
    gpus = settings.tensor_parallel_size
    if settings.dtype is EngineDtype.auto:
        itemsize = BFLOAT16 if on_gpu else sizes.itemsize
    else:
        itemsize = ITEMSIZES[settings.dtype]
    # `sizes` are in the policy's number format, which may be another than the engine's.
    weights = sizes.weights * itemsize // sizes.itemsize // gpus
    token_cache = sizes.token_cache * itemsize // sizes.itemsize
    # vLLM measures its peak in a pass of this many tokens, at least one per row.
    batch = BATCHED_TOKENS if on_gpu else max(BATCHED_ON_CPU, load.limit)
    batch = max(batch, settings.max_rows)
    states = batch * (HIDDEN_STATES * sizes.width + INNER_STATES * sizes.inner_width) * itemsize
    logits = settings.max_rows * sizes.vocabulary * FLOAT32 * LOGITS
    passes = (states + logits) // gpus
    graphs = 0
    if on_gpu:
        graphs = WORKSPACES if settings.enforce_eager else WORKSPACES + GRAPHS
    cache_bytes, cache_why = _kv_cache(settings, load, token_cache, weights + passes + graphs)
    items = [
        MemoryItem(name="engine's weights", bytes=weights, why="vLLM has its own", when=when),
        MemoryItem(
            name="engine's passes",
            bytes=passes,
            why=f"vLLM's own peak with {batch:,} tokens and {settings.max_rows:,} rows: estimated",
            when=when,
        ),
        MemoryItem(
            name="keys and values",
            bytes=max(0, cache_bytes),
            why=cache_why,
            # A sleeping vLLM frees its KV cache, and allocates it last, after a sync.
            when=(When.start, When.rollouts, When.checkpoint) if settings.sleep else EVER,
        ),
    ]
    if graphs:
        parts = "workspaces" if settings.enforce_eager else "CUDA graphs and workspaces"
        why = f"{parts}, asleep too: assumed"
        items.append(MemoryItem(name="engine's graphs", bytes=graphs, why=why))
    items += _sync_items(settings, load, sizes, itemsize=itemsize, weights=weights)
    least_bytes = _bytes_per_gpu(settings, load.limit, token_cache)
    room = Room(has=cache_bytes, needs=least_bytes, tokens=load.limit)
    return EngineMemory(items=tuple(items), room=room, savings=_savings(settings, load, room))


def _bytes_per_gpu(settings: VllmSettings, tokens: int, token_cache: int) -> int:
    """Return one GPU's bytes of the KV cache of `tokens` tokens, of `token_cache` bytes each."""
    return tokens * token_cache // settings.tensor_parallel_size


def _kv_cache(
    settings: VllmSettings, load: EngineLoad, token_cache: int, other_bytes: int
) -> tuple[int, str]:
    """Return the bytes of the KV cache on one GPU, and where their number comes from.

    `token_cache` are the bytes of one token on all GPUs together. `other_bytes` are those that vLLM
    takes on a GPU beside the cache. The result may be below 0: `other_bytes` exceed vLLM's share.

    Of `load`, `memory` are the bytes of a GPU, or of the node without GPUs, of which the process
    has `taken` some before. `rows` rollouts of `sampled` tokens are in flight, and a sequence has
    at most `limit` tokens.
    """
    if settings.kv_cache_mb is not None:
        cache_bytes, why = settings.kv_cache_mb * 2**20, "engine.kv_cache_mb"
    elif load.memory is not None:
        cache_bytes = int(load.memory * settings.memory_share) - other_bytes
        if not load.on_gpu:  # vLLM for CPUs counts the process's memory so far in its share
            cache_bytes -= load.taken
        why = f"what engine.memory_share={settings.memory_share:g} leaves"
    else:  # the GPU is not known: all rollouts in flight, or the least with which vLLM starts
        tokens = max(load.rows * load.sampled, load.limit)
        cache_bytes = _bytes_per_gpu(settings, tokens, token_cache)
        why = f"{load.rows:,} rollouts of {load.sampled:,} tokens"
    all_gpus_bytes = max(0, cache_bytes) * settings.tensor_parallel_size
    cached_rollouts = all_gpus_bytes // (load.sampled * token_cache)
    if cached_rollouts < load.rows:
        why += f"; holds {cached_rollouts:,} of {load.rows:,} rollouts of {load.sampled:,} tokens"
    return cache_bytes, why


def _sync_items(
    settings: VllmSettings, load: EngineLoad, sizes: ModelSizes, *, itemsize: int, weights: int
) -> Iterator[MemoryItem]:
    """Yield the memory of a weight sync.

    `weights` are the bytes of one GPU's part of the weights, and `itemsize` those of a number in
    the engine's format. `sizes` are in the policy's format.
    """
    gpus = settings.tensor_parallel_size
    only_adapters = load.adapters and not settings.merge_adapters
    # An engine that sleeps drops its base weights, and gets them again with the adapters.
    if not only_adapters or settings.sleep:
        # Weights come one by one, and each is there in several copies: `SYNCED`.
        synced, why = SYNCED * sizes.largest_weight, "the largest weight: gathered, cast"
        if load.sharded:  # a whole layer is gathered at once, not the largest weight alone
            synced += sizes.gathered - sizes.largest_weight
            why = "a layer, gathered, and its largest weight, cast"
        synced = synced * itemsize // sizes.itemsize
        why += ", and as vLLM lays it out"
        yield MemoryItem(name="sync", bytes=synced, why=why, when=(When.sync,))
    if gpus > 1:  # workers are processes, to which weights go through a file in memory
        yield MemoryItem(
            name="sent weights",
            bytes=2 * weights * gpus,
            why="a copy, and one in /dev/shm for the engine's workers",
            when=(When.sync,),
            on_host=load.on_gpu,
            once=True,
        )


def _savings(settings: VllmSettings, load: EngineLoad, room: Room) -> tuple[Saving, ...]:
    """Return settings to try if memory is short, each with its values, the mildest first.

    Either a process takes too much, or vLLM's share is too small to start (`room.missing` bytes).
    Sleep and a shorter context help in both cases: sleep lets the engine have a larger share. The
    size of the share or cache is lowered in the first case, and raised in the second.
    """
    sleep: tuple[Saving, ...] = ()
    if load.on_gpu and not settings.sleep:  # vLLM cannot sleep on a CPU
        sleep = (("sleep", [True]),)
    cache: tuple[Saving, ...] = ()
    share = settings.memory_share
    if settings.kv_cache_mb is None:
        higher = [v for v in (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9) if v > share]
        lower = [value for value in (0.4, 0.3, 0.2, 0.1) if value < share]
        cache = (("memory_share", higher if room.missing else lower),)
    elif room.missing:
        cache = (("kv_cache_mb", [ceil(room.needs / 2**20)]),)
    return (*sleep, *shorter_context(settings.max_context, load), *cache)
