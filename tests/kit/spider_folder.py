"""A folder in the layout of Spider: the bundled shop's database and questions about it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from agenttrain.data.bundled import shop

QUESTIONS = [
    {
        "db_id": "shop",
        "question": "Which products cost more than 50?",
        "query": "SELECT name FROM products WHERE price > 50",
    },
    {
        "db_id": "shop",
        "question": "List the products, the cheapest first.",
        "query": "SELECT name FROM products ORDER BY price, name",
    },
    {
        "db_id": "shop",
        "question": "Which product is in which order?",
        "query": "SELECT product FROM orders WHERE id <= 3",
    },
]


def make(folder: Path) -> Path:
    """Write the folder, and return it."""
    file = folder / "database" / "shop" / "shop.sqlite"
    file.parent.mkdir(parents=True)
    with closing(shop.connect({"database_seed": 3})) as connection:
        file.write_bytes(connection.serialize())
    for name in ("train.json", "dev.json"):
        (folder / name).write_text(json.dumps(QUESTIONS), encoding="utf-8")
    return folder
