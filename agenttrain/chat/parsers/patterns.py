"""Regular expressions of users and models, which may backtrack for ever, with time limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, cast

import regex

LIMIT_S = 0.3
"""CPU time that one expression may take over one completion. Only an expression that backtracks
without end comes near it; it then matches nothing."""
SLOW_S = 0.02
"""Searches that take more CPU time are cached, so that the same text is always read the same way:
whether a search runs out of time depends on the machine's load."""
MAX_SLOW = 64
# A literal, with or without blanks after it, cannot backtrack: it needs no limit.
_LITERAL = regex.compile(r"(?:\\[^\w\s]|[^\\()\[\]{}.*+?|^$\s])+(?:\\s\*)?")
# Matches the source of a lookahead for an X without groups, `(?=[\s\S]*?X)`.
_AHEAD = regex.compile(r"\(\?=(?:\[\\s\\S\]|\.)\*\??((?:[^()\\|]|\\.)+)\)", regex.DOTALL)
_BUDGET: ContextVar[dict[str, float] | None] = ContextVar("seconds left", default=None)
_SLOW: dict[tuple, tuple[Any, float]] = {}
"""(expression, operation, its arguments) -> (result, seconds that it took)."""


@contextmanager
def search_budget() -> Iterator[None]:
    """Give each expression LIMIT_S of CPU time for all of its searches in the context together."""
    token = _BUDGET.set({})
    try:
        yield
    finally:
        _BUDGET.reset(token)


@dataclass(frozen=True, slots=True)
class Hit:
    """A match: its position and its named groups."""

    start: int
    end: int
    groups: dict[str, str | None]


class Pattern:
    """A compiled expression with a time limit; ``.`` matches newlines too.

    An expression may backtrack for ever. A search that runs out of time matches nothing
    (`_run_limited`). Two kinds of expressions are searched in a faster way, with the same result:
    a literal text (`text`) and a lookahead, ``(?=[\\s\\S]*?X)``. Raises ValueError for a wrong
    expression.
    """

    def __init__(self, source: Any, key: str, *, text: str | None = None) -> None:
        """`text`: the only text that the expression matches, if that is known; searched faster."""
        if not isinstance(source, str):
            raise ValueError(f"{key}: must be a regular expression, not {source!r}")
        self.source, self._text = source, text
        # The lookahead `(?=[\s\S]*?X)` matches the empty text at a position after which an X stands
        # anywhere. If there is none, it looks for X from every position, in quadratic time. So X
        # alone is compiled and searched once. `search` turns its match into that of the lookahead.
        lookahead = _AHEAD.fullmatch(source)
        try:
            self._compiled = regex.compile(lookahead[1] if lookahead else source, regex.DOTALL)
        except regex.error as error:
            raise ValueError(f"{key}: {source!r} is no regular expression: {error}") from error
        self._is_lookahead = lookahead is not None
        self._needs_no_limit = _LITERAL.fullmatch(source) is not None  # it cannot backtrack
        self.names = tuple(self._compiled.groupindex)

    def search(self, text: str, start: int = 0) -> Hit | None:
        """Return the first match from `start` on; None without one, or if it takes too long."""
        if self._text is not None:  # matches one literal text: no regular expression is needed
            at = text.find(self._text, start)
            return None if at < 0 else Hit(at, at + len(self._text), {})
        if self._needs_no_limit:  # a literal with blanks: it cannot backtrack and has no groups
            match = self._compiled.search(text, start)
            return None if match is None else Hit(match.start(), match.end(), {})
        match = self.find_match(text, start)  # with the time limit
        if match is None:
            return None
        if self._is_lookahead:
            # `match` is an X somewhere after `start`. So the lookahead matches at once: the empty
            # text at `start`.
            return Hit(start, start, {})
        return Hit(match.start(), match.end(), match.groupdict())

    def find_match(self, text: str, start: int = 0) -> Any:
        """Return the first match from `start` on as the library's object, with unnamed groups.

        None without one, or if it takes too long. For a lookahead, here and in `matches`, it is the
        match of its X.
        """
        return _run_limited(
            self.source,
            lambda seconds: self._compiled.search(text, start, timeout=seconds),
            "search",
            text,
            start,
        )

    def starts(self, text: str) -> list[int]:
        """Return the positions at which the matches begin."""
        if self._text is None:
            return [match.start() for match in self.matches(text)]
        positions = []
        at = text.find(self._text)
        while at >= 0:
            positions.append(at)
            at = text.find(self._text, at + len(self._text))
        return positions

    def matches(self, text: str) -> list[Any]:
        """Return all matches, or the first ones if the search takes too long."""

        def collect(seconds: float) -> list[Any]:
            """Return the matches that `seconds` of CPU time suffice for."""
            matches: list[Any] = []
            with suppress(TimeoutError):
                # `extend` keeps the matches before the error. A lazy iterator would count the
                # caller's own time too.
                matches.extend(self._compiled.finditer(text, timeout=seconds))
            return matches

        result = _run_limited(self.source, collect, "matches", text)
        return [] if result is None else cast(list[Any], result)  # None: no time was left

    def substitute(self, replacement: str, text: str) -> str:
        """Replace every match in a text; return it unchanged if that takes too long."""
        replaced = _run_limited(
            self.source,
            lambda seconds: self._compiled.sub(replacement, text, timeout=seconds),
            "substitute",
            replacement,
            text,
        )
        return text if replaced is None else cast(str, replaced)


def _run_limited(source: str, work: Callable[[float], Any], *operation: Any) -> Any:
    """Run `work(seconds)` with the seconds left to the expression `source`; None if they run out.

    `operation` names the work with its arguments, as a key for the cache of slow results. Each use
    of a cached result costs as many seconds as the first search, so that the same completion always
    runs out of time at the same place, and is read the same way.
    """
    budget = _BUDGET.get()  # expression -> seconds left; None outside of `search_budget`
    remaining = LIMIT_S if budget is None else budget.get(source, LIMIT_S)
    if remaining <= 0:
        return None
    key = (source, *operation)
    # While nothing is cached, the key is not looked up: hashing a long text takes time.
    cached = _SLOW.get(key) if _SLOW else None
    if cached is not None:
        result, spent = cached
    else:
        started = time.thread_time()  # CPU time: a busy machine makes no expression slow
        try:
            result = work(remaining)
            spent = time.thread_time() - started
        except TimeoutError:
            result, spent = None, remaining
        if spent > SLOW_S:
            if len(_SLOW) >= MAX_SLOW:
                _SLOW.pop(next(iter(_SLOW)))  # the oldest
            _SLOW[key] = (result, spent)
    if budget is not None:
        budget[source] = remaining - spent
    return result
