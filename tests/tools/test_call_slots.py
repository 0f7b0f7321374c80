"""A call's slots while its sub-agents begin and end in any order."""

from __future__ import annotations

import asyncio

import pytest

from agenttrain.tools import call_slots
from agenttrain.tools.call_slots import CallSlots


class Clock:
    """A clock that the test moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(call_slots, "time", clock)
    return clock


async def pause() -> None:
    """Let every task run until it waits."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_a_sub_agent_that_begins_while_the_slot_is_waited_for(clock: Clock) -> None:
    async def run() -> None:
        slot = asyncio.Semaphore(1)
        first_may_end, second_may_end = asyncio.Event(), asyncio.Event()
        async with CallSlots([slot]) as held:
            clock.now = 1
            first = asyncio.create_task(held.without_slots(first_may_end.wait)())
            await pause()
            await slot.acquire()  # by another call
            clock.now = 10
            first_may_end.set()
            await pause()  # the first sub-agent has ended, and its end waits for the slot
            second = asyncio.create_task(held.without_slots(second_may_end.wait)())
            await pause()
            clock.now = 20
            slot.release()
            await pause()
            assert not slot.locked()  # the second sub-agent still runs
            clock.now = 30
            second_may_end.set()
            await asyncio.gather(first, second)
            assert slot.locked()
            clock.now = 32
            assert held.seconds() == 3  # before the first sub-agent and after the second
        assert not slot.locked()

    asyncio.run(run())


def test_a_sub_agent_that_begins_and_ends_while_the_slot_is_waited_for(clock: Clock) -> None:
    async def run() -> None:
        slot = asyncio.Semaphore(1)
        may_end = asyncio.Event()
        async with CallSlots([slot]) as held:
            first = asyncio.create_task(held.without_slots(may_end.wait)())
            await pause()
            await slot.acquire()  # by another call
            may_end.set()
            await pause()  # the first sub-agent has ended, and its end waits for the slot
            second = asyncio.create_task(held.without_slots(may_end.wait)())
            await pause()
            clock.now = 5
            slot.release()
            await asyncio.gather(first, second)
            assert slot.locked()
            assert held.seconds() == 0
        await slot.acquire()
        assert slot.locked()  # it was taken once and given back once

    asyncio.run(run())
