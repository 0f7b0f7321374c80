"""A text game for Gymnasium: guess a number, and be told whether it is higher or lower."""

from __future__ import annotations

from string import printable
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

NUMBERS = 20
TRIES = 5


class Guess(gymnasium.Env):
    """The number is from 0 to 19; the reward for finding it within five tries is 1."""

    action_space = Discrete(NUMBERS)
    observation_space = Text(200, charset=printable)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        """Choose the number from the seed."""
        super().reset(seed=seed)
        self.number = int(self.np_random.integers(NUMBERS))
        self.tries = 0
        return f"I think of a number from 0 to {NUMBERS - 1}. You have {TRIES} tries.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Compare a guess with the number."""
        self.tries += 1
        if action == self.number:
            return "That is it.", 1.0, True, False, {}
        hint = "higher" if self.number > action else "lower"
        return f"It is {hint} than {action}.", 0.0, self.tries == TRIES, False, {}


gymnasium.register("Guess-v0", entry_point=Guess)
