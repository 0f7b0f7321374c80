"""The `sql` tool on real databases: what it answers, and what no query can do."""

import asyncio
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from agenttrain.data.bundled import shop
from agenttrain.tools.build import build_toolbox
from agenttrain.tools.builtin.sql import Sql
from agenttrain.types import Task, ToolCall, ToolContext, ToolError, ToolFailure

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


def context(rollout_id: str = "r", **columns: object) -> ToolContext:
    task = Task(task_id="t", messages=(), columns=columns)
    return ToolContext(rollout_id=rollout_id, task=task, turn=0, call_id="c")


@pytest.fixture
def database(tmp_path: Path) -> str:
    path = tmp_path / "things.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            "CREATE TABLE things (id INTEGER, name TEXT, price REAL);"
            "INSERT INTO things VALUES (1, 'lamp', 2.5), (2, 'désk', NULL), (3, x'ff41', 7);"
        )
    return str(path)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("SELECT name FROM things WHERE id=1", "lamp"),
        ("SELECT id, name, price FROM things ORDER BY id LIMIT 2", "1, lamp, 2.5; 2, désk, NULL"),
        ("SELECT name FROM things WHERE id=9", "no rows"),
        ("SELECT CAST(name AS TEXT) FROM things WHERE id=3", "\ufffdA"),
        ("SELECT SUM(price) FROM things WHERE id=9", "NULL"),
        ("select upper(name) from things where id = 1;", "LAMP"),
        ("SELECT name FROM sqlite_master", "things"),
        ("WITH RECURSIVE n(i) AS (VALUES(1) UNION ALL SELECT i+1 FROM n LIMIT 3) SELECT i FROM n",
         "1; 2; 3"),
    ],
)  # fmt: skip
def test_answers(database, query, text):
    assert Sql(database=database)(query, context()) == text


def test_rows_beyond_the_limit_are_noted(database):
    sql = Sql(database=database, max_rows=2)
    assert sql("SELECT id FROM things", context()) == "1; 2; … (only the first 2 rows)"
    assert sql("SELECT id FROM things LIMIT 2", context()) == "1; 2"


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT foo FROM things", "no such column: foo"),
        ("SELECT '\ud800'", "the query is not valid Unicode"),
        ("SELECT FROM", "near \"FROM\": syntax error"),
        ("SELECT 1; SELECT 2", "You can only execute one statement at a time."),
        ("INSERT INTO things VALUES (4, 'x', 1)", "only SELECT is allowed"),
        ("UPDATE things SET price = 0", "only SELECT is allowed"),
        ("DELETE FROM things", "only SELECT is allowed"),
        ("DROP TABLE things", "only SELECT is allowed"),
        ("CREATE TABLE t (a)", "only SELECT is allowed"),
        ("CREATE TEMP TABLE t (a)", "only SELECT is allowed"),
        ("BEGIN", "only SELECT is allowed"),
        ("PRAGMA query_only = OFF", "only SELECT is allowed"),
        ("PRAGMA writable_schema = ON", "only SELECT is allowed"),
        ("SELECT * FROM pragma_table_info('things')", "only SELECT is allowed"),
        ("ATTACH DATABASE '/tmp/stolen.db' AS other", "only SELECT is allowed"),
        ("VACUUM INTO '/tmp/stolen.db'", "only SELECT is allowed"),
        ("SELECT printf('%.*c', 900000000, 'x')", "not authorized to use function: printf"),
        ("SELECT zeroblob(900000000)", "a text or blob has more than 50000 bytes"),
        (f"SELECT {', '.join(['random()'] * 1500)}", "the query is too complex"),
    ],
)  # fmt: skip
def test_what_no_query_can_do(database, query, message):
    before = Path(database).read_bytes()
    sql = Sql(database=database)
    with pytest.raises(ToolFailure) as caught:
        sql(query, context())
    assert str(caught.value) == message
    assert sql("SELECT COUNT(*) FROM things", context()) == "3"
    assert Path(database).read_bytes() == before


def test_no_extension_is_loaded(database):
    with pytest.raises(ToolFailure, match="not authorized to use function: load_ext"):
        Sql(database=database)("SELECT load_extension('/tmp/evil.so')", context())


def test_writes_to_a_rows_own_database_are_refused_too():
    sql = Sql(connect=shop.connect)
    with pytest.raises(ToolFailure, match="only SELECT is allowed"):
        sql("DELETE FROM orders", context(database_seed=3))
    assert sql("SELECT COUNT(*) FROM orders", context(database_seed=3)) == "60"


def test_an_endless_query_is_interrupted(database):
    sql = Sql(database=database, query_timeout_s=0.05)
    with pytest.raises(ToolFailure, match=r"^the query took longer than 0\.05 s$"):
        sql(ENDLESS, context())
    assert sql("SELECT 1", context()) == "1"


A_20_000 = "replace(hex(zeroblob(10000)), '0', 'a')"
B_20_000_THEN_A = "replace(hex(zeroblob(10000)), '0', 'b') || 'a'"


@pytest.mark.parametrize("trim", ["trim", "ltrim", "rtrim"])
def test_a_slow_function_is_not_slow(database, trim):
    query = f"SELECT length({trim}({A_20_000}, {B_20_000_THEN_A}))"
    # 400 million comparisons within one step of SQLite, which looks at the time between steps
    started = time.thread_time()
    assert Sql(database=database)(query, context()) == "0"
    assert time.thread_time() - started < 0.5


