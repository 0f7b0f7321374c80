"""Answers as server-sent events."""

from __future__ import annotations

import json
from typing import Any


def unsent(text: str, earlier: str) -> str:
    """Return the part of an answer's text that a stream has not sent; `earlier` was sent.

    Examples::

        unsent("It is 7", "It")   -> " is 7"
        unsent("It", "It  ")      -> ""         blanks at the end, which the answer lacks, were sent
        unsent("It is 7", "<to")  -> "It is 7"  the parser has changed its reading of the beginning

    In the last case nothing that was sent can be taken back. The client gets the whole text behind
    it, so that the text is complete at least.
    """
    if text.startswith(earlier):
        return text[len(earlier) :]
    return "" if earlier.startswith(text) else text


def to_json(value: Any) -> str:
    """Return a value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def event_text(data: Any, name: str | None = None) -> str:
    """Return a server-sent event."""
    event = "" if name is None else f"event: {name}\n"
    return f"{event}data: {to_json(data)}\n\n"
