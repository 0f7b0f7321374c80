"""A reward for queries: the model's gives the same rows as that of the row."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

from agenttrain.rewards.builtin.answers import AnswerReward
from agenttrain.types import Rollout
from agenttrain.utils.data_fields import Data
from agenttrain.utils.locate import locate
from agenttrain.utils.sqlite import QueryFailed, restrict, select

Rows = list[tuple[Any, ...]]
QUOTED_OR_COMMENT = re.compile(
    r"""'[^']*' | "[^"]*" | `[^`]*` | \[[^]]*\] | --[^\n]* | /\*.*?\*/""", re.VERBOSE | re.DOTALL
)
INNERMOST_PARENTHESES = re.compile(r"\([^()]*\)")


class SqlResult(AnswerReward):
    """1 if the handed-in query and the row's have equal results, else 0.

    The columns must be in the same order, and each row must occur equally often. The order of rows
    counts only if the row's own query sorts them (an ORDER BY that is not in parentheses). Queries
    run within `query_timeout_s` and `max_rows`, on a connection that can only read. `connect` opens
    it for the row's columns. A query of the model that fails earns 0; one of the row that
    fails stops the run. Example: for ``SELECT name FROM products WHERE price > 50`` the query
    ``SELECT name FROM products WHERE price >= 51`` earns 1 if all prices are whole numbers.
    """

    def __init__(
        self,
        *,
        connect: str | Callable[[Mapping[str, Any]], sqlite3.Connection],
        tool: Data[str | None] = "final_answer",
        argument: Data[str] = "answer",
        column: Data[str] = "query",
        max_rows: Data[int] = 10_000,
        query_timeout_s: Data[float] = 5.0,
    ) -> None:
        """`connect` is a function, or its dotted path, that opens a connection for a row's columns.

        `tool`, `argument` and `column` say where the two queries stand: see AnswerReward.
        """
        super().__init__(tool=tool, argument=argument, column=column)
        if max_rows < 1 or not query_timeout_s > 0:
            raise ValueError(
                f"max_rows={max_rows}, query_timeout_s={query_timeout_s}: both must be above 0"
            )
        self._connect = connect if callable(connect) else locate(connect, key="connect")
        self._max_rows, self._query_timeout_s = max_rows, query_timeout_s

    def __call__(self, rollout: Rollout, **columns: Any) -> float:
        """Return 1 if the rollout's query and the row's have equal results, else 0."""
        expected_query, query = str(self.expected(columns)), self.answer(rollout)
        if not isinstance(query, str) or not query.strip():
            return 0.0
        with closing(self._connect(columns)) as connection:
            restrict(connection)
            try:
                expected = self._rows(connection, expected_query)
            except QueryFailed as error:
                raise ValueError(
                    f"the query in the column {self._column!r} fails: {error}: {expected_query}"
                ) from error
            if len(expected) > self._max_rows:  # `_rows` returns one more if there are more
                raise ValueError(
                    f"max_rows={self._max_rows}: the query in the column {self._column!r} has more "
                    f"rows; raise it, or leave the question out: {expected_query}"
                )
            try:
                rows = self._rows(connection, query)
            except QueryFailed:
                return 0.0
        if sorts_rows(expected_query):
            return float(rows == expected)
        return float(Counter(rows) == Counter(expected))

    def _rows(self, connection: sqlite3.Connection, query: str) -> Rows:
        return select(connection, query, max_rows=self._max_rows, limit_s=self._query_timeout_s)


def sorts_rows(query: str) -> bool:
    """Return True if the query's own rows are sorted, not only those of a subquery or a window.

    Examples: True for ``SELECT a FROM t ORDER BY a``, False for ``SELECT rank() OVER (ORDER BY a)``
    and ``SELECT 'order by'``.
    """
    text, replaced = QUOTED_OR_COMMENT.sub(" ", query), 1
    while replaced:
        text, replaced = INNERMOST_PARENTHESES.subn(" ", text)
    return "order by" in " ".join(text.casefold().split())
