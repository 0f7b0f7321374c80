"""engine=transformers: sampling in this process, from the policy's own weights."""

from __future__ import annotations

from typing import Any

from agenttrain.engines.base import Engine
from agenttrain.engines.memory import (
    EngineLoad,
    EngineMemory,
    MemoryItem,
    ModelSizes,
    When,
    shorter_context,
)
from agenttrain.engines.spec import EngineInputs, EngineSpec
from agenttrain.engines.transformers.config import TransformersSettings

FEWEST_ROWS = 8
"""Smallest engine.max_rows that `plan` proposes."""


def build(settings: TransformersSettings, inputs: EngineInputs) -> Engine:
    """Build the engine on the policy's module."""
    from agenttrain.engines.transformers.engine import TransformersEngine

    return TransformersEngine(
        inputs.policy, settings, inputs.vision, inputs.mixed_precision, inputs.record_routes
    )


def build_apart(settings: TransformersSettings, inputs: EngineInputs) -> Engine:
    """Build the engine on a copy of the model, whose weights come with the first update."""
    from agenttrain.engines.transformers.apart import build_copy

    return build_copy(settings, inputs)


def check_model(settings: TransformersSettings, model: Any) -> None:
    """Raise EngineError for too long a context, and for a model with another cache."""
    from agenttrain.engines.transformers.decoder import known_kinds
    from agenttrain.engines.transformers.engine import max_context

    max_context(model, settings)
    known_kinds(model)


def memory(settings: TransformersSettings, load: EngineLoad, sizes: ModelSizes) -> EngineMemory:
    """Estimate the bytes of the cache's rows, and name settings that need fewer.

    The engine samples from the policy's module. If the policy is sharded it has whole weights of
    its own, and a weight sync gathers them layer by layer.
    """
    items = []
    if load.sharded:
        items.append(
            MemoryItem(
                name="layer",
                bytes=sizes.gathered,
                why="a layer whole, for the engine's copy",
                when=(When.sync,),
            )
        )
        why = "engine=transformers samples from weights that are whole"
        items.append(MemoryItem(name="engine's weights", bytes=sizes.held, why=why))
    items += _cache_items(load, sizes)
    # Savings are settings to try if the memory is too small: here half as many rows, and so on.
    rows = min(settings.max_rows, load.rows)
    fewer_rows = []
    while rows // 2 >= FEWEST_ROWS:
        rows //= 2
        fewer_rows.append(rows)
    savings = (*shorter_context(settings.max_context, load), ("max_rows", fewer_rows))
    return EngineMemory(items=tuple(items), savings=savings)


def copy_memory(
    settings: TransformersSettings, load: EngineLoad, sizes: ModelSizes, gpus: int
) -> EngineMemory:
    """Estimate the memory of the rollout process, which has a copy of the policy.

    `gpus` is not used: the copy is on one GPU, or on the CPU. With a GPU, new weights are read into
    the host's memory first.
    """
    copy = MemoryItem(
        name="engine's weights",
        bytes=sizes.weights,
        why="the rollout process has a copy of the policy",
    )
    new_weights = MemoryItem(
        name="new weights",
        bytes=sizes.weights,
        why="new weights, read whole from their files before they are loaded",
        when=(When.sync,),
        on_host=load.on_gpu,
    )
    return EngineMemory(items=(copy, *_cache_items(load, sizes), new_weights))


def _cache_items(load: EngineLoad, sizes: ModelSizes) -> list[MemoryItem]:
    """Return the memory of the rows with all rollouts at their longest.

    `load.prompt` and `load.sampled` are tokens: of a prompt, and of the longest sequence, prompt
    and completion. `load.rows` is the number of rollouts in flight.
    """
    from agenttrain.engines.transformers.cache import final_capacity

    # Rows grow in large steps: in the end they may have room for more than the longest sequence.
    capacity = final_capacity(load.prompt, load.sampled, load.limit)
    growth = f", in rows that grew to {capacity:,}" if capacity > load.sampled else ""
    row_bytes = sizes.key_cache(capacity)
    # A row is smaller than that if some layers keep only the tokens of a window.
    is_windowed = row_bytes < capacity * sizes.token_cache
    per_token = f"{'at most ' if is_windowed else ''}{sizes.token_cache:,} bytes"
    items = [
        MemoryItem(
            name="keys and values",
            bytes=load.rows * row_bytes + sizes.token_cache,  # one slot takes the padding
            why=f"{load.rows:,} rollouts of {load.sampled:,} tokens{growth}, {per_token} each",
        )
    ]
    if sizes.states:
        items.append(
            MemoryItem(
                name="recurrent states",
                bytes=load.rows * sizes.states,
                why=f"{load.rows:,} rollouts, {sizes.states:,} bytes each whatever their length",
            )
        )
    return items


SPEC = EngineSpec(
    settings=TransformersSettings,
    build=build,
    check_model=check_model,
    memory=memory,
    deterministic=True,
    reads_images=True,
    records_routes=True,
    apart=EngineSpec(
        settings=TransformersSettings,
        build=build_apart,
        check_model=check_model,
        server_memory=copy_memory,
        own_weights=True,
        standalone=True,
        deterministic=True,
        records_routes=True,
    ),
)
