"""Ten tasks of a furniture shop's service desk: a policy, a database, and customers' requests.

`agenttrain.environments.builtin.service_desk` plays them. A task says which actions are right, and
is graded by the database in which they result, in the manner of tau2-bench.
"""

from __future__ import annotations

from typing import Any

from agenttrain.utils.data_fields import Data

POLICY = """\
You work at the service desk of a furniture shop. Talk to the customer, one message at a time, and
keep to these rules:
- Ask for the customer's email address and find the customer by it. Only touch orders of this
  customer.
- An order can be cancelled, and its address changed, only while its status is processing.
- A delivered order can be refunded once, for at most 30 days after its delivery: the whole price
  if the item is broken, 10 less if the customer does not want it any more.
- Say what you are about to change, and change it only after the customer has agreed.
- If a rule forbids what the customer wants, say so and change nothing.
- If no rule speaks of what the customer wants, hand over to a colleague."""

Table = dict[str, dict[str, Any]]

CUSTOMERS: Table = {
    "ana@example.org": {"name": "Ana Moss", "orders": ["A101", "A102", "A103"]},
    "tom@example.org": {"name": "Tom Gray", "orders": ["A104", "A105", "A106"]},
    "eva@example.org": {"name": "Eva Lind", "orders": ["A107", "A108", "A109"]},
}
"""Customers by email address."""


def _order(item: str, price: int, status: str, days: int | None = None) -> dict[str, Any]:
    """Return an order; `days` is the time since its delivery."""
    delivered = {} if days is None else {"delivered_days_ago": days}
    return {"item": item, "price": price, "status": status, **delivered, "refunded": 0}


ORDERS: Table = {
    "A101": {**_order("lamp", 40, "processing"), "address": "12 Mill Lane"},
    "A102": {**_order("chair", 120, "delivered", 12), "address": "12 Mill Lane"},
    "A103": {**_order("rug", 75, "delivered", 45), "address": "12 Mill Lane"},
    "A104": {**_order("desk", 210, "shipped"), "address": "3 High Street"},
    "A105": {**_order("shelf", 60, "processing"), "address": "3 High Street"},
    "A106": {**_order("mirror", 35, "delivered", 3), "address": "3 High Street"},
    "A107": {**_order("sofa", 480, "delivered", 29), "address": "8 Harbour Road"},
    "A108": {**_order("clock", 25, "processing"), "address": "8 Harbour Road"},
    "A109": {**_order("vase", 30, "delivered", 31), "address": "8 Harbour Road"},
}
"""Orders by number."""

Action = tuple[str, dict[str, Any]]


def _task(
    name: str, email: str, wish: str, facts: dict[str, str], actions: list[Action]
) -> dict[str, Any]:
    """Return a task's row.

    `wish` is what the customer says first. `facts` are what they say when asked: words that a
    question may have, separated by blanks, and the sentence that answers it. `actions` are the
    calls after which the database is right.
    """
    facts = {"email mail address e-mail": f"My email address is {email}.", **facts}
    return {
        "task_id": f"service_desk/{name}",
        "messages": [
            {"role": "system", "content": POLICY},
            {"role": "user", "content": wish},
        ],
        "instruction": " ".join([wish, *facts.values(), "You agree to what you are asked for."]),
        "facts": [{"words": words.split(), "text": text} for words, text in facts.items()],
        "actions": [{"tool": tool, "arguments": arguments} for tool, arguments in actions],
    }


TASKS = (
    _task(
        "cancel",
        "ana@example.org",
        "Hello, I want to cancel an order.",
        {"order number which": "It is order A101, the lamp."},
        [("cancel_order", {"order": "A101"})],
    ),
    _task(
        "broken",
        "ana@example.org",
        "Hi, something that you sent me is broken, and I want my money back.",
        {"order number which what": "It is the chair, order A102. A leg is broken."},
        [("refund", {"order": "A102", "amount": 120})],
    ),
    _task(
        "too-late",
        "ana@example.org",
        "Good morning. I would like to return a rug.",
        {
            "order number which": "It is order A103.",
            "why reason broken": "I do not like it any more.",
        },
        [],
    ),
    _task(
        "new-address",
        "tom@example.org",
        "Hello, my shelf has to go to another address.",
        {
            "order number which": "It is order A105.",
            "where new address street": "The new address is 5 Garden Street.",
        },
        [("change_address", {"order": "A105", "address": "5 Garden Street"})],
    ),
    _task(
        "shipped",
        "tom@example.org",
        "I have changed my mind about a desk. Please cancel it.",
        {"order number which": "It is order A104."},
        [],
    ),
    _task(
        "unwanted",
        "tom@example.org",
        "Hi! I bought a mirror and do not want it any more. Can I have my money back?",
        {
            "order number which": "It is order A106.",
            "why reason broken damaged": "It is not broken, it just does not fit.",
        },
        [("refund", {"order": "A106", "amount": 25})],
    ),
    _task(
        "two-orders",
        "eva@example.org",
        "Hello, I want to cancel my clock. And my sofa came with a hole in it.",
        {
            "order number which": "The clock is order A108, the sofa is order A107.",
            "sofa refund money": "I want my money back for the sofa.",
        },
        [("cancel_order", {"order": "A108"}), ("refund", {"order": "A107", "amount": 480})],
    ),
    _task(
        "of-another",
        "tom@example.org",
        "I want my money back for a broken chair.",
        {"order number which": "It is order A102. My sister ordered it."},
        [],
    ),
    _task(
        "invoice",
        "eva@example.org",
        "Hello, I need an invoice for my company.",
        {"order number which": "For order A109, with the name Lind Ltd."},
        [("hand_over", {"reason": "An invoice for a company."})],
    ),
    _task(
        "one-of-two",
        "ana@example.org",
        "I have moved. Please send my lamp and my chair to the new address.",
        {
            "order number which": "The lamp is order A101, the chair is order A102.",
            "where new address street": "The new address is 9 Oak Road.",
        },
        [("change_address", {"order": "A101", "address": "9 Oak Road"})],
    ),
)
TEST = ("service_desk/shipped", "service_desk/two-orders", "service_desk/invoice")
"""Tasks of the split `test`; the others are for training."""
SPLITS = ("train", "test")


def rows(split: Data[str]) -> list[dict[str, Any]]:
    """Return the tasks of a split. Raises ValueError for an unknown one.

    Example of a row: ``{"task_id": "service_desk/cancel", "messages": […], "instruction": "Hello, I
    want …", "facts": [{"words": ["order", …], "text": "It is order A101, …"}], "actions": [{"tool":
    "cancel_order", "arguments": {"order": "A101"}}]}``.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
    return [task for task in TASKS if (task["task_id"] in TEST) == (split == "test")]
