"""`exact_match`: the answer is the row's."""

from __future__ import annotations

from typing import Any

from agenttrain.rewards.answer import AnswerReward, as_text
from agenttrain.types import Rollout


class ExactMatch(AnswerReward):
    """1 if the answer equals a column, else 0.

    Runs of white space count as one blank. Example: ``ExactMatch()`` gives 1.0 to a rollout that
    called ``final_answer(answer="Oslo")`` on a row with ``answer: Oslo``; with ``tool=None`` to one
    whose last message is ``Oslo``.
    """

    def __init__(
        self,
        *,
        tool: str | None = "final_answer",
        argument: str = "answer",
        column: str = "answer",
        ignore_case: bool = False,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        self._ignore_case = ignore_case

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        expected, answer = self.expected(columns), self.answer(rollout)
        return float(answer is not None and self._text(answer) == self._text(expected))

    def _text(self, value: Any) -> str:
        # 37 and "37" are the same answer: models write either.
        text = " ".join(as_text(value).split())
        return text.casefold() if self._ignore_case else text
