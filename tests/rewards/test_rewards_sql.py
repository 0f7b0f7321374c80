"""The reward for queries, by the results on a real database."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reward_cases import called, made, reward

from agenttrain.rewards.builtin.sql_result import SqlResult
from agenttrain.rewards.function import RewardError

ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n"


def things(columns: Mapping[str, Any]) -> sqlite3.Connection:
    """A database with lamp 2, desk 7, bed 7."""
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.executescript(
        "CREATE TABLE things (name TEXT, price INTEGER);"
        "INSERT INTO things VALUES ('lamp', 2), ('desk', 7), ('bed', 7);"
    )
    return connection


def score(query: str, expected: str, **settings: Any) -> float | None:
    handed_in = made("", called("final_answer", answer=query), query=expected)
    return reward(SqlResult(connect=things, **settings), handed_in)


@pytest.mark.parametrize(
    ("query", "expected", "value"),
    [
        ("SELECT name FROM things WHERE price > 5", "SELECT name FROM things WHERE price = 7", 1),
        # Any order of rows, unless the row's query sorts.
        ("SELECT name FROM things ORDER BY name", "SELECT name FROM things", 1),
        ("SELECT name FROM things", "SELECT name FROM things\nORDER  BY name", 0),
        # A subquery, a window, a text and a comment that sort leave the order of rows open.
        (
            "SELECT name FROM things ORDER BY name",
            "SELECT name FROM (SELECT (name) AS name FROM things ORDER BY price)",
            1,
        ),
        (
            "SELECT name, 1 FROM things ORDER BY name",
            "SELECT name, count(*) OVER (PARTITION BY name ORDER BY price) FROM things "
            "ORDER BY name DESC",
            0,
        ),
        (
            "SELECT name, 1 FROM things ORDER BY name DESC",
            "SELECT name, count(*) OVER (PARTITION BY name ORDER BY price) FROM things",
            1,
        ),
        (
            "SELECT name, 'it''s (order by' FROM things ORDER BY name DESC",
            "SELECT name, 'it''s (order by' FROM things -- order by",
            1,
        ),
        # Each row as often as it occurs.
        ("SELECT DISTINCT price FROM things", "SELECT price FROM things", 0),
        ("SELECT price FROM things WHERE price = 7", "SELECT 7 UNION ALL SELECT 7", 1),
        # Columns in order.
        ("SELECT price, name FROM things", "SELECT name, price FROM things", 0),
        ("SELECT 2.0", "SELECT 2", 1),
        ("SELECT 'x'", "SELECT name FROM things WHERE 0", 0),
        ("SELECT foo FROM things", "SELECT 1", 0),
        ("DELETE FROM things", "SELECT 1", 0),
        ("", "SELECT 1", 0),
    ],
)
def test_results_are_compared(query: str, expected: str, value: float) -> None:
    assert score(query, expected) == value


def test_no_answer_and_a_query_without_end_earn_nothing() -> None:
    assert reward(SqlResult(connect=things), made("SELECT 1", query="SELECT 1")) == 0.0
    assert score(ENDLESS, "SELECT 1", query_timeout_s=0.05) == 0.0


def test_huge_values_earn_nothing() -> None:
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"
    for query in (
        f"{endless} SELECT zeroblob(50000) FROM n",
        "SELECT zeroblob(1000000)",
    ):
        assert score(query, "SELECT 1") == 0.0


def test_a_wrong_query_of_the_row_stops_the_run() -> None:
    with pytest.raises(RewardError, match="'query' fails: no such column: foo"):
        score("SELECT 1", "SELECT foo FROM things")
    with pytest.raises(RewardError, match=r"max_rows=2: .* raise it"):
        score("SELECT 1", "SELECT name FROM things", max_rows=2)
    with pytest.raises(ValueError, match="max_rows=0"):
        SqlResult(connect=things, max_rows=0)


def test_a_database_file_is_opened_for_reading(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    sqlite3.connect(file).executescript("CREATE TABLE t (a); INSERT INTO t VALUES (1);")
    function = SqlResult(connect="agenttrain.data.spider.connect")
    handed_in = made(
        "",
        called("final_answer", answer="SELECT a FROM t"),
        query="SELECT 1",
        database=str(file),
    )
    assert reward(function, handed_in) == 1.0
