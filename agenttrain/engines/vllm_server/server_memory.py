"""Memory of the servers' GPUs, and of the trainer's machine, for `agenttrain plan`.

A server is a vLLM with its GPUs to itself, or with a share of the trainer's. Its parts are those of
vLLM in the trainer's process.
"""

from __future__ import annotations

from dataclasses import replace

from agenttrain.engines.broadcast import BUFFER_BYTES
from agenttrain.engines.memory import (
    EVER,
    EngineLoad,
    EngineMemory,
    MemoryItem,
    ModelSizes,
    When,
)
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.vllm_memory import memory as vllm_memory
from agenttrain.engines.vllm_server.config import RoleConfig, VllmServerSettings
from agenttrain.engines.weights_place import VERSIONS


def memory(settings: VllmServerSettings, load: EngineLoad, sizes: ModelSizes) -> EngineMemory:
    """Estimate the memory that weights take in the trainer's process on their way to servers."""
    if load.adapters:
        return EngineMemory()
    if load.broadcast:
        # Two buffers of packed weights, and one of the weights that are being gathered.
        return EngineMemory(items=(_buffer_item(sizes, copies=3),))
    why = f"files of {VERSIONS - 1} versions and one being written, for the servers (/dev/shm)"
    files = MemoryItem(
        name="weight files",
        bytes=VERSIONS * sizes.weights,
        why=why,
        on_host=load.on_gpu,
        once=True,
        # The first sync writes the first version, after the start.
        when=tuple(when for when in When if when is not When.start),
    )
    return EngineMemory(items=(files,))


def server_memory(
    settings: VllmServerSettings, load: EngineLoad, sizes: ModelSizes, gpus: int
) -> EngineMemory:
    """Estimate the memory that a server takes on each of its `gpus`, as of engine=vllm.

    Only the way of the weights differs. They come by files, which `memory` counts with the trainer,
    or by a broadcast, for which a server has buffers.
    """
    keys = settings.server_keys(shares_gpu=load.shares_gpu)
    vllm = VllmSettings(max_context=settings.max_context, tensor_parallel_size=gpus, **keys)
    estimate = vllm_memory(vllm, load, sizes)
    # On the host engine=vllm has copies of new weights for its workers. A server has none.
    items = tuple(item for item in estimate.items if not item.on_host)
    if load.broadcast:
        items += (_buffer_item(sizes, copies=2),)  # two buffers of packed weights
    if not load.shares_gpu:  # its settings save no memory where a trainer runs short
        return replace(estimate, items=items, savings=())
    if settings.kv_cache_mb is not None and load.memory is not None:
        # The cache has a fixed size, but the share is set apart for the server.
        held = sum(item.bytes for item in items if item.when == EVER)
        unused = int(load.memory * vllm.memory_share) - held
        why = f"vLLM starts only if engine.memory_share={vllm.memory_share:g} is free"
        items += (MemoryItem(name="unused share", bytes=max(0, unused), why=why),)
    # A server cannot sleep.
    savings = tuple(saving for saving in estimate.savings if saving[0] != "sleep")
    return replace(estimate, items=items, savings=savings)


def role_memory(role: RoleConfig, load: EngineLoad, sizes: ModelSizes, gpus: int) -> EngineMemory:
    """Estimate the memory that a role's server takes on each of its `gpus`."""
    settings = VllmServerSettings(max_context=role.max_context, **role.server_keys())
    estimate = server_memory(settings, load, sizes, gpus)
    # Its weights are frozen: there are no weight syncs.
    items = tuple(item for item in estimate.items if item.when != (When.sync,))
    return replace(estimate, items=items)


def _buffer_item(sizes: ModelSizes, copies: int) -> MemoryItem:
    """Return a broadcast's buffers, `copies` of them. Each holds at least the largest weight."""
    return MemoryItem(
        name="broadcast buffers",
        bytes=copies * max(BUFFER_BYTES, sizes.largest_weight),
        why="packed weights on their way: by vLLM's source, never measured",
        when=(When.sync,),
    )
