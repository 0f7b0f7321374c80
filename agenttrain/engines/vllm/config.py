"""Settings of vLLM in the trainer's process."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.engines.config import EngineDtype, EngineSettings
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Whole


@dataclass(config=SETTINGS, kw_only=True)
class VllmSettings(EngineSettings):
    """Settings of engine=vllm."""

    name: Data[str] = "vllm"
    max_rows: Whole = Field(default=256, ge=1)
    """Sequences decoded together, waiting for tools included (bounds the KV cache)."""
    dtype: Data[EngineDtype] = EngineDtype.auto
    """Number format of the engine's weights: the policy's are cast to it when they are sent."""
    memory_share: Number = Field(default=0.5, gt=0, lt=1)
    """Share of a GPU's memory for weights and cache (of the machine's, on vLLM's build for CPUs);
    the trainer has the remainder."""
    kv_cache_mb: Whole | None = Field(default=None, ge=1)
    """Size of the cache of keys and values; None: what memory_share leaves."""
    tensor_parallel_size: Whole = Field(default=1, ge=1)
    """GPUs that share the engine's weights, each with a process of its own if there are several;
    weights reach these processes through shared memory."""
    quantization: Data[str | None] = None
    """Quantization of the engine's weights, by vLLM's names, e.g. fp8."""
    merge_adapters: Data[bool] = False
    """Send all weights with the adapters of model.lora merged into them, instead of the adapters
    alone: samples a little faster, but rounds in bfloat16."""
    enforce_eager: Data[bool] = False
    """No CUDA graphs: starts faster, samples slower."""
    sleep: Data[bool] = False
    """Give the GPU's memory back while the policy is updated, once per step."""
