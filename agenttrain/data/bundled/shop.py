"""The bundled shop task: questions about a small shop that take one to three SQL queries.

Every row has a database of its own, generated from `database_seed`. A question names a thing
directly ("the lamp") or through other tables ("the product in order 12"). The answer then takes one
query per table, because the agent sees nothing but the results of its queries:

    How much does the product in order 12 cost?
        SELECT product FROM orders WHERE id=12             -> lamp
        SELECT price FROM products WHERE name='lamp'       -> 37

A phrasing is an opener and a core ("Quick question: " + "how much does {x} cost?"). Four of the 16
phrasings of a family are held out for `test_phrasing`: their openers and cores occur in training,
but never together. Names, products and cities are the same in all splits. The contents of the
databases differ.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agenttrain.utils.data_fields import Data

NAMES = (
    *("Kim", "Ana", "Bob", "Tom", "Eva", "Max", "Lea", "Ben"),
    *("Zoe", "Ian", "Mia", "Leo", "Ivy", "Sam", "Joe", "Amy"),
)
PRODUCTS = ("lamp", "desk", "chair", "sofa", "rug", "vase", "clock", "shelf", "mirror", "stool")
CITIES = ("Oslo", "Rome", "Lima", "Cairo", "Paris", "Tokyo")
ORDERS = 60
"""Orders in each database, with ids 1 to 60."""

DATABASE_SEEDS = {
    "train": range(0, 2000),
    "tune": range(5000, 5200),
    "test": range(10000, 10400),
    "test_phrasing": range(10000, 10400),
}
"""Seeds of the databases of each split. Only the last two share theirs."""

SCHEMA = """
CREATE TABLE customers (name TEXT, city TEXT);
CREATE TABLE products (name TEXT, price INTEGER, stock INTEGER);
CREATE TABLE orders (id INTEGER, customer TEXT, product TEXT, quantity INTEGER);
"""

OPENERS = ("", "Please tell me: ", "Quick question: ", "For the report: ")

PRICE = (
    "what is the price of {x}?",
    "how much does {x} cost?",
    "what do I pay for {x}?",
    "at which price do we sell {x}?",
)
STOCK = (
    "how many of {x} are in stock?",
    "what stock is left of {x}?",
    "how many pieces of {x} do we hold?",
    "what is the stock of {x}?",
)
CITY = (
    "in which city does {x} live?",
    "where is {x} from?",
    "what is the city of {x}?",
    "which city is home to {x}?",
)
CUSTOMERS_IN = (
    "how many customers live in {x}?",
    "count the customers in {x}.",
    "what is the number of customers in {x}?",
    "how many of our customers are from {x}?",
)
ORDERS_OF = (
    "how many orders did {x} place?",
    "count the orders of {x}.",
    "how often did {x} order?",
    "what is the number of orders of {x}?",
)
BOUGHT = (
    "how many items did {x} buy in total?",
    "what is the total quantity {x} bought?",
    "how many pieces did {x} buy?",
    "add up the quantities that {x} bought.",
)
SOLD = (
    "how many of {x} were sold?",
    "what is the total quantity sold of {x}?",
    "how many pieces of {x} were sold?",
    "add up the quantities sold of {x}.",
)
ORDERS_WITH = (
    "how many orders contain {x}?",
    "count the orders with {x}.",
    "how many orders are for {x}?",
    "what is the number of orders with {x}?",
)

PRODUCT_OF_ORDER = "SELECT product FROM orders WHERE id={order}"
CUSTOMER_OF_ORDER = "SELECT customer FROM orders WHERE id={order}"
LAST_OF_CUSTOMER = "SELECT MAX(id) FROM orders WHERE customer='{name}'"
LAST_OF_PRODUCT = "SELECT MAX(id) FROM orders WHERE product='{product}'"
THEN_PRODUCT = "SELECT product FROM orders WHERE id={result}"
THEN_CUSTOMER = "SELECT customer FROM orders WHERE id={result}"
THEN_PRICE = "SELECT price FROM products WHERE name='{result}'"
THEN_STOCK = "SELECT stock FROM products WHERE name='{result}'"
THEN_CITY = "SELECT city FROM customers WHERE name='{result}'"
THEN_CUSTOMERS = "SELECT COUNT(*) FROM customers WHERE city='{result}'"
THEN_ORDERS = "SELECT COUNT(*) FROM orders WHERE customer='{result}'"


@dataclass(frozen=True, slots=True)
class ShopQuestions:
    """Questions answered by the same chain of queries.

    Example: `ShopQuestions("order_price", ("what does {x} cost?",), "the product in order {order}",
    ("SELECT product FROM orders WHERE id={order}", "SELECT price FROM products WHERE
    name='{result}'"))`. `{result}` stands for the result of the query before.
    """

    name: str
    """Name of the kind of question: the column `family` of its rows."""
    cores: tuple[str, ...]
    """Phrasings of the question about ``{x}``."""
    reference: str
    """Words that ``{x}`` stands for."""
    plan: tuple[str, ...]
    """Queries, one after the other."""


FAMILIES = (
    ShopQuestions(
        "price", PRICE, "the {product}", ("SELECT price FROM products WHERE name='{product}'",)
    ),
    ShopQuestions(
        "stock", STOCK, "the {product}", ("SELECT stock FROM products WHERE name='{product}'",)
    ),
    ShopQuestions("city", CITY, "{name}", ("SELECT city FROM customers WHERE name='{name}'",)),
    ShopQuestions(
        "customers",
        CUSTOMERS_IN,
        "{city}",
        ("SELECT COUNT(*) FROM customers WHERE city='{city}'",),
    ),
    ShopQuestions(
        "orders", ORDERS_OF, "{name}", ("SELECT COUNT(*) FROM orders WHERE customer='{name}'",)
    ),
    ShopQuestions(
        "bought", BOUGHT, "{name}", ("SELECT SUM(quantity) FROM orders WHERE customer='{name}'",)
    ),
    ShopQuestions(
        "sold",
        SOLD,
        "the {product}",
        ("SELECT SUM(quantity) FROM orders WHERE product='{product}'",),
    ),
    ShopQuestions(
        "orders_with",
        ORDERS_WITH,
        "the {product}",
        ("SELECT COUNT(*) FROM orders WHERE product='{product}'",),
    ),
    ShopQuestions(
        "order_price", PRICE, "the product in order {order}", (PRODUCT_OF_ORDER, THEN_PRICE)
    ),
    ShopQuestions(
        "order_stock", STOCK, "the product in order {order}", (PRODUCT_OF_ORDER, THEN_STOCK)
    ),
    ShopQuestions(
        "order_city", CITY, "the customer of order {order}", (CUSTOMER_OF_ORDER, THEN_CITY)
    ),
    ShopQuestions(
        "order_orders",
        ORDERS_OF,
        "the customer of order {order}",
        (CUSTOMER_OF_ORDER, THEN_ORDERS),
    ),
    ShopQuestions(
        "neighbours",
        CUSTOMERS_IN,
        "the city of {name}",
        ("SELECT city FROM customers WHERE name='{name}'", THEN_CUSTOMERS),
    ),
    ShopQuestions(
        "order_neighbours",
        CUSTOMERS_IN,
        "the city of the customer of order {order}",
        (CUSTOMER_OF_ORDER, THEN_CITY, THEN_CUSTOMERS),
    ),
    ShopQuestions(
        "last_price",
        PRICE,
        "the product in the last order of {name}",
        (LAST_OF_CUSTOMER, THEN_PRODUCT, THEN_PRICE),
    ),
    ShopQuestions(
        "last_city",
        CITY,
        "the customer of the last order of the {product}",
        (LAST_OF_PRODUCT, THEN_CUSTOMER, THEN_CITY),
    ),
)

Curriculum = Sequence[tuple[int, Sequence[float]]]
"""Stages `(first row, shares of one-, two- and three-query questions)`, in order of first row."""

MIX: Curriculum = ((0, (0.5, 0.3, 0.2)),)
"""One stage: half of the questions need one query, three tenths two, two tenths three."""


def connect(columns: Mapping[str, Any]) -> sqlite3.Connection:
    """Return a fresh in-memory database for a row.

    Example: `connect({"database_seed": 3}).execute("SELECT COUNT(*) FROM orders").fetchone()`
    gives `(60,)`. The caller sets limits and closes it.
    """
    # Tools run in threads, not always the same one.
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    connection.deserialize(_database(int(columns["database_seed"])))
    return connection


@lru_cache(maxsize=64)
def _database(seed: int) -> bytes:
    """Return the database of a seed as a file's bytes.

    Cached, because SQLite gives up the interpreter's lock (GIL) at every insert. If each rollout
    filled its own database, it would compete with the engine's thread for the lock a hundred times.
    """
    rng = random.Random(seed)
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    connection.executemany(
        "INSERT INTO customers VALUES (?,?)", [(name, rng.choice(CITIES)) for name in NAMES]
    )
    connection.executemany(
        "INSERT INTO products VALUES (?,?,?)",
        [(product, rng.randint(5, 99), rng.randint(0, 60)) for product in PRODUCTS],
    )
    connection.executemany(
        "INSERT INTO orders VALUES (?,?,?,?)",
        [
            (number, rng.choice(NAMES), rng.choice(PRODUCTS), rng.randint(1, 6))
            for number in range(1, ORDERS + 1)
        ],
    )
    connection.commit()
    with closing(connection):
        return connection.serialize()


def phrasings(family: ShopQuestions, held_out: bool) -> list[str]:
    """Return the family's question templates that occur in training, or those held out.

    A template is held out if the numbers of its opener and core add up to a multiple of 4. Example
    of `price`: "Please tell me: at which price do we sell the {product}?" (1 and 3).
    """
    questions = [
        opener + core.format(x=family.reference)
        for i, opener in enumerate(OPENERS)
        for j, core in enumerate(family.cores)
        if ((i + j) % 4 == 0) == held_out
    ]
    return [question[0].upper() + question[1:] for question in questions]


def row(
    split: Data[str], index: int, seed: Data[int], curriculum: Data[Curriculum] = MIX
) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: `{"task_id": "shop/train/0/7", "messages": [{"role": "user", "content": "Where is Bob
    from?"}], "answer": "Oslo", "family": "city", "hops": 1, "database_seed": 1034, "plan":
    ["SELECT city FROM customers WHERE name='Bob'"]}`. Raises ValueError for an unknown split or a
    curriculum without a stage for row 0.

    With `curriculum=[(0, [0.7, 0.3, 0]), (480, [0.4, 0.3, 0.3])]`, the first 480 rows hold no
    three-query question.
    """
    if split not in DATABASE_SEEDS:
        raise ValueError(f"split={split!r}: must be one of {', '.join(DATABASE_SEEDS)}")
    if not curriculum or curriculum[0][0] != 0 or any(len(s) != 3 for _, s in curriculum):
        raise ValueError(
            f"curriculum={curriculum!r}: must be stages [first row, [three shares]], from row 0 on"
        )
    rng = random.Random(f"shop/{split}/{seed}/{index}")
    shares = [shares for first, shares in curriculum if first <= index][-1]  # of the latest stage
    hops = rng.choices((1, 2, 3), shares)[0]
    family = rng.choice([family for family in FAMILIES if len(family.plan) == hops])
    question = rng.choice(phrasings(family, held_out=split == "test_phrasing"))
    while True:  # until the question has an answer: a customer may have no order, say
        database_seed = rng.choice(DATABASE_SEEDS[split])
        slots = {
            "name": rng.choice(NAMES),
            "product": rng.choice(PRODUCTS),
            "city": rng.choice(CITIES),
            "order": rng.randint(1, ORDERS),
        }
        plan = [query.format(**slots, result="{result}") for query in family.plan]
        answer = _solve(plan, database_seed)
        if answer is not None:
            break
    return {
        "task_id": f"shop/{split}/{seed}/{index}",
        "messages": [{"role": "user", "content": question.format(**slots)}],
        "answer": answer,
        "family": family.name,
        "hops": hops,
        "database_seed": database_seed,
        "plan": plan,
    }


def _solve(plan: Sequence[str], database_seed: int) -> str | None:
    """Return the answer to a question: the result of the last of its queries.

    ``{result}`` in a query stands for the result of the one before. Return None if one of them has
    no result.
    """
    result: Any = None
    with closing(connect({"database_seed": database_seed})) as connection:
        for query in plan:
            row = connection.execute(query.format(result=result)).fetchone()
            if row is None or row[0] is None:
                return None
            result = row[0]
    return str(result)
