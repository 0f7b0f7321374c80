"""Folders in Spider's layout: their rows, and the connections of the rows."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import spider_folder

from agenttrain.data.spider import connect, spider_rows
from agenttrain.tools.builtin.sql import Sql
from agenttrain.types import Task, ToolContext, ToolFailure


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return spider_folder.make(tmp_path)


def test_a_row_has_the_tables_the_question_and_the_query(folder: Path) -> None:
    rows = spider_rows(str(folder))
    assert [row["task_id"] for row in rows] == [
        "spider/train/0",
        "spider/train/1",
        "spider/train/2",
    ]
    tables, question = rows[0]["messages"][1]["content"].split("\n\n")
    assert tables.splitlines()[:2] == [
        "customers(name TEXT, city TEXT)",
        "products(name TEXT, price INTEGER, stock INTEGER)",
    ]
    assert question == "Which products cost more than 50?"
    assert rows[0]["query"] == "SELECT name FROM products WHERE price > 50"
    assert len(spider_rows(str(folder), split="dev", limit=1)) == 1
    # Spider's own archive.
    (folder / "train.json").rename(folder / "train_spider.json")
    assert spider_rows(str(folder)) == rows


def test_the_tool_reads_the_rows_database_and_writes_nothing(folder: Path) -> None:
    (row, *_) = spider_rows(str(folder))
    file = Path(row["database"])
    before = file.read_bytes()
    task = Task(task_id="t", messages=(), columns=row)
    context = ToolContext(rollout_id="r", task=task, turn=0, call_id="c")
    sql = Sql(connect="agenttrain.data.spider.connect")
    assert sql("SELECT COUNT(*) FROM orders", context) == "60"
    with pytest.raises(ToolFailure, match="only SELECT is allowed"):
        sql("DELETE FROM orders", context)
    with closing(connect(row)) as connection, pytest.raises(sqlite3.OperationalError):
        connection.execute("DELETE FROM orders")
    sql.close()
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    ("question", "problem"),
    [
        ({"db_id": "nope", "question": "q", "query": "SELECT 1"}, "db_id='nope'"),
        ({"db_id": "../shop", "question": "q", "query": "SELECT 1"}, "db_id='../shop'"),
        ({"db_id": "shop", "question": "q"}, "needs texts for db_id, question, query"),
    ],
)
def test_a_question_that_lacks_something_is_named(
    folder: Path, question: dict[str, str], problem: str
) -> None:
    (folder / "train.json").write_text(json.dumps([spider_folder.QUESTIONS[0], question]))
    with pytest.raises(ValueError, match=f"^path=.*question 1 of train.json.*{problem}"):
        spider_rows(str(folder))


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^path=.*no file train.json or train_spider.json"):
        spider_rows(str(tmp_path))
    with pytest.raises(ValueError, match=r"^split=test: must be one of train, dev"):
        spider_rows(str(tmp_path), split="test")
    with pytest.raises(ValueError, match=r"^path=null: .*data\.path="):
        spider_rows(None)
