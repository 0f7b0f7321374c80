"""Environments for tests: each keeps a record of its life in `Life.events`."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from agenttrain.data.bundled import shop
from agenttrain.types import Done, Rollout, ToolContext, ToolFailure, TurnReward


class Life:
    """An environment that writes down what happens to it."""

    events: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, slow_s: float = 0.0, board: list[str] | None = None) -> None:
        self.number = id(self)
        self.board = board if board is not None else []
        self._note("made")
        time.sleep(slow_s)

    def _note(self, what: str) -> None:
        Life.events.append((what, self.number))

    def close(self) -> None:
        self._note("closed")


class Maze(Life):
    """A corridor; the exit is at `row["exit"]`."""

    def reset(self, row: dict[str, Any], seed: int, group_seed: int) -> str:
        self._note("reset")
        self.at, self.exit, self.done = 0, row["exit"], False
        self.seeds = (seed, group_seed)
        return f"The exit is {self.exit} steps to the right."

    def move(self, steps: int) -> str:
        """Walk to the right.

        Args:
            steps: How far.
        """
        if steps > 100:
            raise ValueError("too far")
        self.at += steps
        self.done = self.at >= self.exit
        return "out" if self.done else f"at {self.at}"

    async def look(self) -> dict[str, int]:
        """Say where you are."""
        return {"at": self.at}

    def reward(self, rollout: Rollout) -> float:
        return self.at / self.exit


class Doors(Maze):
    """Rewards each turn, and says in which state it is."""

    def move(self, steps: int) -> TurnReward:  # type: ignore[override]
        """Walk to the right.

        Args:
            steps: How far.
        """
        text = super().move(steps)
        return TurnReward(0.25 * steps, Done(text) if steps == 9 else text)

    def state(self) -> dict[str, int]:
        return {"exit": self.exit, "at": self.at}


class PooledMaze(Maze):
    pooled = True


class Guesser(Life):
    """Answers with user messages; the word is right at the end."""

    @property
    def done(self) -> bool:
        return self.tries == 0

    async def reset(self, row: dict[str, Any]) -> list[dict[str, str]]:
        self.tries = 3
        return [{"role": "user", "content": "guess a number"}]

    def user(self, message: dict[str, Any]) -> str | None:
        self.tries = 0 if "7" in message["content"] else self.tries - 1
        if "quit" in message["content"]:
            return None
        return "right" if "7" in message["content"] else "wrong, again"

    def reward(self, rollout: Rollout) -> float | None:
        return None if rollout.turns == 1 else 1.0

    async def close(self) -> None:  # type: ignore[override]
        self._note("closed")


class Stuck(Life):
    """Its tool blocks until the environment is closed, or for good."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def wait(self) -> str:
        """Wait."""
        self._note("waiting")
        self.gate.wait(5)
        return "over"

    def close(self) -> None:
        super().close()
        self.gate.set()


class Picky(Life):
    """Its reset fails for rows with `bad`."""

    def reset(self, row: dict[str, Any]) -> None:
        if row.get("bad"):
            raise ConnectionError("the simulator is down")

    def whereabouts(self, context: ToolContext) -> str:
        """Say in which thread and for whom this runs."""
        return f"{context.rollout_id} {threading.get_ident()}"


class SlowToMake(Life):
    def __init__(self) -> None:
        super().__init__(slow_s=0.2)


class SlowToReset(Life):
    def reset(self) -> None:
        time.sleep(1.0)


class DoneAtOnce(Life):
    done = True


class BadReward(Life):
    def reward(self, rollout: Rollout) -> str:
        return "much"


def flat(rollout: Rollout) -> float:
    return 1.0


def move(steps: int) -> str:
    """Walk.

    Args:
        steps: How far.
    """
    return f"{steps}"


class Shop:
    """The bundled shop's database; a query that finds something earns a tenth."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self.database, self.seen = shop.connect(row), set()

    def sql(self, query: str) -> TurnReward:
        """Run a read-only SQL query.

        Args:
            query: One SELECT statement.
        """
        try:
            found = self.database.execute(query).fetchmany(20)
        except sqlite3.Error as error:
            raise ToolFailure(str(error)) from error
        self.seen.add(str(found))
        return TurnReward(0.1 * bool(found), str(found) * 4)  # longer than "[dropped]"

    def state(self) -> list[str]:
        return sorted(self.seen)

    def close(self) -> None:
        self.database.close()
