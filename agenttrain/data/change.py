"""Apply `data.map`, `data.prompt` and `data.system` to a row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agenttrain.config.expression import compiled
from agenttrain.config.schema import DataConfig
from agenttrain.config.text_template import TextTemplate
from agenttrain.data.rows import BadRow


class Change:
    """row -> row: columns mapped, the prompt filled in, the system message put before it.

    Example: with ``map: {answer: "split(solution, '#### ')[-1]"}``, ``prompt: "{{ question }}
    Think."`` and ``system: Be brief.`` the row ``{"question": "2+2?", "solution": "#### 4"}``
    becomes ``{"question": …, "solution": …, "answer": "4", "messages": [{"role": "system",
    "content": "Be brief."}, {"role": "user", "content": "2+2? Think."}]}``.
    """

    def __init__(self, config: DataConfig) -> None:
        """Raises ValueError for an expression or a text that cannot be read."""
        self._map = {k: compiled(text, f"data.map.{k}") for k, text in config.map.items()}
        self._prompt = None
        if config.prompt is not None:
            self._prompt = TextTemplate(config.prompt, "data.prompt")
        self._system = config.system
        self.mapped = dict(config.map)

    def __call__(self, row: Mapping[str, Any], *, fills_missing: bool = False) -> dict[str, Any]:
        """Return the changed row; raises BadRow with the setting that does not fit it.

        `fills_missing`: keys of messages and tools that are None may be made up, and are dropped.
        """
        changed = dict(row)
        for name, expression in self._map.items():
            try:
                changed[name] = expression.search(row)
            except ValueError as error:
                raise BadRow(f"data.map.{name}={error}") from error
        changed = {name: value for name, value in changed.items() if value is not None}
        messages = self._messages(changed)
        if isinstance(messages, list | tuple):
            changed["messages"] = [_message(m, fills_missing=fills_missing) for m in messages]
        if fills_missing and "tools" in changed:
            changed["tools"] = _without_none(changed["tools"])
        return changed

    def _messages(self, row: Mapping[str, Any]) -> Any:
        """Return the messages as a list, or whatever stands in their place."""
        messages = row.get("messages", row.get("prompt"))
        if self._prompt is not None:
            try:
                messages = self._prompt.fill(row)
            except ValueError as error:
                raise BadRow(str(error)) from error
        elif isinstance(messages, str) and messages.lstrip().startswith("[{"):
            try:
                json.loads(messages)
            except ValueError:
                pass  # a text after all
            else:
                name = "messages" if "messages" in row else "prompt"
                raise BadRow(
                    f"{name} is a text that holds a list; read it with "
                    f"data.map.messages='from_json({name})'"
                )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if self._system is None or not isinstance(messages, list | tuple) or not messages:
            return messages
        first = messages[0]
        if isinstance(first, Mapping) and first.get("role") == "system":
            return messages
        return [{"role": "system", "content": self._system}, *messages]


def _message(message: Any, *, fills_missing: bool) -> Any:
    """Join the text parts of a message and drop keys that say nothing."""
    if not isinstance(message, Mapping):
        return message
    if fills_missing:
        message = _without_none(message) | {"content": message.get("content")}
    kept = {k: value for k, value in message.items() if value is not None or k == "content"}
    parts = kept.get("content")
    if not isinstance(parts, list) or not parts:
        return kept
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            return kept
        if not isinstance(part.get("text"), str):
            return kept
    kept["content"] = "".join(part["text"] for part in parts)
    return kept


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
