"""Settings that every engine has; those of one engine are in its folder's config.py."""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from enum import StrEnum

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.utils.sections import SETTINGS, Whole

DEFAULT_ENGINE = "transformers"
"""The engine of a run that names none."""


@dataclass(config=SETTINGS, kw_only=True)
class EngineSettings:
    """Settings of the engine that samples. An engine's own class adds its keys to these."""

    name: str = ""
    """A folder of agenttrain/engines. For an engine from outside, given as engine._target_: the
    dotted path of its EngineSpec."""
    max_context: Whole | None = Field(default=None, ge=1)
    """Tokens of one sequence; None: what the model's config allows."""
    max_rows: Whole = Field(default=128, ge=1)
    """Sequences decoded together, waiting for tools included (bounds the KV cache)."""


class EngineDtype(StrEnum):
    """Number format of the weights of an engine that has its own, and of its cache."""

    auto = "auto"
    """bfloat16 on a GPU that has it, else the policy's."""
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"


LEAST_TEMPERATURE = 0.01
"""Least above 0. At lower ones rounding of the logits moves logprobs by whole nats, and vLLM 0.32
samples at this one instead (sampling_params.py)."""


@plain_dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters of one completion. The defaults sample from the policy's distribution."""

    max_tokens: int = 0
    """Budget of the completion; the loop sets it for every turn."""
    temperature: float = 1.0
    """0 means greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means all tokens."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """The completion ends with, and includes, the first of these."""
    seed: int = 0
    """Determines the sampling noise of this request, whatever shares its batch."""
    grammar: str | None = None
    """Structural tag (JSON) that restricts the tokens that can be sampled. An engine applies it or
    refuses the request."""
