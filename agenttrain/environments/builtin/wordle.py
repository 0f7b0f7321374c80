"""Wordle: find a word of five letters by guesses, each answered with marks for its letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from agenttrain.data.bundled.wordle import FIVE_LETTERS
from agenttrain.types import Rollout, ToolFailure
from agenttrain.utils.data_fields import Data

RULES = """\
Find the secret word of five letters in {guesses} guesses. Call guess with a common English word.
It is answered with a mark for each letter: G, it is right; Y, it belongs to another place; -, it \
does not occur (again)."""
LAST_GUESS = 0.3
"""Least reward of a word that was found: more than for all letters of one that was not."""
LETTER_IN_PLACE = 0.05
"""Reward of each place whose letter was guessed in a word that was not found."""


class Wordle:
    """One game. The row's column `word` is the word to find.

    A guess that is no word of the list (`agenttrain/data/words`) is an error, which uses up a turn
    and no guess. The reward is 1 for the first guess and 0.1 less for each later one. With more
    than 8 guesses it falls by so much less that the last one earns LAST_GUESS. A word that was not
    found earns LETTER_IN_PLACE for each place whose letter was guessed.
    """

    def __init__(self, *, guesses: Data[int] = 6) -> None:
        """Raises ValueError for an impossible number of guesses."""
        self.check(guesses=guesses)
        self._max_guesses = guesses
        self._word = ""
        self._past_guesses: list[str] = []
        """Guesses so far."""

    @classmethod
    def check(cls, *, guesses: int = 6) -> None:
        """Raise ValueError before a run begins."""
        if isinstance(guesses, bool) or not isinstance(guesses, int) or not 1 <= guesses <= 10:
            raise ValueError(f"guesses={guesses}: must be a whole number from 1 to 10")

    def reset(self, row: Mapping[str, Any]) -> str:
        """Begin the row's game, and return the rules."""
        if row.get("word") not in FIVE_LETTERS:
            raise ValueError(f"the row's word is {row.get('word')!r}; use data=wordle")
        self._word, self._past_guesses = row["word"], []
        return RULES.format(guesses=self._max_guesses)

    @property
    def done(self) -> bool:
        """True once the word was found or all guesses are made."""
        return self._word in self._past_guesses or len(self._past_guesses) == self._max_guesses

    def guess(self, word: str) -> str:
        """Guess the secret word.

        Args:
            word: A word of five letters.
        """
        word = word.strip().lower()
        if word not in FIVE_LETTERS:
            raise ToolFailure(f"{word!r} is not in the word list; guess another word")
        self._past_guesses.append(word)
        remaining = self._max_guesses - len(self._past_guesses)
        return f"{' '.join(word)}\n{' '.join(marks(word, self._word))}\n{remaining} guesses left"

    def state(self) -> list[str]:
        """Return the guesses so far."""
        return self._past_guesses

    def reward(self, rollout: Rollout) -> float:
        """Return the game's reward.

        A word that was found with the first guess earns 1, with each later one 0.1 less. If so many
        guesses are allowed that the last one would earn less than LAST_GUESS, the steps are smaller
        and it earns LAST_GUESS. A word that was not found earns LETTER_IN_PLACE for each place
        whose letter was guessed there.
        """
        if self._word in self._past_guesses:
            later_guesses = max(self._max_guesses - 1, 1)
            step = min(0.1, (1.0 - LAST_GUESS) / later_guesses)
            return 1.0 - step * (len(self._past_guesses) - 1)
        places = {
            place
            for guess in self._past_guesses
            for place in range(5)
            if guess[place] == self._word[place]
        }
        return LETTER_IN_PLACE * len(places)


def marks(guess: str, word: str) -> str:
    """Return the marks of a guess: ``marks("sleek", "elder") == "-GYG-"``.

    A letter gets as many marks as the word has it, those in the right place first.
    """
    pairs = zip(word, guess, strict=True)
    # Letters of the word that the guess has not in their place: each can get one Y.
    unmarked = Counter(letter for letter, guessed in pairs if letter != guessed)
    result = ""
    for letter, right_letter in zip(guess, word, strict=True):
        if letter == right_letter:
            result += "G"
        elif unmarked[letter]:
            unmarked[letter] -= 1
            result += "Y"
        else:
            result += "-"
    return result
