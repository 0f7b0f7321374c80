"""A service desk: tools over a database, a customer to talk to, graded by the database at the end.

The tasks are `agenttrain.data.bundled.service_desk`'s: a policy, a request, and the actions after
which the database is right. The tools do what they are told; to keep to the policy is the model's
task.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

from agenttrain.data.bundled.service_desk import CUSTOMERS, ORDERS
from agenttrain.types import Message, Rollout, Task, ToolFailure


class ServiceDesk:
    """The desk of one conversation, with a database of its own.

    The reward is 1 if the database is as after the row's `actions`, else 0, whatever was said. A
    hand-over ends the conversation, and counts like a change of the database.
    """

    def __init__(self) -> None:
        self._orders = copy.deepcopy(ORDERS)
        self._actions: list[Mapping[str, Any]] = []
        """Right actions: ``{"tool": "refund", "arguments": {"order": "A102", "amount": 120}}``."""
        self.done = False
        """True once the desk has handed over."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """Begin the row's task with the database as it was."""
        if "actions" not in row:
            raise ValueError("the row has no column 'actions'; use data=service_desk")
        self._orders, self._actions, self.done = copy.deepcopy(ORDERS), row["actions"], False

    def find_customer(self, email: str) -> dict[str, Any]:
        """Find a customer. Returns the name and the numbers of the orders.

        Args:
            email: The email address.
        """
        customer = CUSTOMERS.get(email.strip().lower())
        if customer is None:
            raise ToolFailure("there is no customer with this email address")
        return customer

    def show_order(self, order: str) -> dict[str, Any]:
        """Show an order: item, price, status, days since its delivery, refund, address.

        Args:
            order: Its number.
        """
        return self._find(order)

    def cancel_order(self, order: str) -> str:
        """Cancel an order.

        Args:
            order: Its number.
        """
        self._find(order)["status"] = "cancelled"
        return "cancelled"

    def change_address(self, order: str, address: str) -> str:
        """Change the address to which an order is sent.

        Args:
            order: Its number.
            address: The new address.
        """
        self._find(order)["address"] = address
        return "changed"

    def refund(self, order: str, amount: int) -> str:
        """Pay money back.

        Args:
            order: Number of the order.
            amount: Euros to pay back.
        """
        self._find(order)["refunded"] += amount
        return "paid back"

    def hand_over(self, reason: str) -> str:
        """Hand over to a colleague; it ends the conversation.

        Args:
            reason: What the customer wants.
        """
        self.done = True
        return "handed over"

    def state(self) -> dict[str, Any]:
        """Return the database, and whether the desk has handed over."""
        orders = {
            number: {**order, "address": " ".join(order["address"].casefold().split())}
            for number, order in self._orders.items()
        }
        return {"orders": orders, "handed_over": self.done}

    def reward(self, rollout: Rollout) -> float:
        """Return 1 if the database is as after the right actions, else 0."""
        right_desk = ServiceDesk()
        for action in self._actions:
            getattr(right_desk, action["tool"])(**action["arguments"])
        return float(self.state() == right_desk.state())

    def _find(self, order: str) -> dict[str, Any]:
        """Return an order of the database. Raises ToolFailure if there is none."""
        number = order.strip().upper()
        if number not in self._orders:
            raise ToolFailure(f"there is no order {order}")
        return self._orders[number]


def customer(task: Task, spoken: Sequence[Message], seed: int) -> str | None:
    """Reply as the row's customer, by rules, to the agent's message at the end of `spoken`.

    The row's `facts` are what the customer can say, with words that ask for it: ``{"words":
    ["order", "number"], "text": "It is order A101."}``. A question gets all facts that have a word
    of it and were not said yet. Any other question is agreed to. To a message without a question
    the customer says a fact that was not asked for yet, or, when all are said, nothing more: the
    conversation is over. `seed` is not used: rules draw nothing at random.
    """
    agent_message = spoken[-1]["content"].casefold()
    customer_text = " ".join(m["content"] for m in spoken if m["role"] == "user")
    unsaid = [fact for fact in task.columns["facts"] if fact["text"] not in customer_text]
    words = set(re.findall(r"[\w-]+", agent_message))
    matching_texts = [fact["text"] for fact in unsaid if words & set(fact["words"])]
    if "?" in agent_message:
        return " ".join(matching_texts) or "Yes, please."
    return unsaid[0]["text"] if unsaid else None
