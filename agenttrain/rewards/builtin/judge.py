"""`judge`: a language model's score, over the chat API of OpenAI, vLLM and others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Any

import regex

from agenttrain.rewards.builtin.answers import as_text
from agenttrain.rewards.builtin.format import rollout_view
from agenttrain.rewards.function import RewardUnavailable
from agenttrain.types import Message, Rollout
from agenttrain.utils.chat_api import ChatApi, ChatBackend, ChatUnavailable, Transient
from agenttrain.utils.content import parts, text_of
from agenttrain.utils.data_fields import Data, DataWhere
from agenttrain.utils.expressions import compiled
from agenttrain.utils.role_names import is_role
from agenttrain.utils.text_templates import TextTemplate

ROLLOUT_FIELDS = ("question", "final", "conversation", "tool_calls", "stop_reason")
"""Fields of a prompt besides the row's columns."""


class Judge:
    """A model's score of the rollout, scaled from [`low`, `high`] to [0, 1].

    `prompt` may contain columns of the row, as ``{{ answer }}``, and `question` (the last user
    message of the prompt), `final` (the last assistant message), `conversation` (all messages with
    tool calls and replies), `tool_calls` (a list) and `stop_reason`. The score is the last match of
    `pattern` in the reply, or, with `json_path`, a JMESPath expression over the JSON object in it.

    Failures of the server and replies without a score are tried again `retries` times, each time
    after twice the wait. Then it raises RewardUnavailable. Raises ValueError for a key or an
    address that the server refuses, because another try would not help.

    The key is read from the environment variable `api_key_env` and is never written to a file.
    """

    def __init__(
        self,
        *,
        url: Annotated[str | ChatBackend, DataWhere(is_role)],
        model: Data[str | None] = None,
        prompt: Data[str],
        system: Data[str | None] = None,
        pattern: Data[str | None] = None,
        json_path: Data[str | None] = None,
        low: Data[float] = 0.0,
        high: Data[float] = 1.0,
        api_key_env: str | None = None,
        retries: Data[int] = 4,
        backoff_s: Data[float] = 1.0,
        request_timeout_s: Data[float] = 120.0,
        temperature: Data[float] = 0.0,
        max_tokens: Data[int] = 1024,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the settings. `extra` is sent along, e.g. {response_format: {…}}."""
        self._api = ChatApi(
            url=url,
            model=model,
            api_key_env=api_key_env,
            retries=retries,
            backoff_s=backoff_s,
            request_timeout_s=request_timeout_s,
            temperature=temperature,
            max_tokens=max_tokens,
            extra=extra,
        )
        if not low < high:
            raise ValueError(f"low={low}: must be below high={high}")
        self._prompt, self._system = TextTemplate(prompt, "prompt"), system
        self._score = _ScoreReader(pattern, json_path, low, high)
        self.columns = tuple(name for name in self._prompt.fields if name not in ROLLOUT_FIELDS)

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return the judge's score, scaled to [0, 1]; raise RewardUnavailable without a score."""
        view = rollout_view(rollout)
        first, *later = rollout.trajectories
        # The prompts of later trajectories repeat earlier messages: only their own are shown.
        messages_shown = chain(first.messages, *(t.added_messages for t in later))
        fields = {
            "question": last_question(rollout),
            "final": view["final"],
            "conversation": as_lines(messages_shown),
            "tool_calls": view["tool_calls"],
            "stop_reason": view["stop_reason"],
        }
        messages = [{"role": "user", "content": self._prompt.fill({**columns, **fields})}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            return self._api.ask(messages, self._score.read)
        except ChatUnavailable as error:
            raise RewardUnavailable(str(error)) from error


def as_lines(messages: Iterable[Message]) -> str:
    """Return messages as plain text, with calls and replies in their places.

    Example: ``[user] What is 3 + 4?``, ``[call] add({"a": 3, "b": 4})``, ``[tool] 7``.
    """
    lines: list[str] = []
    for message in messages:
        if message.get("content"):
            lines.append(f"[{message['role']}] {text_of(parts(message['content']))}")
        for call in message.get("tool_calls") or ():
            function = call["function"]
            lines.append(f"[call] {function['name']}({as_text(function.get('arguments', {}))})")
    return "\n".join(lines)


def last_question(rollout: Rollout) -> str:
    """Return the last user message of the task's prompt; "" if it has none."""
    user_messages = [m for m in rollout.task.messages if m["role"] == "user"]
    return text_of(parts(user_messages[-1]["content"])) if user_messages else ""


@dataclass(slots=True)
class _ScoreReader:
    """Finds the score in a reply, by a regular or a JMESPath expression, and scales it."""

    pattern: str | None
    json_path: str | None
    low: float
    """Score of the reply that becomes 0; `high` becomes 1."""
    high: float
    _compiled: Any = None
    """The compiled `pattern` or `json_path`."""

    def __post_init__(self) -> None:
        """Compile the pattern or the path; raises ValueError, which begins with the argument."""
        if (self.pattern is None) == (self.json_path is None):
            raise ValueError(
                f"json_path={self.json_path}: give either it or a pattern (pattern=null), to find "
                "the score in the reply"
            )
        if self.json_path is not None:
            self._compiled = compiled(self.json_path, "json_path")
            return
        try:
            self._compiled = regex.compile(str(self.pattern))
        except regex.error as error:
            raise ValueError(
                f"pattern={self.pattern}: {error.msg} (position {error.pos})"
            ) from error
        if self._compiled.groups != 1:
            raise ValueError(f"pattern={self.pattern}: needs one group, which is the score")

    def read(self, text: str) -> float:
        """Return the scaled score. Raises Transient if there is none in range."""
        if self.pattern is not None:
            matches = self._compiled.findall(text)
            score: Any = matches[-1] if matches else None
        else:  # the object within the text: ``So I say {"score": 4}.``
            start, end = text.find("{"), text.rfind("}")
            try:
                score = self._compiled.search(json.loads(text[start : end + 1]))
            except ValueError:
                score = None
        try:
            value = float(score)
        except (TypeError, ValueError):
            raise Transient(f"no score in the reply {text[-300:]!r}") from None
        if not self.low <= value <= self.high:
            raise Transient(f"the score {value:g} is not in [{self.low:g}, {self.high:g}]")
        return (value - self.low) / (self.high - self.low)
