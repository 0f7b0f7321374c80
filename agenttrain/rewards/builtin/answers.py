"""Rewards that compare a rollout's answer with a column of its row.

The answer is the last message, or an argument of a tool call such as `final_answer`.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agenttrain.rewards.function import last_main
from agenttrain.types import MAIN, Rollout, ToolError
from agenttrain.utils.data_fields import Data


class AnswerReward:
    """Base of the rewards that compare a rollout's answer with a column of its row.

    With `tool`, the answer is `argument` of the tool's last valid call. Without it (null), it is
    the text of the last assistant message.
    """

    def __init__(self, *, tool: str | None, argument: str, column: str) -> None:
        self._tool, self._argument, self._column = tool, argument, column
        self.tools = () if tool is None else (tool,)
        """Tools without which the reward would be 0 for every rollout."""
        self.columns = (column,)
        """Columns that every row must have."""

    def answer(self, rollout: Rollout) -> Any:
        """Return the rollout's answer, or None if it has none."""
        if self._tool is None:
            return final_text(rollout)
        return tool_answer(rollout, self._tool, self._argument)

    def expected(self, columns: Mapping[str, Any]) -> Any:
        """Return the row's value. Raises KeyError when the row has no such column."""
        if self._column not in columns:
            raise KeyError(f"it needs the column {self._column!r}, the row has {sorted(columns)}")
        return columns[self._column]


DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+"
NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:{DIGITS})(?:/(?:{DIGITS}))?")


