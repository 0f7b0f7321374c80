"""Answers as server-sent events."""

from __future__ import annotations

import json
from typing import Any


def unsent(text: str, earlier: str) -> str:
    """Return the part of an answer's text that a stream has not sent.

    It is all of the text if the text differs from what was sent: the parser reads the beginning of
    a completion in another way once it has more of it. Example: ``unsent("It is 7", "It")`` is
    ``" is 7"``.
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
