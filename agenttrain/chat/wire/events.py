"""Answers as server-sent events."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from agenttrain.chat.wire.normal import Answer


class StreamWriter(Protocol):
    """Writes an answer as server-sent events, as far as it is known."""

    def begin(self) -> Iterator[str]:
        """Yield the events before any text."""

    def add(self, delta: Mapping[str, str]) -> Iterator[str]:
        """Yield the events of more text: of `content` and `reasoning_content`."""

    def end(self, answer: Answer) -> Iterator[str]:
        """Yield the rest of the complete answer."""


def unsent(text: str, earlier: str) -> str:
    """Return the part of an answer's text that a stream has not sent.

    It is all of the text if its reading has changed, so that it differs from what was sent.
    """
    if text.startswith(earlier):
        return text[len(earlier) :]
    return "" if earlier.startswith(text) else text  # more was sent, such as blanks at the end


def to_json(value: Any) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event_text(data: Any, name: str | None = None) -> str:
    """Return a server-sent event."""
    event = "" if name is None else f"event: {name}\n"
    return f"{event}data: {to_json(data)}\n\n"
