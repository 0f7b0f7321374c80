"""A client of OpenAI's chat completions, as vLLM, llama.cpp and others serve them too.

It retries transient failures, and distinguishes failures of the server, of one conversation, and of
the settings.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

import httpx

from agenttrain.utils.redaction import hide_secrets, is_web_address
from agenttrain.utils.role_names import role_named

RETRIED_STATUSES = (408, 409, 425, 429)
"""HTTP statuses, besides 5xx, after which another try makes sense."""
CONVERSATION_STATUSES = (400, 413, 422)
"""HTTP statuses that refuse one conversation (too long, say), and not the settings."""
LONGEST_WAIT_S = 60.0
T = TypeVar("T")


class ChatUnavailable(Exception):
    """There is no usable reply, after all tries, or the server refuses this conversation."""


class Transient(Exception):
    """Failure after which another try makes sense; also of a reply that a caller cannot read."""

    wait_s = 0.0
    """Seconds that the server asks to wait before the next try."""


class ChatBackend(Protocol):
    """Servers that answer chat completions, but have no address that stays the same."""

    name: str
    """The url in settings and messages for which it stands: ``role:judge``."""

    def complete(self, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Return the JSON of the answer; any thread may call it.

        Raises Transient, and ChatUnavailable where another try would not help.
        """


class ChatApi:
    """One model of one server, reached by its address or through a ChatBackend.

    Example: ``ChatApi(url="http://localhost:8000/v1", model="m").ask(messages, str)`` ->
    ``"Hello!"``

    The key is read from the environment variable `api_key_env` and is never written to a file.
    """

    def __init__(
        self,
        *,
        url: str | ChatBackend,
        model: str | None = None,
        api_key_env: str | None = None,
        retries: int = 4,
        backoff_s: float = 1.0,
        request_timeout_s: float = 120.0,
        temperature: float = 0.0,
        max_tokens: int = 1024,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the settings; `extra` is sent along, e.g. {response_format: {…}}.

        The `url` is an address, or ``role:<name>`` for the servers of a role of the run. Such a url
        can be checked, but not asked: a run passes the role's ChatBackend in its place, whose name
        is that url. Raises ValueError that begins with the setting and its value.
        """
        self._server = None if isinstance(url, str) else url
        """The servers of a role; None for an address, and outside a run."""
        url = url if isinstance(url, str) else url.name
        self._role = role_named(url)
        """The name in a url ``role:<name>``; None for an address."""
        if self._role is not None:
            for name, value in (("model", model), ("api_key_env", api_key_env)):
                if value is None:
                    continue
                raise ValueError(
                    f"{name}={value}: has no effect with url={url}; leave it out, and name "
                    f"the model with roles.{self._role}.model"
                )
        elif not is_web_address(url):
            raise ValueError(
                f"url={hide_secrets(url)}: must be a whole address from http:// on, up to /v1; "
                "role:judge, say, stands for servers of the run"
            )
        if "@" in urlsplit(url).netloc:
            raise ValueError(
                f"url={hide_secrets(url)}: holds credentials, which the run's "
                "files would keep; name the environment variable that holds the key with "
                "api_key_env"
            )
        if self._role is None and model is None:
            raise ValueError(
                f"model=null: name the model as the server of url={hide_secrets(url)} does"
            )
        if retries < 0 or backoff_s < 0:
            raise ValueError(f"retries={retries}: it and backoff_s={backoff_s} must be 0 or more")
        if not request_timeout_s > 0:
            raise ValueError(f"request_timeout_s={request_timeout_s}: must be more than 0")
        self.address = url if self._role else with_path(url, "/chat/completions")
        self._shown_address = hide_secrets(self.address)
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
            "model": model or self._role,
            "temperature": temperature,
            "max_tokens": max_tokens,
            **(extra or {}),
        }

    def ask(
        self, messages: Sequence[Mapping[str, Any]], read: Callable[[str], T], **body: Any
    ) -> T:
        """Return the model's reply to the messages, parsed by `read`.

        Failures of the server, and replies for which `read` raises Transient, are tried again
        `retries` times, each time after twice the wait. Then it raises ChatUnavailable. Raises
        ValueError at once for a key or an address that the server refuses.
        """
        request = {**self._body, **body, "messages": messages}
        for attempt in range(self._retries + 1):
            try:
                return read(self._post(request))
            except Transient as error:
                if attempt == self._retries:
                    raise ChatUnavailable(
                        f"{self._shown_address}: {error} (after {attempt + 1} tries)"
                    ) from error
                # A generator of its own: waits must not change the run's random state.
                jitter = random.Random().uniform(0.5, 1.0)
                backoff_s = self._backoff_s * 2**attempt * jitter
                time.sleep(min(max(backoff_s, error.wait_s), LONGEST_WAIT_S))
        raise AssertionError("unreachable: the last try returns or raises")

    @cached_property
    def _client(self) -> httpx.Client:
        return httpx.Client(timeout=self._timeout_s, headers=self._headers)

    def _post(self, request: Mapping[str, Any]) -> str:
        """Return the text of the server's reply."""
        if self._server is not None:
            return _content(self._server.complete(request, timeout_s=self._timeout_s))
        if self._role is not None:
            raise ValueError(
                f"url={self.address}: only a run that trains or evaluates has the servers of a "
                "role; give an address, e.g. url=http://localhost:8000/v1"
            )
        try:
            response = self._client.post(self.address, json=request)
        except httpx.TransportError as error:
            raise Transient(hide_secrets(f"{type(error).__name__}: {error}")) from error
        status = response.status_code
        answer = hide_secrets(f"{status} {response.text[:300]!r}")
        if status in RETRIED_STATUSES or status >= 500:
            transient = Transient(answer)
            with suppress(KeyError, ValueError):  # absent, or a date
                transient.wait_s = float(response.headers["retry-after"])
            raise transient
        if status in CONVERSATION_STATUSES:  # it refuses this conversation, not the settings
            raise ChatUnavailable(f"{self._shown_address}: {answer}")
        if status != 200:
            raise ValueError(
                f"{self._shown_address} answers {answer}; check url, model and api_key_env"
            )
        try:
            return _content(response.json())
        except ValueError as error:
            raise Transient(f"no chat completion: {response.text[:300]!r}") from error


def with_path(url: str, path: str) -> str:
    """Return an address with more path, before its query.

    Example: ``with_path("http://h/v1?key=a", "/chat")`` -> ``"http://h/v1/chat?key=a"``.
    """
    parts = urlsplit(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + path))


def _content(answer: Any) -> str:
    """Return the text of a chat completion; raises Transient."""
    try:
        return str(answer["choices"][0]["message"]["content"] or "")
    except (LookupError, TypeError) as error:
        raise Transient(f"no chat completion: {str(answer)[:300]!r}") from error
