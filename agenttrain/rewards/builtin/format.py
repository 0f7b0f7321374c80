"""Rewards for the form of a model's text, which need no right answer.

They check a JSON schema, a regular expression, or a JMESPath expression over the rollout.
`rollout_view` is the rollout as plain data, for expressions and judges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import regex

from agenttrain.rewards.builtin.answers import assistant_messages, final_text, tool_answer
from agenttrain.rewards.function import last_main
from agenttrain.types import Rollout
from agenttrain.utils.data_fields import Data
from agenttrain.utils.expressions import compiled
from agenttrain.utils.json_validator import make_validator, schema_problem

FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class JsonSchema:
    """1 if the answer is JSON that the schema allows, else 0.

    The schema is a setting (`schema`) or a column of the row, as JSON text or as an object. The
    answer is the last message, perhaps inside a ```json fence. With `tool`, it is an argument of
    that tool's last valid call, or all arguments with ``argument=None``. Example: ``{"type":
    "object", "required": ["city"]}`` accepts ``{"city": "Oslo"}``.
    """

    def __init__(
        self,
        *,
        schema: Data[Mapping[str, Any] | None] = None,
        column: Data[str | None] = None,
        tool: Data[str | None] = None,
        argument: Data[str | None] = None,
    ) -> None:
        if (schema is None) == (column is None):
            raise ValueError(
                f"schema={schema}: give either a schema or the column that holds each row's"
            )
        if argument is not None and tool is None:
            raise ValueError(f"argument={argument}: of which tool? set tool=… too")
        self._column, self._tool, self._argument = column, tool, argument
        self.tools = () if tool is None else (tool,)
        self.columns = () if column is None else (column,)
        self._validator = None if schema is None else _validator(schema)

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return 1 if the answer is JSON that the schema allows, else 0."""
        validator = self._validator
        if validator is None:
            assert self._column is not None, "either a schema or a column is set"
            schema = columns[self._column]
            validator = _validator(json.loads(schema) if isinstance(schema, str) else schema)
        try:
            if self._tool is None:
                text = final_text(rollout).strip()
                match = FENCE.fullmatch(text)
                answer = json.loads(match[1] if match else text)
            else:
                answer = tool_answer(rollout, self._tool, self._argument)
                if answer is None:
                    return 0.0
                if isinstance(answer, str):
                    answer = json.loads(answer)
        except ValueError:  # no JSON
            return 0.0
        return float(validator.is_valid(answer))


def _validator(schema: Any) -> Any:
    """Return the validator of a JSON schema. Raises ValueError for an invalid schema."""
    if problem := schema_problem(schema):
        raise ValueError(f"schema={schema}: is no JSON schema: {problem}")
    return make_validator(schema)


MATCH_S = 1.0
"""Time limit of a match: some patterns would take years on some texts."""
PARTS = ("content", "reasoning")
TURNS = ("last", "all")


class Format:
    """1 if the pattern matches, else 0.

    `part` is the message's `content`, without reasoning and calls, or its `reasoning`. `turns` is
    the `last` assistant message or `all` of them. If `whole`, the pattern must match the whole
    text, not a part of it. `.` matches line ends too. Example:
    ``Format(pattern="Answer: [0-9]+")`` gives 1.0 to a last message ``Answer: 7``.
    """

    def __init__(
        self,
        *,
        pattern: Data[str],
        part: Data[str] = "content",
        turns: Data[str] = "last",
        whole: Data[bool] = True,
    ) -> None:
        """Compile the pattern, and check `part` and `turns`, which choose the texts to match."""
        for name, value, choices in (("part", part, PARTS), ("turns", turns, TURNS)):
            if value not in choices:
                raise ValueError(f"{name}={value}: must be one of {', '.join(choices)}")
        try:
            self._pattern = regex.compile(pattern, regex.DOTALL)
        except regex.error as error:
            raise ValueError(
                f"pattern={pattern!r}: is no regular expression: {error.msg} (position {error.pos})"
            ) from error
        self._key = "content" if part == "content" else "reasoning_content"
        self._all, self._whole = turns == "all", whole

    def __call__(self, rollout: Rollout) -> float:
        """Return 1 if the pattern matches the last message, or all of them, else 0."""
        messages = assistant_messages(rollout)
        messages = messages if self._all else messages[-1:]
        match = self._pattern.fullmatch if self._whole else self._pattern.search
        for message in messages:
            text = (message.get(self._key) or "").strip()
            try:
                if match(text, timeout=MATCH_S) is None:
                    return 0.0
            except TimeoutError:
                raise ValueError(
                    f"pattern={self._pattern.pattern!r} took over {MATCH_S:g} s on {len(text)} "
                    "characters; write it without nested repetitions"
                ) from None
        return float(bool(messages))  # 0 without a message


def rollout_view(rollout: Rollout) -> dict[str, Any]:
    """Return a rollout as JSON-like data, with the messages of its last `main` trajectory.

    Example::

        {"task_id": "shop-17", "rollout_id": "train-3-0-1", "row": {"answer": "Oslo"},
         "messages": [{"role": "user", "content": "…"}, {"role": "assistant", …}, …],
         "completion": [{"role": "assistant", …}, …],     # the messages after the prompt's
         "final": "It is Oslo.",                          # text of the last assistant message
         "tool_calls": [{"id": "c0", "name": "sql", "arguments": {"query": "…"},
                         "content": "Oslo", "error": None, "seconds": 0.01}],
         "stop_reason": "completed", "truncated": False, "turns": 2,
         "prompt_tokens": 61, "sampled_tokens": 43, "tokens": 127}

    `error` is None or a name of `ToolError`. Malformed calls are included, with the name "" if they
    have none.
    """
    first, last = rollout.trajectories[0], last_main(rollout)
    return {
        "task_id": rollout.task.task_id,
        "rollout_id": rollout.rollout_id,
        "row": dict(rollout.task.columns),
        "messages": last.messages,
        "completion": last.added_messages,
        "final": final_text(rollout),
        "tool_calls": [
            {
                "id": result.call.id,
                "name": result.call.name,
                "arguments": result.call.arguments,
                "content": result.content,
                "error": None if result.error is None else result.error.value,
                "seconds": result.seconds,
            }
            for result in rollout.tool_results
        ],
        "stop_reason": None if rollout.stop_reason is None else rollout.stop_reason.value,
        "truncated": rollout.truncated,
        "turns": rollout.turns,
        "prompt_tokens": first.prompt_length,
        "sampled_tokens": rollout.sampled_length,
        "tokens": rollout.length,
    }


class JMESPath:
    """The value of a JMESPath expression (https://jmespath.org) over `rollout_view`.

    true is 1, false is 0, and null means not applicable. Other values must be numbers.
    Example: ``JMESPath(expression="length(tool_calls[?error == null]) == `2`")`` gives 1.0 to a
    rollout with two good calls.
    """

    def __init__(self, *, expression: Data[str]) -> None:
        self._expression = compiled(expression, "expression")

    def __call__(self, rollout: Rollout, **columns: Any) -> float | None:
        value = self._expression.search(rollout_view(rollout))
        if value is None or isinstance(value, bool | int | float):
            return value
        raise ValueError(
            f"expression={self._expression.text!r} gave {value!r}; it must give a number, true, "
            "false, or null where it does not apply"
        )
