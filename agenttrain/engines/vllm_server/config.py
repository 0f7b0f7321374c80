"""Settings of vLLM servers: of a fleet that samples, and of frozen models with a role of their own.

How many there are, and where, is in the section `servers`, and for each role beside its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, fields
from typing import Any

from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.engines.config import EngineDtype, EngineSettings, StartedServers, gpu_problems
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Number, Quoted, Whole, raise_problems, shown

OWN_GPU_SHARE = 0.9
"""Share of a server that has its GPU to itself: vLLM's own default."""
TRAINERS_GPU_SHARE = 0.35
"""Share of a server on the trainer's GPU. With AdamW a weight of 16 bits takes the trainer about 20
bytes (its float32 copy, moments and gradients) and activations, but the server 2 and its cache: so
the trainer gets the larger part."""


@dataclass(config=SETTINGS, kw_only=True)
class OneServer:
    """Settings of each server, of the policy or of a role."""

    max_rows: Whole = Field(default=256, ge=1)
    """Sequences that a server decodes together (bounds the KV cache)."""
    dtype: Data[EngineDtype] = EngineDtype.auto
    """Number format of the servers' weights."""
    memory_share: Number | None = Field(default=None, gt=0, lt=1)
    """Share of a GPU's memory that a server takes (of the machine's, on vLLM's build for CPUs);
    None: 0.9, or 0.35 for the policy's server on the trainer's GPU."""
    kv_cache_mb: Whole | None = Field(default=None, ge=1)
    """Size of a server's cache of keys and values; None: what memory_share leaves."""
    quantization: Data[str | None] = None
    """Quantization of the servers' weights, by vLLM's names, e.g. fp8."""
    enforce_eager: Data[bool] = False
    """No CUDA graphs: starts faster, samples slower."""

    def share(self, *, shares_gpu: bool = False) -> float:
        """Return `memory_share`, or its default. `shares_gpu`: on the trainer's GPU."""
        if self.memory_share is not None:
            return self.memory_share
        return TRAINERS_GPU_SHARE if shares_gpu else OWN_GPU_SHARE

    def server_keys(self, *, shares_gpu: bool = False) -> dict[str, Any]:
        """Return the settings of this class, without those of its subclasses.

        `memory_share` is never None: see `share`.
        """
        keys = {key_field.name: getattr(self, key_field.name) for key_field in fields(OneServer)}
        return keys | {"memory_share": self.share(shares_gpu=shares_gpu)}


@dataclass(config=SETTINGS, kw_only=True)
class VllmServerSettings(OneServer, EngineSettings):
    """Settings of engine=vllm_server, of each server."""

    name: Data[str] = "vllm_server"
    dtype: Data[EngineDtype] = EngineDtype.auto
    """Number format of the servers' weights: the policy's are cast to it when they are sent."""


@dataclass(config=SETTINGS, kw_only=True)
class RoleConfig(OneServer, StartedServers):
    """vLLM servers of a frozen model, which the run starts and ends."""

    memory_share: Number | None = Field(default=OWN_GPU_SHARE, gt=0, lt=1)
    """Share of a GPU's memory that a server takes; null: 0.9."""
    model: Data[str | None] = None
    """Folder of the model, `bundled:<name>` or `org/name`; null: the role has no servers."""
    revision: Quoted = None
    """Branch, tag or commit of a model of the hub; null: main. config.yaml has its commit."""
    max_context: Whole | None = Field(default=None, ge=1)
    """Tokens of one sequence; None: what the model's config allows."""


@dataclass(config=SETTINGS)
class RolesConfig:
    """Servers of models that judge, play the user or teach: `role:<name>` stands for their URL.

    Any consumer may name any role; two that name the same one share its servers.
    """

    judge: RoleConfig = field(default_factory=RoleConfig)
    """For `reward.judge.url=role:judge`."""
    user: RoleConfig = field(default_factory=RoleConfig)
    """For `user.url=role:user`."""
    teacher: RoleConfig = field(default_factory=RoleConfig)
    """For `algorithm.teacher.path=role:teacher`."""

    @model_validator(mode="after")
    def _check(self) -> RolesConfig:
        raise_problems(line for name in ROLES for line in self._problems(name))
        return self

    def _problems(self, name: str) -> Iterator[str]:
        """Yield the problems of a role: wrong GPUs, and settings of a role without a model."""
        role, default, key = getattr(self, name), RoleConfig(), f"roles.{name}"
        yield from gpu_problems(key, role)
        if role.model is not None:
            return
        for key_field in fields(RoleConfig):
            setting = key_field.name
            if (value := getattr(role, setting)) != getattr(default, setting):
                yield (
                    f"{key}.{setting}={shown(value)}: has no effect without {key}.model; set it, "
                    "or leave this out"
                )


ROLES = tuple(role.name for role in fields(RolesConfig))
