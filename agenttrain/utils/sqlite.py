"""SELECT statements that a model wrote, on SQLite databases: read-only, with bounds.

with closing(open_read_only(Path("shop.db"))) as connection:
    restrict(connection)
    answer_query(connection, "SELECT name FROM products")  # "lamp; desk"
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

ALLOWED_ACTIONS = frozenset(
    {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
)
"""Actions that a statement may take; SQLite asks the authorizer while it prepares one."""
FORBIDDEN_FUNCTIONS = frozenset({"load_extension", "printf", "format"})
"""The last two can fill a huge width, for seconds, before they check the size limit."""
MAX_VALUE_BYTES = 50_000
"""Maximum length of a text or blob, those of the database included. SQLite cannot be interrupted
within a function: `instr` and `replace` take 0.05 s for the worst texts of this length."""
MAX_RESULT_BYTES = 20_000_000
"""Maximum sum of the lengths of all texts and blobs in a result."""
SIZE_LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: MAX_VALUE_BYTES,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_VDBE_OP: 2_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
"""Limits of values and queries. That of operations (VDBE_OP) bounds how many slow functions can
stand in a row, because SQLite is interrupted only where its program jumps."""
TRIM_FUNCTIONS = {"trim": str.strip, "ltrim": str.lstrip, "rtrim": str.rstrip}
MAX_ROWS = 20
"""Rows of a result that are shown to a model, unless it is set otherwise."""
LIMIT_S = 2.0
"""Seconds of a query, unless it is set otherwise."""
STEPS = 500
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
    # SQLite's own take the product of both lengths: 20 s for two texts of 40,000 characters.
    for name, strip in TRIM_FUNCTIONS.items():
        connection.create_function(name, 2, partial(_trim, strip), deterministic=True)
    connection.execute("PRAGMA query_only = ON")
    connection.set_authorizer(_authorize)


def select(
    connection: sqlite3.Connection, query: str, *, max_rows: int, limit_s: float
) -> list[tuple[Any, ...]]:
    """Return the first rows of a query on a restricted connection: one more than `max_rows`.

    Calls at once need a connection each. Two threads on one would wait for each other without end:
    one holds Python's lock (GIL) and sets the handler below, which waits for SQLite's lock, and the
    other holds that one and asks for Python's, to call the authorizer.

    Raises QueryFailed, also if it takes longer than `limit_s`, or if a value is longer than
    MAX_VALUE_BYTES or the result than MAX_RESULT_BYTES.
    """
    deadline = time.monotonic() + limit_s
    connection.set_progress_handler(lambda: time.monotonic() > deadline, STEPS)
    try:
        with closing(connection.execute(query)) as cursor:
            rows, total_bytes = [], 0
            for row in islice(cursor, max_rows + 1):
                rows.append(row)
                total_bytes += sum(len(value) for value in row if isinstance(value, str | bytes))
                if total_bytes > MAX_RESULT_BYTES:
                    raise QueryFailed(f"the result has more than {MAX_RESULT_BYTES} bytes")
    except MemoryError as error:
        raise QueryFailed("the query is too complex") from error
    except UnicodeEncodeError as error:  # JSON can name half of a surrogate pair
        raise QueryFailed("the query is not valid Unicode") from error
    except (sqlite3.Error, sqlite3.Warning) as error:
        problem = str(error)
        code = getattr(error, "sqlite_errorcode", None)
        if code == sqlite3.SQLITE_INTERRUPT:
            problem = f"the query took longer than {limit_s:g} s"
        elif code == sqlite3.SQLITE_TOOBIG:
            problem = f"a text or blob has more than {MAX_VALUE_BYTES} bytes"
        # For CREATE and table-valued pragmas the code is that of a plain error.
        elif code == sqlite3.SQLITE_AUTH or problem == "not authorized":
            problem = "only SELECT is allowed"
        raise QueryFailed(problem) from error
    return rows


def answer_query(
    connection: sqlite3.Connection,
    query: str,
    *,
    max_rows: int = MAX_ROWS,
    limit_s: float = LIMIT_S,
    max_characters: int | None = None,
) -> str:
    """Return the first rows of a query on a restricted connection as text for a model.

    Example: ``3, lamp; 4, desk``, or ``no rows``. A note says that more rows, or more than
    `max_characters`, were left out. Raises QueryFailed as `select`.
    """
    rows = select(connection, query, max_rows=max_rows, limit_s=limit_s)
    shown = [
        ", ".join("NULL" if value is None else str(value) for value in row)
        for row in rows[:max_rows]
    ]
    if len(rows) > max_rows:
        shown.append(f"… (only the first {max_rows} rows)")
    text = "; ".join(shown) or "no rows"
    if max_characters is not None and len(text) > max_characters:
        text = f"{text[:max_characters]}… (only the first {max_characters} characters)"
    return text


def _authorize(action: int, first: str | None, second: str | None, *_: str | None) -> int:
    """Allow SELECT and harmless functions; SQLite passes a function's name as `second`."""
    allowed = action in ALLOWED_ACTIONS and not (
        action == sqlite3.SQLITE_FUNCTION and second in FORBIDDEN_FUNCTIONS
    )
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _trim(strip: Callable[[str, str], str], value: Any, characters: Any) -> str | None:
    """Return SQLite's ``trim(value, characters)``, by Python's `strip` or a one-sided variant."""
    if value is None or characters is None:
        return None
    text, removed = (
        item.decode("utf-8", "replace") if isinstance(item, bytes) else str(item)
        for item in (value, characters)
    )
    return strip(text, "".join(set(removed)))
