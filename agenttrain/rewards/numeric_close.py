"""`numeric_close`: the number in the answer is the row's, within a tolerance."""

from __future__ import annotations

import math
import re
from typing import Any

from agenttrain.rewards.answer import AnswerReward, as_text
from agenttrain.types import Rollout

DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+"
NUMBER = re.compile(rf"(?:(?<![\w)])[-+])?(?:{DIGITS})(?:/(?:{DIGITS}))?")


class NumericClose(AnswerReward):
    """1 if the last number of the answer is close to the last number of the column, else 0.

    Close as in `math.isclose`: within `relative` of the larger one, or within `absolute`. Example:
    "so 1,234.5 in all" against ``#### 1234.5`` is 1.0. Fractions (3/4) and thousands separators are
    read; percent signs and units are not.
    """

    def __init__(
        self,
        *,
        tool: str | None = None,
        argument: str = "answer",
        column: str = "answer",
        relative: float = 1e-6,
        absolute: float = 1e-9,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        for name, value in (("relative", relative), ("absolute", absolute)):
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}={value}: must be a finite number, 0 or more")
        self._relative, self._absolute = relative, absolute

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        expected = last_number(self.expected(columns))
        if expected is None:
            raise ValueError(
                f"the column {self._column!r} holds no number: {columns[self._column]!r}"
            )
        answer = last_number(self.answer(rollout))
        close = answer is not None and math.isclose(
            answer, expected, rel_tol=self._relative, abs_tol=self._absolute
        )
        return float(close)


def last_number(value: Any) -> float | None:
    """Return the last number in a value, None when there is none.

    Example: ``last_number("3 boxes of 12, so 36.") == 36.0``
    """
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return _finite(str(value))
    numbers = NUMBER.findall(as_text(value).replace("\N{MINUS SIGN}", "-"))
    return _finite(numbers[-1]) if numbers else None


def _finite(text: str) -> float | None:
    over, _, under = text.replace(",", "").partition("/")
    try:
        number = float(over) / float(under or 1)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None
    return number if math.isfinite(number) else None
