"""The bakery's tool, and the reward for an order that is what the customer wanted."""

from __future__ import annotations

from agenttrain import Done, Rollout


def place_order(item: str, quantity: int, hour: int) -> Done:
    """Place the customer's order; it ends the conversation.

    Args:
        item: In the singular, such as "bagel".
        quantity: How many.
        hour: Hour of the day at which it is picked up.
    """
    return Done(f"{quantity} x {item}, ready at {hour}")


def right_order(rollout: Rollout, order: dict, **columns: object) -> float:
    """Return the share of the order's fields that are as the customer wanted them."""
    placed = [r.call for r in rollout.tool_results if r.call.name == "place_order" and not r.error]
    if not placed:
        return 0.0
    given = placed[-1].arguments
    return sum(given[name] == value for name, value in order.items()) / len(order)
