"""`jmespath`: a reward without code, as an expression over the rollout."""

from __future__ import annotations

from typing import Any

from agenttrain.config.expression import compiled
from agenttrain.rewards.view import rollout_view
from agenttrain.types import Rollout


class JMESPath:
    """The value of a JMESPath expression (https://jmespath.org) over `view.rollout_view`.

    true is 1, false is 0, null is not applicable; anything else that is no number is an error.
    Example: ``JMESPath(expression="length(tool_calls[?error == null]) == `2`")`` gives 1.0 to a
    rollout with two good calls.
    """

    def __init__(self, *, expression: str) -> None:
        self._expression = compiled(expression, "expression")

    def __call__(self, rollout: Rollout, **columns: Any) -> float | None:
        value = self._expression.search(rollout_view(rollout))
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(
            f"expression={self._expression.text!r} gave {value!r}; it must give a number, true, "
            "false, or null where it does not apply"
        )
