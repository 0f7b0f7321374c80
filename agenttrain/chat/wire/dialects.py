"""The dialects of chat requests. A new one is a module beside `openai`, and a row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from agenttrain.chat.wire import anthropic, openai, responses
from agenttrain.chat.wire.normal import Answer, AnswerHead, FindIssued, Question
from agenttrain.chat.wire.openai import RequestError, read_object

ReadQuestion = Callable[[Mapping[str, Any], Mapping[str, str], FindIssued], Question]
"""Reads a request, given `chat_template.roles` and the answers issued so far. Raises
RequestError."""


class StreamWriter(Protocol):
    """Writes an answer as server-sent events while its text is sampled.

    `begin` comes first, then `add` for new text, then `end`. `fail` may take the place of any.
    """

    def begin(self) -> Iterator[str]:
        """Yield the events before any text."""

    def add(self, delta: Mapping[str, str]) -> Iterator[str]:
        """Yield the events of more text: of `content` and `reasoning_content`."""

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the rest of the complete answer."""

    def fail(self, error: RequestError) -> Iterator[str]:
        """Yield an error in place of the rest, or of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WireDialect:
    """How one API asks, answers and reports errors."""

    read: ReadQuestion
    """Reads a request to a training run's endpoint, which refuses or overrides sampling fields."""
    read_served: ReadQuestion | None = None
    """Reads a request to `agenttrain serve`, which follows every field that is read. None: `serve`
    does not speak the API."""
    body: Callable[[Answer], dict[str, Any]]
    """Returns an answer in one piece."""
    writer: Callable[[AnswerHead, bool], StreamWriter]
    """Returns the writer of a stream, which ends with its usage if the request asked for that."""
    error: Callable[[RequestError], dict[str, Any]]
    """Returns an error's body."""
    text_arguments: bool
    """Arguments of calls are a text, which may be malformed."""

    def question(self, body: bytes, roles: Mapping[str, str], find_issued: FindIssued) -> Question:
        """Read the body of a request to the endpoint. Raises RequestError."""
        question = self.read(read_object(body), roles, find_issued)
        question.size = len(body)
        return question

    def events(self, answer: Answer, include_usage: bool) -> Iterator[str]:
        """Yield a complete answer as server-sent events."""
        writer = self.writer(answer, include_usage)
        yield from writer.begin()
        yield from writer.end(answer)


DIALECTS = {
    "chat/completions": WireDialect(
        read=lambda data, roles, find_issued: openai.read_question(data, roles),
        read_served=lambda data, roles, find_issued: openai.read_served(data, roles),
        body=openai.completion_body,
        writer=openai.CompletionWriter,
        error=RequestError.body,
        text_arguments=True,
    ),
    "responses": WireDialect(
        read=responses.read_question,
        read_served=responses.read_served,
        body=responses.response_body,
        writer=responses.ResponseWriter,
        error=RequestError.body,
        text_arguments=True,
    ),
    "messages": WireDialect(
        read=lambda data, roles, find_issued: anthropic.read_question(data),
        body=anthropic.message_body,
        writer=anthropic.MessageWriter,
        error=anthropic.error_body,
        text_arguments=False,
    ),
}
"""Path after ``/v1/`` -> dialect."""