class NumericClose(AnswerReward):
    """1 if the last number of the answer is close to the last number of the column, else 0.

    Close as in `math.isclose`: within `relative` of the larger one, or within `absolute`. Example:
    "so 1,234.5 in all" against ``#### 1234.5`` is 1.0. Fractions (3/4) and thousands separators are
    read, but not percent signs and units.
    """

    def __init__(
        self,
        *,
        tool: Data[str | None] = None,
        argument: Data[str] = "answer",
        column: Data[str] = "answer",
        relative: Data[float] = 1e-6,
        absolute: Data[float] = 1e-9,
    ) -> None:
        """`relative` and `absolute` are the tolerances of `math.isclose`."""
        super().__init__(tool=tool, argument=argument, column=column)
        for name, value in (("relative", relative), ("absolute", absolute)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: must be a finite number, 0 or more")
        self._relative, self._absolute = relative, absolute

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return 1 if the last numbers of the answer and of the column are close, else 0."""
        expected = last_number(self.expected(columns))
        if expected is None:
            raise ValueError(
                f"the column {self._column!r} holds no number: {columns[self._column]!r}"
            )
        answer = last_number(self.answer(rollout))
        is_close = answer is not None and math.isclose(
            answer, expected, rel_tol=self._relative, abs_tol=self._absolute
        )
        return float(is_close)


def last_number(value: Any) -> float | None:
    """Return the last number in a value, or None if it has none.

    Example: ``last_number("3 boxes of 12, so 36.") == 36.0``
    """
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        numbers = [str(value)]
    else:
        numbers = NUMBER.findall(as_text(value).replace("\N{MINUS SIGN}", "-"))
    if not numbers:
        return None
    # "1,234" -> "1234", ""; "3/4" -> "3", "4"
    numerator, _, denominator = numbers[-1].replace(",", "").partition("/")
    try:
        number = float(numerator) / float(denominator or 1)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class ExactMatch(AnswerReward):
    """1 if the answer equals a column, else 0.

    Runs of white space count as one blank. Example: on a row with ``answer: Oslo``,
    ``ExactMatch()`` gives 1.0 to a rollout that called ``final_answer(answer="Oslo")``, and with
    ``tool=None`` to one whose last message is ``Oslo``.
    """

    def __init__(
        self,
        *,
        tool: Data[str | None] = "final_answer",
        argument: Data[str] = "answer",
        column: Data[str] = "answer",
        ignore_case: Data[bool] = False,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        self._ignore_case = ignore_case

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return 1 if the answer equals the column's value, else 0."""
        expected, answer = self.expected(columns), self.answer(rollout)
        if answer is None:
            return 0.0
        # 37 and "37" are the same answer: models write either.
        texts = [" ".join(as_text(value).split()) for value in (answer, expected)]
        if self._ignore_case:
            texts = [text.casefold() for text in texts]
        return float(texts[0] == texts[1])


class Contains(AnswerReward):
    """1 if the answer contains the column's text as whole words, else 0.

    If the column holds a list, one of its texts is enough. Runs of white space count as one blank.
    Example: "It is Oslo." contains ``Oslo``, and "17" does not contain ``7``.
    """

    def __init__(
        self,
        *,
        tool: Data[str | None] = None,
        argument: Data[str] = "answer",
        column: Data[str] = "answer",
        ignore_case: Data[bool] = False,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        self._flags = re.IGNORECASE if ignore_case else 0

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return 1 if the answer contains one of the column's texts as whole words, else 0."""
        expected, answer = self.expected(columns), self.answer(rollout)
        if answer is None:
            return 0.0
        text = " ".join(as_text(answer).split())
        for value in expected if isinstance(expected, list | tuple) else [expected]:
            words = " ".join(as_text(value).split())
            if not words:
                raise ValueError(
                    f"the column {self._column!r} is empty: every answer contains that"
                )
            if re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text, self._flags):
                return 1.0
        return 0.0


class TokenF1(AnswerReward):
    """F1 of the words of the answer and of the column's text, as in SQuAD and HotpotQA.

    Case, punctuation and the articles a, an, the do not count. If the column holds a list, the best
    of its texts counts. Example: "the river Issel" against ``Issel`` shares one word of two and of
    one: 2 * 1 / (2 + 1) = 0.67.
    """

    def __init__(
        self,
        *,
        tool: Data[str | None] = "final_answer",
        argument: Data[str] = "answer",
        column: Data[str] = "answer",
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        expected, answer = self.expected(columns), self.answer(rollout)
        if answer is None:
            return 0.0
        texts = expected if isinstance(expected, list | tuple) else [expected]
        words = plain_words(as_text(answer))
        return max((f1(words, plain_words(as_text(text))) for text in texts), default=0.0)


def plain_words(text: str) -> list[str]:
    """Return the words of a text without case, punctuation and articles.

    Example: ``plain_words("The U.S. Open, 1998") == ["us", "open", "1998"]``
    """
    letters = "".join(c for c in text.casefold() if not unicodedata.category(c).startswith("P"))
    return [word for word in letters.split() if word not in ("a", "an", "the")]


def f1(words: list[str], expected: list[str]) -> float:
    """Return the harmonic mean of the shares of shared words; 1 for two empty texts."""
    if not words or not expected:
        return float(words == expected)
    shared = sum((Counter(words) & Counter(expected)).values())
    return 2 * shared / (len(words) + len(expected))


VALID_ERRORS = (None, ToolError.timeout, ToolError.unavailable)
"""Errors of calls that are valid answers: none, or an error that is not the model's fault."""


def tool_answer(rollout: Rollout, tool: str, argument: str | None) -> Any:
    """Return an argument of the last valid call of `tool`, or None if there is no valid call.

    With `argument=None`, return all arguments. A call that was not run, or that the tool refused
    with an exception, is not valid.
    """
    for result in reversed(rollout.tool_results):
        if result.call.name == tool and result.error in VALID_ERRORS:
            arguments = result.call.arguments
            return arguments if argument is None else arguments.get(argument)
    return None


def assistant_messages(rollout: Rollout) -> list[dict[str, Any]]:
    """Return the messages that the policy wrote to attempt the task, without summaries."""
    return [
        message
        for trajectory in rollout.trajectories
        if trajectory.role == MAIN
        for message in trajectory.added_messages
        if message["role"] == "assistant"
    ]


def final_text(rollout: Rollout) -> str:
    """Return the text of the last assistant message that attempts the task, without reasoning.

    The text is empty if there is no such message.
    """
    messages = [m for m in last_main(rollout).added_messages if m["role"] == "assistant"]
    return (messages[-1].get("content") or "") if messages else ""


def as_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON, the way a model would write it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
