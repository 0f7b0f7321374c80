"""Rewards by the similarity of texts: of one answer, or of the answers of several turns.

Both follow verifiers' `reverse-text` and `alphabet-sort`, which prime-rl's examples train.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import pairwise
from typing import Any

from agenttrain.rewards.builtin.answers import AnswerReward, as_text, assistant_messages
from agenttrain.types import Rollout
from agenttrain.utils.data_fields import Data

LONGEST = 3
"""Lengths of the expected text that are compared of an answer. A comparison takes the product of
both lengths, or more, and the similarity of a longer answer is below 0.5 anyway."""


class Similarity(AnswerReward):
    """Similarity of the answer and a column, from 0 to 1, raised to `power`.

    With `tag`, the answer is the text between the first ``<tag>`` and ``</tag>``, without the white
    space around it; the reward is 0 if there is none. Example: "abcf" against ``abcd`` is 0.75,
    because three of four characters match.
    """

    def __init__(
        self,
        *,
        tool: Data[str | None] = None,
        argument: Data[str] = "answer",
        column: Data[str] = "answer",
        tag: Data[str | None] = None,
        power: Data[float] = 1.0,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        _check_power(power)
        self._tag, self._power = tag, power

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return the similarity of the answer and the column's text, raised to `power`."""
        expected, answer = as_text(self.expected(columns)), self.answer(rollout)
        if answer is None:
            return 0.0
        text = as_text(answer)
        if self._tag is not None:
            texts = texts_in_tags(text, self._tag)
            if not texts:
                return 0.0
            text = texts[0].strip()
        return similarity(text, expected) ** self._power


class TurnSimilarity:
    """Similarity of the answers of several turns and the texts of a column, one for each turn.

    The answer of a turn is the text between its tag, compared line by line without case, empty
    lines and white space at the ends of lines. The n-th turn has the n-th of `tags`, later turns
    the last one. A turn without its tag, or that did not take place, counts 0. If a turn has its
    tag several times, the last text counts, unless one is no better than the one before: then the
    turn counts 0.

    The reward is the mean over the turns, raised to `power`; with `each_turn`, it is the mean of
    the powers. Example: similarities of 1 and 0.5 with ``power=2`` give 0.5625, or with `each_turn`
    0.625.
    """

    def __init__(
        self,
        *,
        tags: Data[Sequence[str]],
        column: Data[str] = "answers",
        power: Data[float] = 1.0,
        each_turn: Data[bool] = False,
    ) -> None:
        """Take the tags around the answers and the column with the expected texts.

        The n-th turn's answer stands between ``<tag>`` and ``</tag>`` of the n-th of `tags`, later
        turns' between the last one, and is compared with the n-th text in `column`. A `power` above
        1 lowers middling similarities more than good ones: with 2, 0.5 becomes 0.25. It is applied
        to the mean of the turns' similarities or, with `each_turn`, to the similarity of each turn.
        """
        if not tags or isinstance(tags, str):
            raise ValueError(f"tags={tags!r}: must be a list with a tag for each turn, or one tag")
        _check_power(power)
        self._tags, self._column = list(tags), column
        self._power, self._each_turn = power, each_turn
        self.columns = (column,)
        """Columns that every row must have."""

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return the mean similarity of the turns' answers and the column's texts."""
        expected = columns[self._column]
        if isinstance(expected, str) or not expected:
            raise ValueError(f"the column {self._column!r} must list a text for each turn")
        answers = [message.get("content") or "" for message in assistant_messages(rollout)]
        total = 0.0
        for turn, text in enumerate(expected):
            tag = self._tags[min(turn, len(self._tags) - 1)]  # later turns have the last tag
            answer = answers[turn] if turn < len(answers) else ""
            score = _score_of_attempts(texts_in_tags(answer, tag), text)
            total += score**self._power if self._each_turn else score
        mean = total / len(expected)
        return mean if self._each_turn else mean**self._power


def _score_of_attempts(attempts: Sequence[str], expected: str) -> float:
    """Return the similarity of the last attempt; 0 without one, or if one did not improve.

    A turn may correct its answer by writing its tag again. Each attempt must then be better than
    the one before, so that repeating the tag gains nothing.
    """
    scores = [similarity(_plain(attempt), _plain(expected)) for attempt in attempts]
    each_is_better = all(earlier < later for earlier, later in pairwise(scores))
    return scores[-1] if scores and each_is_better else 0.0


def similarity(text: str, expected: str) -> float:
    """Return 2 M / T: M characters in matching blocks, of T characters in both texts.

    Example: ``similarity("abcf", "abcd") == 0.75``. An empty text has a similarity of 0 to all
    others. Of a text longer than LONGEST times the expected one only the beginning can match, so
    that a very long answer takes no long time.
    """
    if not text or not expected:
        return float(text == expected)
    beginning = text[: LONGEST * len(expected)]
    # Without autojunk, so that in texts of 200 characters and more frequent letters count too.
    matcher = SequenceMatcher(None, beginning, expected, autojunk=False)
    matching = sum(block.size for block in matcher.get_matching_blocks())
    return 2 * matching / (len(text) + len(expected))


def texts_in_tags(text: str, tag: str) -> list[str]:
    """Return the texts between ``<tag>`` and ``</tag>``, in order."""
    name = re.escape(tag)
    return re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)


def _plain(lines: str) -> str:
    """Return the lines without empty ones, case and white space at their ends."""
    return "\n".join(line.strip().casefold() for line in lines.split("\n") if line.strip())


def _check_power(power: float) -> None:
    """Raise ValueError unless the power is above 0."""
    if not 0 < power < float("inf"):
        raise ValueError(f"power={power}: must be above 0")
