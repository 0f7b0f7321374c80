"""`exact_match`: the answer that was handed in is the row's."""

from __future__ import annotations

import json
from typing import Any

from agenttrain.types import Rollout


class ExactMatch:
    """1 if the argument of the last valid call of a tool equals a column, else 0.

    Runs of white space count as one blank. Example: ``ExactMatch()`` gives 1.0 to a rollout that
    called ``final_answer(answer="Oslo")`` on a row with ``answer: Oslo``.
    """

    def __init__(
        self,
        *,
        tool: str = "final_answer",
        argument: str = "answer",
        column: str = "answer",
        ignore_case: bool = False,
    ) -> None:
        self._tool, self._argument, self._column = tool, argument, column
        self._ignore_case = ignore_case

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        if self._column not in columns:
            raise KeyError(f"it needs the column {self._column!r}, the row has {sorted(columns)}")
        handed_in = self._handed_in(rollout)
        if handed_in is None:
            return 0.0
        return float(self._text(handed_in) == self._text(columns[self._column]))

    def _handed_in(self, rollout: Rollout) -> Any:
        for result in reversed(rollout.tool_results):
            valid = result.error is None or not result.error.invalid_call
            if result.call.name == self._tool and valid:
                return result.call.arguments.get(self._argument)
        return None

    def _text(self, value: Any) -> str:
        # 37 and "37" are the same answer: models write either.
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = " ".join(text.split())
        return text.casefold() if self._ignore_case else text
