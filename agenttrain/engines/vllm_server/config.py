"""Settings of a fleet of vLLM servers; the servers themselves are in the section `servers`."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.engines.config import EngineDtype, EngineSettings
from agenttrain.utils.sections import SETTINGS, Number, Whole


@dataclass(config=SETTINGS, kw_only=True)
class VllmServerSettings(EngineSettings):
    """Settings of engine=vllm_server, of each server."""

    name: str = "vllm_server"
    max_rows: Whole = Field(default=256, ge=1)
    """Sequences that a server decodes together (bounds the KV cache)."""
    dtype: EngineDtype = EngineDtype.auto
    """Number format of the servers' weights: the policy's are cast to it when they are sent."""
    memory_share: Number = Field(default=0.9, gt=0, lt=1)
    """Share of a GPU's memory that a server takes (of the machine's, on vLLM's build for CPUs)."""
    kv_cache_mb: Whole | None = Field(default=None, ge=1)
    """Size of a server's cache of keys and values; None: what memory_share leaves."""
    quantization: str | None = None
    """Quantization of the servers' weights, by vLLM's names, e.g. fp8."""
    enforce_eager: bool = False
    """No CUDA graphs: starts faster, samples slower."""
