"""asyncio inside a running event loop: a notebook's cells run in one."""

from __future__ import annotations

import asyncio
from asyncio import events, tasks
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_running_loop() -> Iterator[None]:
    """Let the block call `asyncio.run` although this thread runs an event loop, which then waits.

    The block must not await. It stays in its thread: only the main thread gets signals.
    """
    loop = events._get_running_loop()
    if loop is None:
        yield
        return
    task = asyncio.current_task(loop)
    # `_leave_task` and `_enter_task` are asyncio's documented interface for task implementations
    # ("Extending"). The loop has to be the running one for both: leave first, enter last.
    if task is not None:
        tasks._leave_task(loop, task)
    events._set_running_loop(None)
    try:
        yield
    finally:
        events._set_running_loop(loop)
        if task is not None:
            tasks._enter_task(loop, task)
