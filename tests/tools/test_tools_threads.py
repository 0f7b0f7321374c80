"""The daemon threads that blocking tools and rewards run in."""

import asyncio
import contextvars
import threading
import time

from agenttrain.utils.threads import DaemonThreads


async def thread_of(threads: DaemonThreads) -> threading.Thread:
    outcome = await threads.run(threading.current_thread)
    assert isinstance(outcome.value, threading.Thread)
    return outcome.value


def test_an_idle_thread_is_used_again():
    async def main() -> None:
        threads = DaemonThreads()
        first, second = await thread_of(threads), await thread_of(threads)
        assert first is second
        assert first.daemon
        threads.close()
        first.join(20)
        assert not first.is_alive()
        assert await thread_of(threads) is not first

    asyncio.run(main())


def test_a_long_idle_thread_ends_and_the_next_call_has_another():
    async def main() -> None:
        threads = DaemonThreads(idle_s=0.001)
        first = await thread_of(threads)
        first.join(20)
        assert not first.is_alive()
        assert await thread_of(threads) is not first

    asyncio.run(main())


def test_calls_around_the_end_of_idle_threads_are_not_lost():
    async def main() -> None:
        threads = DaemonThreads(idle_s=0.0005)
        for index in range(300):
            outcome = await asyncio.wait_for(threads.run(lambda i=index: i), 20)
            assert outcome.value == index
            await asyncio.sleep(0.0005)

    asyncio.run(main())


def test_context_variables_are_the_callers():
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")

    async def main() -> object:
        variable.set("mine")
        return (await DaemonThreads().run(variable.get)).value

    assert asyncio.run(main()) == "mine"


def test_a_result_after_the_end_of_the_loop_is_discarded():
    release = threading.Event()
    threads = DaemonThreads()

    async def main() -> None:
        asyncio.ensure_future(threads.run(lambda: release.wait(20), label="late"))  # noqa: RUF006
        await asyncio.sleep(0)

    asyncio.run(main())
    assert threads.stuck == ("late",)
    release.set()
    while threads.stuck:
        time.sleep(0.001)
    assert asyncio.run(threads.run(lambda: 4)).value == 4
