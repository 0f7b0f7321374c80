"""Names in error messages: the nearest known one, and the first of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

LISTED = 4
"""Most names that `list_names` writes out."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'query'?)"` when a known name is near, else an empty text.

    Example: ``did_you_mean("qurey", ["query", "limit"]) == " (did you mean 'query'?)"``
    """
    near = get_close_matches(word[:100], list(known), n=1)
    return f" (did you mean '{near[0]}'?)" if near else ""


def list_names(names: Sequence[str]) -> str:
    """Join the first few names, and count the rest: ``a, b, c, d and 3 more``."""
    suffix = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + suffix
