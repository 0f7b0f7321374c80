"""Settings of the engine that samples in this process from the policy's own weights."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.engines.config import EngineSettings
from agenttrain.utils.data_fields import Data
from agenttrain.utils.sections import SETTINGS, Whole


@dataclass(config=SETTINGS, kw_only=True)
class TransformersSettings(EngineSettings):
    """Settings of engine=transformers."""

    name: Data[str] = "transformers"
    rejoin_steps: Whole = Field(default=2, ge=1)
    """Decode steps between a completion and its rollout's return; no effect with
    rollout.deterministic=false."""
    share_prefix: Data[bool] = True
    """Copy the keys and values of tokens with which several prompts begin; false: compute each
    prompt by itself, which takes longer and gives other last bits."""
