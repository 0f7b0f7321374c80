"""`math_verify`: the answer is mathematically equal to the row's."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from typing import Any

from agenttrain.rewards.builtin.answers import AnswerReward, as_text
from agenttrain.rewards.function import RewardUnavailable
from agenttrain.types import Rollout
from agenttrain.utils.child_process import ChildGone, ChildNotReady, OnDemandChild
from agenttrain.utils.data_fields import Data

WORKER = Path(__file__).with_name("math_worker.py")
START_S = 120.0
"""Seconds that the worker may take to import sympy."""
GRACE = 2.0
"""The process is killed at this multiple of the library's own time limit."""


class MathVerify(AnswerReward):
    """1 if the answer equals the column mathematically, else 0; None if the column is no formula.

    Example: an answer ``so it is \\boxed{\\frac{1}{2}}`` equals ``0.5``. An answer that takes
    longer than `answer_s` to read or to compare is wrong.
    """

    def __init__(
        self,
        *,
        tool: Data[str | None] = None,
        argument: Data[str] = "answer",
        column: Data[str] = "answer",
        answer_s: Data[float] = 5.0,
    ) -> None:
        super().__init__(tool=tool, argument=argument, column=column)
        if find_spec("math_verify") is None:
            raise ValueError(
                "needs the package math-verify: pip install 'agenttrain[math]', or choose "
                "reward=[numeric_close]"
            )
        if not answer_s > 0:
            raise ValueError(f"answer_s={answer_s}: must be more than 0")
        self._answer_s = answer_s
        # -P: beside the script lies our math_verify.py, which is not the library.
        self._command = [sys.executable, "-P", str(WORKER)]
        self._worker = OnDemandChild(self._command, ready_s=START_S)

    def __call__(self, rollout: Rollout, **columns: Any) -> float | None:
        """Return 1 if the answer equals the expected one, else 0; None if the latter is no formula.

        An answer that takes too long, or ends the process, is wrong: 0. Raises RewardUnavailable if
        the process does not start.
        """
        expected, answer = self.expected(columns), self.answer(rollout)
        request = {
            "expected": as_text(expected),
            "answer": "" if answer is None else as_text(answer),
            "seconds": ceil(self._answer_s),
        }
        try:
            equal: bool | None = self._worker.ask(request, limit_s=GRACE * self._answer_s)
        except ChildNotReady as error:
            command = " ".join(self._command)
            raise RewardUnavailable(
                f"the process for math-verify did not start; {command} says why"
            ) from error
        except ChildGone:  # no reply in time, or the process ended
            return 0.0
        return None if equal is None else float(equal)
