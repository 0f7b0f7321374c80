"""`contains`: the row's answer occurs in what the model answered."""

from __future__ import annotations

import re
from typing import Any

from agenttrain.rewards.answer import AnswerReward, as_text
from agenttrain.types import Rollout


class Contains(AnswerReward):
    """1 if the answer contains the column's text as whole words, else 0.

    A column that holds a list has several good answers; one is enough. Runs of white space count
    as one blank. Example: "It is Oslo." contains ``Oslo``; "17" does not contain ``7``.
    """

    def __init__(
        self,
        *,
        tool: str | None = None,
        argument: str = "answer",
        column: str = "answer",
        ignore_case: bool = False,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        self._flags = re.IGNORECASE if ignore_case else 0

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
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
