"""Settings of the engine that samples, and of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass
class VllmSettings:
    """Settings that only vLLM has."""

    memory_share: float = 0.5
    """Share of a GPU's memory for weights and cache (of the machine's, on vLLM's build for CPUs);
    the trainer has the remainder."""
    kv_cache_mb: int | None = None
    """Size of the cache of keys and values; None: what memory_share leaves."""
    tensor_parallel_size: int = 1
    """GPUs that share the engine's weights, each with a process of its own if there are several;
    weights reach these through memory."""
    quantization: str | None = None
    """Quantization of the engine's weights, by vLLM's names, e.g. fp8."""
    merge_adapters: bool = False
    """Send all weights with the adapters of model.lora merged into them, instead of the adapters
    alone: samples a little faster, but rounds in bfloat16."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, samples slower."""
    sleep: bool = False
    """Give the GPU's memory back while the policy is updated, once per step."""


class EngineDtype(StrEnum):
    """Number format of the weights of an engine that has its own, and of its cache."""

    auto = "auto"
    """bfloat16 on a GPU that has it, else the policy's."""
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


@dataclass
class EngineConfig:
    """Settings of the engine; `transformers` runs in this process on the policy's own weights."""

    name: str = "transformers"
    dtype: EngineDtype = EngineDtype.auto
    """Number format of the engine's weights, for engine=vllm: the policy's are cast to it when they
    are sent."""
    max_context: int | None = None
    """Tokens of one sequence; None: what the model's config allows."""
    max_rows: int = 128
    """Sequences decoded together, waiting for tools included (bounds the KV cache)."""
    rejoin_steps: int = 2
    """Decode steps between a completion and its rollout's return; no effect with
    rollout.deterministic=false."""
    vllm: VllmSettings = field(default_factory=VllmSettings)


LEAST_TEMPERATURE = 0.01
"""Least above 0. At lower ones rounding of the logits moves logprobs by whole nats, and vLLM 0.32
samples at this one instead (sampling_params.py)."""
