"""An OpenEnv server with a game: walk along a corridor to the lamp. ``python server.py 8000``"""

from __future__ import annotations

import random
import sys
from typing import Any, Literal

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

LENGTH = 6
STEPS = 10


class Walk(Action):
    """One step along the corridor."""

    direction: Literal["left", "right"] = Field(description="Where to go.")


class Seen(Observation):
    """The corridor as the walker sees it."""

    text: str


class Corridor(Environment):
    """Pays 1 for reaching the lamp within ten steps."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.position = self.lamp = self.steps = 0

    def reset(self, seed: int | None = None, **_: Any) -> Seen:
        """Put walker and lamp at two places of the corridor."""
        self.position, self.lamp = random.Random(seed).sample(range(LENGTH), 2)
        self.steps = 0
        return self.seen()

    def step(self, action: Walk, **_: Any) -> Seen:
        """Walk, as far as there is no wall."""
        move = 1 if action.direction == "right" else -1
        self.position = min(max(self.position + move, 0), LENGTH - 1)
        self.steps += 1
        return self.seen()

    def seen(self) -> Seen:
        """Return the corridor, such as ``..@..*``."""
        places = ["."] * LENGTH
        places[self.lamp] = "*"
        places[self.position] = "@"
        there = self.position == self.lamp
        done = there or self.steps == STEPS
        return Seen(text="".join(places), done=done, reward=float(there))

    @property
    def state(self) -> State:
        """Return how many steps were taken."""
        return State(step_count=self.steps)


if __name__ == "__main__":
    app = create_app(Corridor, Walk, Seen, env_name="corridor", max_concurrent_envs=64)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
