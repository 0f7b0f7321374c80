"""Rows of a folder in the layout of Spider: questions about SQLite databases, with their queries.

spider/
  train.json             [{"db_id": "shop", "question": "…", "query": "SELECT …"}, …]
  dev.json
  database/shop/shop.sqlite
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from agenttrain.utils.data_fields import Data
from agenttrain.utils.sqlite import open_read_only

COLUMN = "database"
"""Column with the file of a row's database."""
KEYS = ("db_id", "question", "query")
OTHER_NAMES = {"train": ("train.json", "train_spider.json"), "dev": ("dev.json",)}
"""Names of a split's file; Spider's own archive has train_spider.json."""
INSTRUCTION = (
    "Write one SQLite query that answers the question. Try queries with the tool sql; then hand in "
    "the query itself as the final answer."
)


def spider_rows(
    path: Data[str | None], split: Data[str] = "train", limit: Data[int | None] = None
) -> list[dict[str, Any]]:
    """Return a row for each question of a split of the folder `path`.

    The prompt has the tables of the question's database. Example: ``{"task_id":
    "spider/train/0", "messages": […], "db_id": "shop", "database": "/data/database/shop/…",
    "query": "SELECT …"}``. Raises ValueError, with the argument, for a folder that lacks something.
    """
    if not path:
        raise ValueError("path=null: names no folder; set data.path=<folder in Spider's layout>")
    folder = Path(path).expanduser().resolve()
    if split not in OTHER_NAMES:
        raise ValueError(f"split={split}: must be one of {', '.join(OTHER_NAMES)}")
    names = OTHER_NAMES[split]
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"path={path}: the folder has no file {' or '.join(names)}")
    try:
        questions = json.loads(file.read_text(encoding="utf-8"))[:limit]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"path={path}: {file.name} is no JSON list of questions: {error}"
        ) from error
    tables: dict[str, str] = {}
    rows = []
    for number, question in enumerate(questions):
        if not isinstance(question, Mapping) or not all(
            isinstance(question.get(key), str) for key in KEYS
        ):
            raise ValueError(
                f"path={path}: question {number} of {file.name} needs texts for {', '.join(KEYS)}"
            )
        name = question["db_id"]
        database = folder / "database" / name / f"{name}.sqlite"
        if Path(name).name != name or not database.is_file():
            raise ValueError(
                f"path={path}: question {number} of {file.name} has db_id={name!r}, and there is "
                f"no file database/{name}/{name}.sqlite"
            )
        if name not in tables:
            tables[name] = describe(database)
        rows.append(
            {
                "task_id": f"spider/{split}/{number}",
                "messages": [
                    {"role": "system", "content": INSTRUCTION},
                    {"role": "user", "content": f"{tables[name]}\n\n{question['question']}"},
                ],
                "db_id": name,
                COLUMN: str(database),
                "query": question["query"],
            }
        )
    return rows


def describe(database: Path) -> str:
    """Return the tables of a database with their columns, a line each.

    Example: ``products(name TEXT, price INTEGER)``. Raises ValueError for a file that is no
    database.
    """
    with closing(open_read_only(database)) as connection:
        try:
            tables = connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            ).fetchall()
            lines = []
            for (table,) in tables:
                columns = connection.execute("SELECT * FROM pragma_table_info(?)", (table,))
                names = ", ".join(f"{name} {kind}".rstrip() for _, name, kind, *_ in columns)
                lines.append(f"{table}({names})")
        except sqlite3.Error as error:
            raise ValueError(f"{database}: cannot be read as a database: {error}") from error
    return "\n".join(lines)


def connect(columns: Mapping[str, Any]) -> sqlite3.Connection:
    """Open the database of a row for reading. Raises ValueError for a row without one."""
    if COLUMN not in columns:
        raise ValueError(f"the row has no column {COLUMN!r}; use data=spider")
    return open_read_only(Path(columns[COLUMN]))
