"""`json_schema`: the answer is JSON of a given shape."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from jsonschema import SchemaError
from jsonschema.validators import validator_for

from agenttrain.rewards.answer import final_text, handed_in
from agenttrain.types import Rollout

FENCE = re.compile(r"```(?:json)?\s*\n(.*)\n\s*```", re.DOTALL)


class JsonSchema:
    """1 if the answer is JSON that the schema allows, else 0.

    The schema is a setting (`schema`) or stands in a column of the row, as JSON text or as an
    object. The answer is the last message (also inside one ```json fence), or with `tool` an
    argument of its last valid call, all of them with ``argument=None``. Example: ``{"type":
    "object", "required": ["city"]}`` accepts ``{"city": "Oslo"}``.
    """

    def __init__(
        self,
        *,
        schema: Mapping[str, Any] | None = None,
        column: str | None = None,
        tool: str | None = None,
        argument: str | None = None,
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
        try:
            self._validator = None if schema is None else _validator(schema)
        except SchemaError as error:
            raise ValueError(f"schema={schema}: is no JSON schema: {error.message}") from error

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        validator = self._validator or _validator(_loaded(columns[str(self._column)]))
        try:
            if self._tool is None:
                text = final_text(rollout).strip()
                fenced = FENCE.fullmatch(text)
                answer = json.loads(fenced[1] if fenced else text)
            else:
                value = handed_in(rollout, self._tool, self._argument)
                if value is None:
                    return 0.0
                answer = _loaded(value)
        except ValueError:  # no JSON
            return 0.0
        return float(validator.is_valid(answer))


def _loaded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) else value


def _validator(schema: Any) -> Any:
    kind = validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)
