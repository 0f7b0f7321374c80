"""Regular expressions of others: they may take for ever, so each has a limit."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import regex

SECONDS = 1.0
"""How long one search may take. Only patterns that backtrack without end come near it."""
# `(?=[\s\S]*?X)` is tried at every position, which is quadratic where X is missing: one search for
# X says the same.
_AHEAD = regex.compile(r"\(\?=(?:\[\\s\\S\]|\.)\*\??((?:[^()\\|]|\\.)+)\)", regex.DOTALL)


@dataclass(frozen=True, slots=True)
class Hit:
    """A match, as far as it matters here."""

    start: int
    end: int
    groups: dict[str, str | None]


class Pattern:
    """A compiled expression, in which ``.`` matches newlines. Raises ValueError if it is wrong."""

    def __init__(self, source: Any, key: str) -> None:
        if not isinstance(source, str):
            raise ValueError(f"{key}: must be a regular expression, not {source!r}")
        self.source = source
        ahead = _AHEAD.fullmatch(source)
        try:
            self._compiled = regex.compile(ahead[1] if ahead else source, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{key}: {source!r} is no regular expression: {error}") from error
        self._ahead = ahead is not None
        self.names = tuple(self._compiled.groupindex)

    def search(self, text: str, start: int = 0) -> Hit | None:
        """The first match from `start`, or None; None too when the search takes too long."""
        found = self.match(text, start)
        if found is None:
            return None
        if self._ahead:
            return Hit(start, start, {})
        return Hit(found.start(), found.end(), found.groupdict())

    def match(self, text: str, start: int = 0) -> Any:
        """The library's own match object, for groups without names."""
        try:
            return self._compiled.search(text, start, timeout=SECONDS)
        except TimeoutError:
            return None

    def matches(self, text: str) -> list[Any]:
        """All matches; they end early when the search takes too long."""
        found: list[Any] = []
        with suppress(TimeoutError):
            # Collected at once: the limit would count what the caller does between matches.
            found.extend(self._compiled.finditer(text, timeout=SECONDS))
        return found

    def substitute(self, replacement: str, text: str) -> str:
        """`text` with every match replaced; unchanged when that takes too long."""
        try:
            return self._compiled.sub(replacement, text, timeout=SECONDS)
        except TimeoutError:
            return text
