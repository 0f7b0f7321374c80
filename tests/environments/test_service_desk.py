"""The service desk: its tasks, its database, its customers, its grade."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from adapter_kit import environments, run
from parts import call

from agenttrain.data.bundled import service_desk
from agenttrain.data.bundled.service_desk import TASKS, rows
from agenttrain.data.tasks import to_task
from agenttrain.environments.builtin.service_desk import ServiceDesk, customer
from agenttrain.environments.user import SimulatedUser
from agenttrain.types import StopReason, Task, ToolError

BY_NAME = {task["task_id"].removeprefix("service_desk/"): task for task in TASKS}


def act(tool: str, **arguments: Any) -> str:
    return call(tool, json.dumps(arguments))


def attempt(name: str, *answers: str) -> Any:
    row = BY_NAME[name]
    worlds = environments(ServiceDesk)
    return run(*answers, "Goodbye.<|im_end|>", worlds=worlds, row=row, messages=row["messages"])


@pytest.mark.parametrize("name", BY_NAME)
def test_the_right_actions_earn_everything_and_none_earn_it_only_where_none_are_right(
    name: str,
) -> None:
    actions = BY_NAME[name]["actions"]
    done = attempt(name, *(act(action["tool"], **action["arguments"]) for action in actions))
    assert done.environment_reward == 1.0
    assert attempt(name).environment_reward == float(not actions)


@pytest.mark.parametrize(
    ("name", "calls", "reward"),
    [
        ("unwanted", [("refund", {"order": "A106", "amount": 35})], 0.0),  # 10 too much
        ("unwanted", [("refund", {"order": "a106 ", "amount": 25})], 1.0),
        ("unwanted", [("refund", {"order": "A106", "amount": 25})] * 2, 0.0),  # twice
        ("two-orders", [("cancel_order", {"order": "A108"})], 0.0),  # half of it
        # Looking changes nothing.
        ("shipped", [("show_order", {"order": "A104"})], 1.0),
        ("shipped", [("cancel_order", {"order": "A104"})], 0.0),
        # Case and white space of an address do not count.
        (
            "new-address",
            [("change_address", {"order": "A105", "address": "5 garden  street"})],
            1.0,
        ),
        ("new-address", [("change_address", {"order": "A105", "address": "5 Garden Road"})], 0.0),
        ("of-another", [("hand_over", {"reason": "not his"})], 0.0),
    ],
)
def test_the_database_at_the_end_decides(
    name: str, calls: list[tuple[str, dict[str, Any]]], reward: float
) -> None:
    assert (
        attempt(name, *(act(tool, **given) for tool, given in calls)).environment_reward == reward
    )


def test_handing_over_ends_the_conversation_and_wrong_numbers_are_errors() -> None:
    done = attempt("invoice", act("hand_over", reason="An invoice."))
    assert (done.stop_reason, done.turns) == (StopReason.environment_done, 1)
    done = attempt(
        "cancel", act("find_customer", email="x@example.org"), act("show_order", order="B1")
    )
    assert [result.error for result in done.tool_results] == [ToolError.exception] * 2


def test_a_conversation_begins_with_the_database_as_it_was() -> None:
    for _ in range(2):
        done = attempt("cancel", act("cancel_order", order="A101"), act("show_order", order="A102"))
        assert done.environment_reward == 1.0
    assert service_desk.ORDERS["A101"]["status"] == "processing"


def reply(name: str, *spoken: str) -> str | None:
    """The customer's reply to the last of the messages after the first, the agent's and theirs."""
    task = to_task(BY_NAME[name], 0)
    messages = [{"role": "user", "content": task.messages[-1]["content"]}]
    for i, text in enumerate(spoken):
        messages.append({"role": "user" if i % 2 else "assistant", "content": text})
    user = SimulatedUser(customer)
    return asyncio.run(user.reply(task, messages, replies=0, seed=0))


def test_the_customer_says_what_is_asked_for_agrees_and_ends() -> None:
    email, order = "My email address is ana@example.org.", "It is order A101, the lamp."
    assert reply("cancel", "Hello! What is your email address?") == email
    assert reply("cancel", "Which order is it, and your e-mail?") == f"{email} {order}"
    # Without a question the customer goes on.
    assert reply("cancel", "Tell me more.") == email
    assert reply("cancel", "Your mail?", email, "Tell me more.") == order
    said = ("Your mail?", email, "Which order?", order)
    assert reply("cancel", *said, "Shall I cancel order A101?") == "Yes, please."
    assert reply("cancel", *said, "Shall I cancel it?", "Yes, please.", "It is cancelled.") is None


def test_seven_tasks_train_and_three_test() -> None:
    assert [len(rows(split)) for split in ("train", "test")] == [7, 3]
    assert {row["task_id"] for row in rows("test")} == set(service_desk.TEST)
    assert all(isinstance(to_task(row, 0), Task) for row in TASKS)
    with pytest.raises(ValueError, match="split='all'"):
        rows("all")
