"""Settings of rollouts that are made ahead of the update that trains on them."""

from __future__ import annotations

from pydantic import Field
from pydantic.dataclasses import dataclass

from agenttrain.utils.sections import SETTINGS, Whole


@dataclass(config=SETTINGS)
class AsyncConfig:
    """Asynchronous training: the rollout process samples while the trainer updates."""

    max_staleness: Whole = Field(default=0, ge=0)
    """Most updates between the weights that sampled a token and those that train on it; 0: a step's
    rollouts begin when the last update is done. Needs a rollout process (`rollout.process`)."""
