"""The parent of a tool's worker process: ends the worker and everything that the worker started.

A process can leave its group and its session (``start_new_session=True``, ``setpgid``, a double
fork), but on Linux it cannot leave the tree below a *subreaper*: whoever loses its parent becomes
the subreaper's child. So once the keeper has no child left, no descendant is left either::

    run ── keeper ── worker ── shell ── make      the shell ends: make becomes the keeper's child

Elsewhere only the worker's process group is ended.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

ADOPTS = sys.platform == "linux" and os.path.exists("/proc/self/stat")
"""True where the system has subreapers, and shows a process its children."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MOST_PAUSE_S = 0.5
"""Longest pause between two attempts to end what does not end."""


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, where the system can do that."""
    if ADOPTS:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def fork_worker(parent: int, lifeline: int, *others: int) -> None:
    """Return in the worker, a child of this process, which stays behind as its keeper.

    The keeper ends all once something arrives on `lifeline`, once that is closed, once the process
    `parent` is gone, or once the worker ended by itself; it then ends as the worker did. `others`
    are the worker's files.
    """
    keeper = os.getpid()
    adopt_orphans()
    worker = os.fork()
    if worker:
        _watch(worker, parent, lifeline, others)
    os.setsid()
    os.close(lifeline)
    if ADOPTS:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it was killed before that took effect
            os._exit(1)


def _watch(worker: int, parent: int, lifeline: int, others: tuple[int, ...]) -> NoReturn:
    """Be the keeper: wait for a reason to end everything, then end as the worker did."""
    woken, wake = os.pipe()
    for number in (woken, wake):
        os.set_blocking(number, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for name in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda number, frame: None)  # its number is in the pipe
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):  # a pipe that the run reads ends with the worker
        os.dup2(null, number)
    for number in others:
        os.close(number)
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(lifeline, select.POLLIN)
    with suppress(AttributeError, OSError):
        # Processes that the run forked hold the other end of its lifelines too.
        poller.register(os.pidfd_open(parent), select.POLLIN)
    over = os.getppid() != parent
    status = _reap(worker)
    while status is None and not over:
        for number, _ in poller.poll():
            over = over or number != woken or set(os.read(woken, 4096)) != {signal.SIGCHLD}
        status = _reap(worker)
    _end_children(worker)
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # a signal ended the worker
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _reap(worker: int) -> int | None:
    """Collect children that have ended; return the worker's status if it was among them."""
    worker_status = None
    with suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == 0:
                break
            if number == worker:
                worker_status = status
    return worker_status


def _end_children(worker: int) -> None:
    """Kill children and their groups until there are none; those of another user (sudo) stay.

    A child's number is its own until it is reaped here, and its group lies in a session that the
    worker or a descendant made: no stranger can be hit. What a child started becomes ours when it
    ends.
    """
    if not ADOPTS:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker, signal.SIGKILL)
        return
    pause = 0.0
    while True:
        children, refusals = list(_children()), 0
        for child in children:
            try:
                group = os.getpgid(child)
                # A worker that has not yet left this process's group is killed alone.
                if group == os.getpgid(0):
                    os.kill(child, signal.SIGKILL)
                else:
                    os.killpg(group, signal.SIGKILL)
            except PermissionError:
                refusals += 1
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not ended and children and refusals == len(children):
            return
        pause = 0.0 if ended else min(2 * pause + 0.0005, MOST_PAUSE_S)
        time.sleep(pause)


def _children() -> Iterator[int]:
    """Yield the children of this process, including those that have ended."""
    try:
        with open("/proc/thread-self/children", encoding="ascii") as file:
            yield from map(int, file.read().split())
        return
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN
        names = [name for name in os.listdir("/proc") if name.isdecimal()]
    for name in names:
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as f:
            # "12 (a name) S 7 …": the parent is 7
            if int(f.read().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(name)
