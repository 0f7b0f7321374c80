"""Checks of the engine's settings."""

from __future__ import annotations

from collections.abc import Iterator

from agenttrain.config.schema import EngineConfig, RunConfig, VllmSettings, WeightSyncConfig

VLLM = "vllm"


def engine_problems(config: RunConfig) -> Iterator[str]:
    """Settings of one engine that are given to another, and values that it cannot have."""
    engine = config.engine
    if engine.name == VLLM:
        if config.rollout.deterministic:
            yield (
                "rollout.deterministic=true: vLLM's batches depend on the clock; leave it out, or "
                "set engine=transformers"
            )
        if engine.rejoin_steps != EngineConfig.rejoin_steps:
            yield f"engine.rejoin_steps={engine.rejoin_steps}: has no effect with engine=vllm"
        yield from _vllm(engine.vllm)
        if engine.vllm.merge_adapters and not config.model.lora.rank:
            yield "engine.vllm.merge_adapters=true: has no effect without model.lora.rank"
    else:
        for name, default in vars(VllmSettings()).items():
            value = getattr(engine.vllm, name)
            if value != default:
                yield f"engine.vllm.{name}={value}: has no effect without engine=vllm"
        if config.rollout.structured_calls:
            yield (
                f"rollout.structured_calls=true: engine={engine.name} has no grammars; set "
                "engine=vllm, or leave it out"
            )
        if config.weight_sync.tolerance is not None:
            yield (
                f"weight_sync.tolerance={config.weight_sync.tolerance}: has no effect: "
                f"engine={engine.name} samples from the policy itself"
            )
        if config.weight_sync.mode != WeightSyncConfig.mode:
            yield (f"weight_sync.mode={config.weight_sync.mode}: has no effect without engine=vllm")


def _vllm(settings: VllmSettings) -> Iterator[str]:
    if not 0 < settings.memory_share < 1:
        yield f"engine.vllm.memory_share={settings.memory_share}: must be between 0 and 1"
    if settings.kv_cache_mb is not None and settings.kv_cache_mb < 1:
        yield f"engine.vllm.kv_cache_mb={settings.kv_cache_mb}: must be at least 1"
    size = settings.tensor_parallel_size
    if size < 1:
        yield f"engine.vllm.tensor_parallel_size={size}: must be at least 1"
