"""What a rollout answered: its last message, or what it handed in through a tool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agenttrain.types import Rollout


class AnswerReward:
    """Base of the rewards that compare a rollout's answer with a column of its row.

    With `tool` the answer is that argument of the tool's last valid call, without it (null) the
    text of the last assistant message.
    """

    def __init__(self, *, tool: str | None, argument: str, column: str) -> None:
        self._tool, self._argument, self._column = tool, argument, column
        self.tools = () if tool is None else (tool,)
        """Tools that it needs; without them it would be 0 for every rollout."""
        self.columns = (column,)
        """Columns that every row must have."""

    def answer(self, rollout: Rollout) -> Any:
        """None when there is none."""
        if self._tool is None:
            return final_text(rollout)
        return handed_in(rollout, self._tool, self._argument)

    def expected(self, columns: Mapping[str, Any]) -> Any:
        """The row's value; raises KeyError when the row has no such column."""
        if self._column not in columns:
            raise KeyError(f"it needs the column {self._column!r}, the row has {sorted(columns)}")
        return columns[self._column]


def handed_in(rollout: Rollout, tool: str, argument: str | None) -> Any:
    """An argument of the last valid call of `tool`; all its arguments for `argument=None`."""
    for result in reversed(rollout.tool_results):
        valid = result.error is None or not result.error.invalid_call
        if result.call.name == tool and valid:
            arguments = result.call.arguments
            return arguments if argument is None else arguments.get(argument)
    return None


def assistant_messages(rollout: Rollout) -> list[dict[str, Any]]:
    """The messages that the policy wrote, those of one trajectory after the other's."""
    added = (message for t in rollout.trajectories for message in t.added_messages)
    return [message for message in added if message["role"] == "assistant"]


def final_text(rollout: Rollout) -> str:
    """The text of the last assistant message, without its reasoning; empty when there is none."""
    written = assistant_messages(rollout)
    return (written[-1].get("content") or "") if written else ""


def as_text(value: Any) -> str:
    """A value as a model would write it: text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
