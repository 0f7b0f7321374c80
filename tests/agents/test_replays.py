"""Requests that are sent again: which answers are lost, and what a close ends."""

from __future__ import annotations

import asyncio
from typing import Any

from agenttrain.agents.replays import Delivery, Replays

ANSWER: Any = object()


async def answer_now() -> Any:
    return ANSWER


async def answer_never() -> Any:
    await asyncio.Event().wait()


def ask(replays: Replays, body: bytes, sample: Any = answer_now) -> Delivery:
    return replays.deliver("/v1/chat/completions", body, key=None, retry=False, sample=sample)


def test_the_newest_answer_is_lost_also_where_an_equal_request_came_earlier() -> None:
    async def scenario() -> list[bool]:
        replays = Replays()
        for body in (b"first", b"second"):
            delivery = ask(replays, body)
            await delivery.task
            delivery.written = 1
        seen = [replays.lost]
        await ask(replays, b"first").task  # its client does not wait for it
        return [*seen, replays.lost]

    assert asyncio.run(scenario()) == [False, True]


def test_a_close_ends_all_equal_requests_in_flight() -> None:
    async def scenario() -> list[bool]:
        replays = Replays()
        deliveries = []
        for _ in range(2):
            delivery = ask(replays, b"same", answer_never)
            delivery.readers = 1
            deliveries.append(delivery)
        await asyncio.sleep(0)
        await replays.aclose()
        return [delivery.task.cancelled() for delivery in deliveries]

    assert asyncio.run(scenario()) == [True, True]
