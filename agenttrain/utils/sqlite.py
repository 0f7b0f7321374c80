"""SELECT statements that a model wrote, on SQLite databases: read-only, with bounds.

with closing(open_read_only(Path("shop.db"))) as connection:
    restrict(connection)
    select(connection, "SELECT name FROM products", max_rows=20, limit_s=2.0)
"""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path
from typing import Any

ALLOWED_ACTIONS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
"""Actions that a statement may take; SQLite asks the authorizer while it prepares one."""
FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "printf", "format"})
"""The last two can fill a huge width, for seconds, before they check the size limit."""
SIZE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 1_000_000,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
"""Limits of values and queries: a function that works on a huge value cannot be interrupted."""
STEPS = 2_000
"""Steps of SQLite's virtual machine between two checks of the time."""


class QueryFailed(Exception):
    """A statement is wrong, not allowed, or takes too long; the text is for the model."""


def open_read_only(file: Path) -> sqlite3.Connection:
    """Open a database file for reading, in any thread."""
    uri = f"{file.resolve().as_uri()}?mode=ro"
    return sqlite3.connect(uri, uri=True, check_same_thread=False)


def restrict(connection: sqlite3.Connection) -> None:
    """Allow a connection nothing but SELECT statements of bounded size."""
    for limit, value in SIZE_LIMITS.items():
        connection.setlimit(limit, value)
    connection.isolation_level = None  # no implicit BEGIN
    connection.text_factory = lambda data: data.decode("utf-8", "replace")
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_authorize)


def select(
    connection: sqlite3.Connection, query: str, *, max_rows: int, limit_s: float
) -> list[tuple[Any, ...]]:
    """Return the first rows of a query on a restricted connection: one more than `max_rows`.

    Raises QueryFailed, also if it takes longer than `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
    try:
        cursor = connection.execute(query)
        rows = cursor.fetchmany(max_rows + 1)
        cursor.close()
    except (sqlite3.Error, sqlite3.Warning) as error:
        problem = str(error)
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_INTERRUPT:
            problem = f"the query took longer than {limit_s:g} s"
        # For CREATE and table-valued pragmas the code is that of a plain error.
        elif code == sqlite3.SQLITE_AUTH or problem == "not authorized":
            problem = "only SELECT is allowed"
        raise QueryFailed(problem) from error
    return rows


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow SELECT and harmless functions; SQLite passes a function's name as `second`."""
    allowed = action in ALLOWED_ACTIONS and not (
        action == sqlite3.SQLITE_FUNCTION and second in FORBIDDEN_FUNCTIONS
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY
