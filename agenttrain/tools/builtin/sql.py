"""`sql`: read-only queries on an SQLite database of the run, or of the row."""

from __future__ import annotations

import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agenttrain.types import Task, ToolContext, ToolFailure
from agenttrain.utils.data_fields import Data
from agenttrain.utils.locate import locate
from agenttrain.utils.sqlite import (
    LIMIT_S,
    MAX_ROWS,
    QueryFailed,
    answer_query,
    open_read_only,
    restrict,
)

Connect = Callable[[Mapping[str, Any]], sqlite3.Connection]


class Sql:
    """A tool that answers ``SELECT`` queries: ``Oslo``, ``3, lamp; 4, desk`` or ``no rows``.

    A rollout has one connection for all of its calls. Example::

        Sql(database="shop.db")
        Sql(connect="agenttrain.data.bundled.shop.connect")  # (row's columns) -> sqlite3.Connection
    """

    def __init__(
        self,
        *,
        database: Data[str | None] = None,
        connect: str | Connect | None = None,
        max_rows: Data[int] = MAX_ROWS,
        query_timeout_s: Data[float] = LIMIT_S,
        max_connections: Data[int] = 256,
    ) -> None:
        """Takes a `database` file, or `connect`, which opens a connection. Raises ValueError.

        Calls run in any thread, so a connection must allow that (`check_same_thread=False`). Longer
        results are cut to `max_rows` with a note. At most `max_connections` idle connections stay
        open.
        """
        if (database is None) == (connect is None):
            raise ValueError(
                f"database={database!r} and connect={connect!r}: set one of them, `database` to an "
                "SQLite file or `connect` to the dotted path of a function (columns) -> connection"
            )
        if max_rows < 1 or query_timeout_s <= 0 or max_connections < 1:
            raise ValueError(
                f"max_rows={max_rows}, query_timeout_s={query_timeout_s}, "
                f"max_connections={max_connections}: all must be positive"
            )
        self._connect: Connect
        if database is not None:
            file = Path(database).expanduser().resolve()
            if not file.is_file():
                raise ValueError(f"database={database!r}: there is no such file")
            self._connect = lambda columns: open_read_only(file)
        else:
            self._connect = connect if callable(connect) else locate(connect, key="connect")
        self._max_rows = max_rows
        self._query_timeout_s = query_timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._idle: OrderedDict[str, tuple[Task, sqlite3.Connection]] = OrderedDict()
        """Rollout -> (its task, its connection, which no call uses now); the oldest first."""

    def __call__(self, query: str, context: ToolContext) -> str:
        """Run a read-only SQL query.

        Args:
            query: One SELECT statement.
        """
        with self._connection(context) as connection:
            try:
                return answer_query(
                    connection, query, max_rows=self._max_rows, limit_s=self._query_timeout_s
                )
            except QueryFailed as error:
                raise ToolFailure(str(error)) from error

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            while self._idle:
                _, (_, connection) = self._idle.popitem()
                connection.close()

    @contextmanager
    def _connection(self, context: ToolContext) -> Iterator[sqlite3.Connection]:
        """Lend the rollout's connection to one call; concurrent calls get separate ones."""
        with self._lock:
            task, connection = self._idle.pop(context.rollout_id, (None, None))
        # A rollout id may come again with another task, whose database is another one.
        if connection is not None and task is not context.task:
            connection.close()
            connection = None
        if connection is None:
            connection = self._connect(context.task.columns)
            restrict(connection)
        try:
            yield connection
        finally:
            with self._lock:
                # A concurrent call of the rollout may have returned another connection: keep one.
                _, extra = self._idle.pop(context.rollout_id, (None, None))
                if extra is not None:
                    extra.close()
                self._idle[context.rollout_id] = (context.task, connection)
                while len(self._idle) > self._max_connections:
                    _, (_, oldest) = self._idle.popitem(last=False)
                    oldest.close()
