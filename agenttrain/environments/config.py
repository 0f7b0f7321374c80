"""Settings of an environment, and of a simulated user, that stand beside its `_target_`."""

from __future__ import annotations

from pydantic import Field, field_validator
from pydantic.dataclasses import dataclass

from agenttrain.tools.config import Isolation, ToolLimits
from agenttrain.utils.sections import SETTINGS, Flag, Number, Whole


@dataclass(config=SETTINGS)
class EnvironmentSettings(ToolLimits):
    """Settings of an environment, beside its `_target_`.

    The inherited limits, such as `timeout_s` and `max_calls`, apply to each of its tools.
    """

    retries: Whole = Field(default=0, ge=0)
    """Times a call is made again after a fault of the infrastructure; 0, because a method may have
    changed the state before it failed."""
    hook_timeout_s: Number = Field(default=60.0, gt=0)
    """Seconds that construction and reset may take together; each call of `user`, `reward` or
    `close` may take as many again."""
    pooled: Flag | None = None
    """Instances are used again after a reset; None: as the class declares (`pooled`), or no."""

    @field_validator("isolation")
    @classmethod
    def _in_this_process(cls, value: Isolation) -> Isolation:
        """Refuse a process for each call of a tool: it would not see the environment's state."""
        if value is not Isolation.thread:
            raise ValueError(
                "an environment keeps its state in this process; leave isolation out, and let it "
                "start a process of its own"
            )
        return value


@dataclass(config=SETTINGS)
class UserSettings:
    """Settings of a simulated user, beside its `_target_`."""

    max_turns: Whole = Field(default=8, ge=1)
    """Messages of the simulated user in a rollout; after them the rollout is `completed`."""
    concurrency: Whole = Field(default=32, ge=1)
    """Replies that are made at once, over all rollouts."""
    timeout_s: Number = Field(default=600.0, gt=0)
    """Seconds that one reply may take, with its retries."""
