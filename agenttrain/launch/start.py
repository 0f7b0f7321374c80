"""The start of a checked command: one process that runs it, several, or a share of those there are.

Ranks that torchrun, or one of its like, has started meet at the store of MASTER_ADDR and
MASTER_PORT, before there is a process group (a setting says how long that waits), and the first
composes for all of them. Heavy modules are imported last.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch.distributed as dist

from agenttrain.launch.config import DistributedName
from agenttrain.launch.orders import (
    QUIET,
    Order,
    adopt,
    code_of,
    in_a_line,
    is_first,
    started_by_others,
    stop_code,
    trace,
)
from agenttrain.launch.worker import serve
from agenttrain.settings.compose import Composed
from agenttrain.training.world import PeerFailed, World
from agenttrain.utils.exit_codes import FAILED
from agenttrain.utils.output import unfailing
from agenttrain.utils.signals import listening


def start(composed: Composed, folder: Path, verb: str, *, sweep: bool = False) -> int:
    """Run `verb` in its folder; return the exit code. Raises ConfigError."""
    config, plain = composed.config, composed.plain
    if config.distributed.name is not DistributedName.single and not started_by_others():
        from agenttrain.launch.launcher import run_workers

        return run_workers(composed, folder, verb, sweep=sweep)
    with listening() as stop:
        try:
            if started_by_others():
                pass  # gone

                adopt(composed, ())
                return lead(Order.of(composed, folder, verb, sweep=sweep))
            from agenttrain.runs.run import Run

            return Run(verb=verb, config=config, plain=plain, folder=folder, sweep=sweep).execute()
        except KeyboardInterrupt:
            return stop_code(stop, verb)


def as_rank(command: Callable[[], int]) -> int:
    """Run a command in one of the processes that torchrun started; return the exit code.

    The first does the command, and has the others do their share where it runs something.
    """
    os.environ.update(QUIET)
    pass  # gone

    if not is_first():
        return follow()
    code = FAILED
    try:
        code = command()
    finally:
        dismiss(code)
    return code


KEY = "agenttrain/order"
"""An Order as JSON, or the exit code of a command that runs nothing."""
SLICE = timedelta(seconds=0.5)
"""Longest wait at once: signals are heard in between."""
HEARD_S = 30.0
"""For the others to hear that there is nothing to run, before the store goes with this process."""
LAST_S = 1.0
"""That the others stay longer, so that who started them does not end the first one for it."""


def lead(order: Order) -> int:
    """Tell the other ranks what to run, and do the first one's share; return the exit code."""
    _store().set(KEY, order.text())
    try:
        return serve(order, _start(order))
    except PeerFailed as error:  # who started the processes may not let the other one speak
        print(in_a_line(error), file=sys.stderr)
        return FAILED


def dismiss(code: int) -> None:
    """End the other ranks as the first one ends, if they were told nothing before."""
    # Suppressed: the launcher of the processes is gone, and the store with it.
    with suppress(dist.DistNetworkError):
        store = _store()
        if store.check([KEY]):
            return
        store.set(KEY, str(code))
        others = [f"agenttrain/heard/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))]
        deadline = time.monotonic() + HEARD_S
        while not store.check(others) and time.monotonic() < deadline:
            time.sleep(0.1)


def follow() -> int:
    """Do what the first rank says, in another one; return the exit code."""
    rank = int(os.environ["RANK"])
    terminal = unfailing(os.dup(2))  # where stderr leads now
    verb = "train"
    with listening() as stop:
        try:
            text = _order_or_code(rank)
            if text.isdecimal():
                time.sleep(LAST_S)
                return int(text)
            order = Order.parse(text)
            verb = order.verb
            return serve(order, _start(order))
        except KeyboardInterrupt:
            return stop_code(stop, verb)
        except Exception as error:
            for line in (trace(error) or in_a_line(error)).splitlines():
                print(f"rank {rank}: {line}", file=terminal, flush=True)
            return code_of(error)


def _start(order: Order) -> World:
    return World.start(timeout_s=order.composed().config.distributed.timeout_s)


def _order_or_code(rank: int) -> str:
    """Wait for what the first rank puts under KEY."""
    store = _store()
    while True:
        try:
            store.wait([KEY], SLICE)
        except dist.DistNetworkError:
            return str(FAILED)  # the first rank is gone, and has said why where it could
        except dist.DistStoreError:
            continue
        text: str = store.get(KEY).decode()
        store.set(f"agenttrain/heard/{rank}", "")
        return text


@cache
def _store() -> dist.Store:
    store, _, _ = next(iter(dist.rendezvous("env://")))
    return dist.PrefixStore("order", store)
