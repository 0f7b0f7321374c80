"""The dialects of chat requests. A new one is a module beside `openai`, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from agenttrain.chat.wire import anthropic, openai
from agenttrain.chat.wire.http import event_text
from agenttrain.chat.wire.normal import Answer, Question
from agenttrain.chat.wire.openai import RequestError, read_object


@dataclass(frozen=True, slots=True, kw_only=True)
class WireDialect:
    """How one API asks, answers and reports errors."""

    read: Callable[[Mapping[str, Any], Mapping[str, str]], Question]
    """Reads a request, given `chat_template.roles`. Raises RequestError."""
    body: Callable[[Answer], dict[str, Any]]
    """Returns an answer in one piece."""
    events: Callable[[Answer, bool], Iterator[str]]
    """Yields an answer as server-sent events, with its usage if the request asked for that."""
    error: Callable[[RequestError], dict[str, Any]]
    """Returns an error's body."""
    error_name: str | None = None
    """Name of an error's event in a stream."""
    text_arguments: bool
    """Arguments of calls are a text, which may be malformed."""

    def question(self, body: bytes, roles: Mapping[str, str]) -> Question:
        """Read the body of a request. Raises RequestError."""
        return replace(self.read(read_object(body), roles), size=len(body))

    def error_event(self, error: RequestError) -> str:
        """Return an error as an event of a stream."""
        return event_text(self.error(error), self.error_name)


def _completion_events(answer: Answer, include_usage: bool) -> Iterator[str]:
    for chunk in openai.completion_chunks(answer, include_usage=include_usage):
        yield event_text(chunk)
    yield openai.DONE


def _message_events(answer: Answer, include_usage: bool) -> Iterator[str]:
    for name, data in anthropic.message_events(answer):
        yield event_text({"type": name, **data}, name)


DIALECTS = {
    "chat/completions": WireDialect(
        read=openai.read_question,
        body=openai.completion_body,
        events=_completion_events,
        error=RequestError.body,
        text_arguments=True,
    ),
    "messages": WireDialect(
        read=lambda data, roles: anthropic.read_question(data),
        body=anthropic.message_body,
        events=_message_events,
        error=anthropic.error_body,
        error_name="error",
        text_arguments=False,
    ),
}
"""Path behind ``/v1/`` -> dialect."""
