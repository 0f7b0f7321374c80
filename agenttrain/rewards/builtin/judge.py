"""`judge`: a language model's score, over the chat API of OpenAI, vLLM and others."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any
from urllib.parse import urlsplit

import httpx
import regex

from agenttrain.rewards.builtin.answers import as_text
from agenttrain.rewards.builtin.format import rollout_view
from agenttrain.rewards.function import RewardUnavailable
from agenttrain.tools.config import without_password
from agenttrain.types import Rollout
from agenttrain.utils.expressions import compiled
from agenttrain.utils.text_templates import TextTemplate

OF_THE_ROLLOUT = ("question", "final", "conversation", "tool_calls", "stop_reason")
"""Fields of a prompt besides the row's columns."""
PASSING = (408, 409, 425, 429)
"""HTTP statuses, besides 5xx, after which another try makes sense."""
ABOUT_THIS_ONE = (400, 413, 422)
"""HTTP statuses for this conversation (too long, say), not for the settings."""
LONGEST_WAIT_S = 60.0


class _Transient(Exception):
    """Failure after which another try makes sense."""

    wait_s = 0.0
    """Seconds that the server asks to wait before the next try."""


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
        url: str,
        model: str,
        prompt: str,
        system: str | None = None,
        pattern: str | None = None,
        json_path: str | None = None,
        low: float = 0.0,
        high: float = 1.0,
        api_key_env: str | None = None,
        retries: int = 4,
        backoff_s: float = 1.0,
        request_timeout_s: float = 120.0,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the settings; `extra` is sent along, e.g. {response_format: {…}}."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"url={url}: must begin with http:// or https://, up to /v1")
        if "@" in urlsplit(url).netloc:
            raise ValueError(
                f"url={without_password(url)}: holds credentials, which the run's files would "
                "keep; name the environment variable that holds the key with api_key_env"
            )
        if not low < high:
            raise ValueError(f"low={low}: must be below high={high}")
        if retries < 0 or backoff_s < 0:
            raise ValueError(f"retries={retries}: it and backoff_s={backoff_s} must be 0 or more")
        if not request_timeout_s > 0:
            raise ValueError(f"request_timeout_s={request_timeout_s}: must be more than 0")
        self._address = f"{url.rstrip('/')}/chat/completions"
        self._prompt, self._system = TextTemplate(prompt, "prompt"), system
        self._score = _ScoreReader(pattern, json_path, low, high)
        self._retries, self._backoff_s = retries, backoff_s
        self._timeout_s = request_timeout_s
        self._headers: dict[str, str] = {}
        if api_key_env is not None:
            if not os.environ.get(api_key_env):
                raise ValueError(
                    f"api_key_env={api_key_env}: that environment variable is not set; export it, "
                    "or set null for a server that wants no key"
                )
            self._headers = {"Authorization": f"Bearer {os.environ[api_key_env]}"}
        self._body = {
            "model": model,
            "temperature": temperature,
            "max_tokens": max_tokens,
            **(extra or {}),
        }
        self.columns = tuple(name for name in self._prompt.fields if name not in OF_THE_ROLLOUT)

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        view = rollout_view(rollout)
        # All messages as plain text, with calls and replies in their places.
        lines: list[str] = []
        first, *others = rollout.trajectories
        # The prompts of the others show again what came before.
        for message in chain(first.messages, *(other.added_messages for other in others)):
            if message.get("content"):
                lines.append(f"[{message['role']}] {message['content']}")
            for call in message.get("tool_calls") or ():
                function = call["function"]
                lines.append(f"[call] {function['name']}({as_text(function.get('arguments', {}))})")
        questions = [m["content"] for m in rollout.task.messages if m["role"] == "user"]
        fields = {
            "question": questions[-1] if questions else "",
            "final": view["final"],
            "conversation": "\n".join(lines),
            "tool_calls": view["tool_calls"],
            "stop_reason": view["stop_reason"],
        }
        messages = [{"role": "user", "content": self._prompt.fill({**columns, **fields})}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system})
        body = {**self._body, "messages": messages}
        for attempt in range(self._retries + 1):
            try:
                return self._score.read(self._ask(body))
            except _Transient as error:
                if attempt == self._retries:
                    raise RewardUnavailable(
                        f"{self._address}: {error} (after {attempt + 1} tries)"
                    ) from error
                # A generator of its own: waits must not change the run's random state.
                doubled = self._backoff_s * 2**attempt * random.Random().uniform(0.5, 1.0)
                time.sleep(min(max(doubled, error.wait_s), LONGEST_WAIT_S))
        raise AssertionError("unreachable: the last try returns or raises")

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=self._timeout_s, headers=self._headers)

    def _ask(self, body: Mapping[str, Any]) -> str:
        """Return the text of the server's reply."""
        try:
            response = self._client.post(self._address, json=body)
        except httpx.TransportError as error:
            raise _Transient(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        answer = f"{status} {response.text[:300]!r}"
        if status in PASSING or status >= 500:
            transient = _Transient(answer)
            with suppress(KeyError, ValueError):  # absent, or a date
                transient.wait_s = float(response.headers["retry-after"])
            raise transient
        if status in ABOUT_THIS_ONE:
            raise RewardUnavailable(f"{self._address}: {answer}")
        if status != 200:
            raise ValueError(f"{self._address} answers {answer}; check url, model and api_key_env")
        try:
            return str(response.json()["choices"][0]["message"]["content"] or "")
        except (ValueError, LookupError, TypeError) as error:
            raise _Transient(f"no chat completion: {response.text[:300]!r}") from error


@dataclass(slots=True)
class _ScoreReader:
    """Finds the score in a reply."""

    pattern: str | None
    json_path: str | None
    low: float
    high: float
    _find: Any = None

    def __post_init__(self) -> None:
        if (self.pattern is None) == (self.json_path is None):
            raise ValueError(
                f"json_path={self.json_path}: give either it or a pattern (pattern=null), to find "
                "the score in the reply"
            )
        if self.json_path is not None:
            self._find = compiled(self.json_path, "json_path")
            return
        try:
            self._find = regex.compile(str(self.pattern))
        except regex.error as error:
            raise ValueError(
                f"pattern={self.pattern}: {error.msg} (position {error.pos})"
            ) from error
        if self._find.groups != 1:
            raise ValueError(f"pattern={self.pattern}: needs one group, which is the score")

    def read(self, text: str) -> float:
        """Return the scaled score. Raises _Transient if there is none in range."""
        if self.pattern is not None:
            matches = self._find.findall(text)
            score: Any = matches[-1] if matches else None
        else:
            start, end = text.find("{"), text.rfind("}")
            try:
                score = self._find.search(json.loads(text[start : end + 1]))
            except ValueError:
                score = None
        try:
            value = float(score)
        except (TypeError, ValueError):
            raise _Transient(f"no score in the reply {text[-300:]!r}") from None
        if not self.low <= value <= self.high:
            raise _Transient(f"the score {value:g} is not in [{self.low:g}, {self.high:g}]")
        return (value - self.low) / (self.high - self.low)
