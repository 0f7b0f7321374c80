"""An OpenEnv server, for a Python that has openenv: ``python openenv_server.py <port> <capacity>``.

Its environment counts up to a target, and dies of 13. Each session that opens or closes prints a
line.
"""

import os
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


def log(event: str) -> None:
    """Write one whole line: threads that print at once can put two words on one."""
    os.write(sys.stdout.fileno(), f"{event}\n".encode())


class Count(Action):
    """Add to the count."""

    by: int = Field(ge=1, le=20, description="How much to add.")


class Counted(Observation):
    """The count, and its target."""

    count: int
    target: int


class Counter(Environment):
    """Pays 1 for reaching the target exactly."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._count, self._target = 0, 3
        log("opened")

    def reset(self, seed: int | None = None, target: int = 3, **_: Any) -> Counted:
        self._count, self._target = 0, target
        return Counted(count=0, target=target)

    def step(self, action: Count, **_: Any) -> Counted:
        if action.by == 13:
            raise RuntimeError("bad luck")
        self._count += action.by
        return Counted(
            count=self._count,
            target=self._target,
            done=self._count >= self._target,
            reward=float(self._count == self._target),
        )

    @property
    def state(self) -> State:
        return State(step_count=self._count)

    def close(self) -> None:
        log("closed")


if __name__ == "__main__":
    app = create_app(
        Counter, Count, Counted, env_name="counter", max_concurrent_envs=int(sys.argv[2])
    )
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
