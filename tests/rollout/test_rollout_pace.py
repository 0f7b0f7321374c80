"""Thousands of rollouts that can go on at once, and an event loop that still looks at the clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from agenttrain.rollout.monitoring import BEAT_S, LoopMonitor, Throttle


def passes_of(count: int, at_once: int) -> list[tuple[int, int]]:
    """(pass of the event loop, caller) of `count` callers that come in one pass."""

    async def run() -> list[tuple[int, int]]:
        loop, throttle, seen = asyncio.get_running_loop(), Throttle(at_once), []
        number = 0

        def tick() -> None:
            nonlocal number
            number += 1
            loop.call_soon(tick)

        async def caller(index: int) -> None:
            await throttle.wait()
            seen.append((number, index))

        tasks = [loop.create_task(caller(index)) for index in range(count)]
        loop.call_soon(tick)
        await asyncio.gather(*tasks)
        return seen

    return asyncio.run(run())


def test_few_go_on_at_once():
    assert passes_of(4, at_once=4) == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_many_go_on_in_their_order_so_many_in_a_pass():
    seen = passes_of(10, at_once=4)
    assert [caller for _, caller in seen] == list(range(10))
    numbers = [number for number, _ in seen]
    sizes = [numbers.count(number) for number in sorted(set(numbers))]
    assert sizes == [4, 4, 2]


@pytest.mark.parametrize("cancelled", [{5}, {4, 5, 6, 7}, {9}])
def test_who_is_cancelled_takes_nobodys_turn(cancelled):
    async def run() -> list[int]:
        throttle, seen = Throttle(4), []

        async def caller(index: int) -> None:
            await throttle.wait()
            seen.append(index)

        tasks = [asyncio.create_task(caller(index)) for index in range(10)]
        await asyncio.sleep(0)
        for index in cancelled:
            tasks[index].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.wait_for(throttle.wait(), timeout=60)  # and a later one goes on
        return seen

    assert asyncio.run(run()) == [index for index in range(10) if index not in cancelled]


def test_other_callbacks_run_between_the_passes():
    """A timer that is due is not kept waiting by 640 rollouts that can go on."""

    async def run() -> int:
        loop, throttle, done = asyncio.get_running_loop(), Throttle(64), []
        seen: list[int] = []

        async def caller() -> None:
            await throttle.wait()
            done.append(None)

        tasks = [loop.create_task(caller()) for _ in range(640)]
        loop.call_later(0, lambda: seen.append(len(done)))
        await asyncio.gather(*tasks)
        return seen[0]

    assert asyncio.run(run()) < 640


def test_the_lag_is_the_time_for_which_the_loop_was_blocked():
    def find_blocking_tool(limit_s: float) -> None:
        return None

    async def run() -> tuple[float, float]:
        async with LoopMonitor(60.0, find_blocking_tool) as monitor:
            time.sleep(0.2)  # no `await`: the loop stands still
            return monitor.take_max_lag_s(), monitor.max_lag_s

    before = time.monotonic()
    longest, since_then = asyncio.run(run())
    assert 0.2 - BEAT_S <= longest <= time.monotonic() - before
    assert since_then == 0