def test_trim_is_that_of_sqlite(database):
    arguments = ("'xyaxy', 'yx'", "' a ', ' '", "12.5, 1", "'aba', ''", "'a', NULL", "NULL, 'a'")
    query = (
        f"SELECT {', '.join(f'{f}({a})' for a in arguments for f in ('trim', 'ltrim', 'rtrim'))}"
    )
    with closing(sqlite3.connect(":memory:")) as connection:
        row = connection.execute(query).fetchone()
    expected = ", ".join("NULL" if value is None else value for value in row)
    assert Sql(database=database)(query, context()) == expected


def test_a_result_is_read_only_up_to_its_limit(database):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    with pytest.raises(ToolFailure, match=r"^the result has more than 20000000 bytes$"):
        Sql(database=database, max_rows=10_000)(
            f"{endless} SELECT zeroblob(50000) FROM n", context()
        )


def test_a_long_text_of_the_database_is_an_error_that_says_so(tmp_path):
    path = tmp_path / "long.db"
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE t (id, a)")
        connection.executemany(
            "INSERT INTO t VALUES (?, ?)", [(1, "é" * 24_990), (2, "é" * 30_000)]
        )
    sql = Sql(database=str(path))
    assert sql("SELECT a FROM t WHERE id = 1", context()) == "é" * 24_990
    with pytest.raises(ToolFailure, match=r"^a text or blob has more than 50000 bytes$"):
        sql("SELECT a FROM t", context())
    assert sql("SELECT id FROM t", context()) == "1; 2"


def test_a_row_has_its_own_database():
    sql = Sql(connect="agenttrain.data.bundled.shop.connect")
    query = "SELECT customer, product, quantity FROM orders WHERE id <= 5"
    found = []
    for seed in (1, 2):
        with closing(shop.connect({"database_seed": seed})) as connection:
            rows = connection.execute(query).fetchall()
        found.append("; ".join(", ".join(str(value) for value in row) for row in rows))
    assert found[0] != found[1]
    assert [sql(query, context(f"r{s}", database_seed=s)) for s in (1, 2, 1)] == [*found, found[0]]
    # An id that comes again, in another evaluation, must not meet the database of another row.
    assert sql(query, context("r1", database_seed=2)) == found[1]


def counting() -> tuple[list[sqlite3.Connection], Sql]:
    opened: list[sqlite3.Connection] = []

    def connect(columns: object) -> sqlite3.Connection:
        opened.append(sqlite3.connect(":memory:", check_same_thread=False))
        return opened[-1]

    return opened, Sql(connect=connect, max_connections=2)


def closed(connection: sqlite3.Connection) -> bool:
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 99)
    except sqlite3.ProgrammingError:
        return True
    return False


def test_a_rollouts_connection_is_kept_and_the_oldest_closed():
    opened, sql = counting()
    contexts = [context(f"r{i}") for i in range(3)]
    for index in (0, 1, 0, 2):  # r1 is the oldest when r2 comes
        sql("SELECT 1", contexts[index])
    assert [closed(connection) for connection in opened] == [False, True, False]
    sql("SELECT 1", contexts[0])
    assert len(opened) == 3
    sql.close()
    assert all(closed(connection) for connection in opened)


def test_a_rollout_id_with_another_task_closes_the_connection_of_the_first():
    opened, sql = counting()
    for question in ("first", "second"):
        sql("SELECT 1", context("r0", question=question))
    assert [closed(connection) for connection in opened] == [True, False]


def test_calls_at_once_have_a_connection_each():
    meet = threading.Barrier(2, timeout=20)
    opened: list[sqlite3.Connection] = []

    def connect(columns: object) -> sqlite3.Connection:
        meet.wait()  # both are inside before either has run its query
        opened.append(sqlite3.connect(":memory:", check_same_thread=False))
        return opened[-1]

    async def main() -> list[str]:
        toolbox = build_toolbox(
            {"sql": {"_target_": "agenttrain.tools.builtin.sql.Sql", "connect": connect}}
        )
        calls = [ToolCall(id=f"c{i}", name="sql", arguments={"query": f"SELECT {i}"}) for i in "12"]
        shared = context()
        contents = [r.content for r in await toolbox.execute(calls, lambda call: shared)]
        assert [closed(connection) for connection in opened].count(True) == 1
        await toolbox.aclose()
        return contents

    assert asyncio.run(main()) == ["1", "2"]
    assert all(closed(connection) for connection in opened)


def test_a_failed_query_is_a_failed_call(database):
    toolbox = build_toolbox(
        {
            "sql": {
                "_target_": "agenttrain.tools.builtin.sql.Sql",
                "database": database,
                "max_rows": 5,
            }
        }
    )
    call = ToolCall(id="c", name="sql", arguments={"query": "SELECT foo FROM things"})
    (result,) = asyncio.run(toolbox.execute([call], lambda call: context()))
    assert (result.content, result.error) == ("Error: no such column: foo", ToolError.exception)


def test_the_schema_is_short():
    function = build_toolbox(
        {"sql": {"_target_": "agenttrain.tools.builtin.sql.Sql", "connect": shop.connect}}
    ).schemas()[0]["function"]
    assert function == {
        "name": "sql",
        "description": "Run a read-only SQL query.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "One SELECT statement."}},
            "required": ["query"],
        },
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set one of them"),
        ({"database": "a.db", "connect": shop.connect}, "set one of them"),
        ({"database": "/nowhere/a.db"}, "there is no such file"),
        ({"connect": "agenttrain.data.bundled.shop.conect"}, r"did you mean 'connect'\?"),
        ({"connect": shop.connect, "max_rows": 0}, "all must be positive"),
    ],
)
def test_settings_that_cannot_work(settings, message):
    with pytest.raises(ValueError, match=message):
        Sql(**settings)
