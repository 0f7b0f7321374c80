"""The nearest known name, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'query'?)"` when a known name is near, else an empty text.

    Example: ``did_you_mean("qurey", ["query", "limit"]) == " (did you mean 'query'?)"``
    """
    near = get_close_matches(word[:100], list(known), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""
