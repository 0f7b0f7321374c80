"""The keeper of a child process: its parent, which ends it with everything that it has started.

A process can leave its group and its session (``start_new_session=True``, ``setpgid``, a double
fork), but on Linux it cannot leave the tree below a *subreaper*: whoever loses its parent becomes
the subreaper's child. So once the keeper has no child left, no descendant is left either::

    run ── keeper ── program ── shell ── make     the shell ends: make becomes the keeper's child

Elsewhere only the program's process group is ended.

`child_process.py` starts this file as a script, which imports nothing of the package::

    python -I -S keeper.py <lifeline> <parent> <grace_s> <deaf> <files> program argument …

`lifeline` is a socket. The program's process number is written into it, as a line. The keeper reads
signals for the program from it, a byte each: SIGKILL ends everything, and `TO_GROUP` is added for
the program's whole group. Its end, as that of the process `parent`, gives the program `grace_s` to
end by itself. The keeper ends as the program did. `files` are those that only the program uses,
``5,7,``; a `deaf` program ignores `HEARD`.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from math import inf
from typing import NoReturn

ADOPTS = sys.platform == "linux" and os.path.exists("/proc/self/stat")
"""True where the system has subreapers, and shows a process its children."""
HEARD = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""Signals that ask to stop. A scheduler sends them to all processes of a job, and the keeper leaves
the answer to its parent and to the program: they are blocked in it."""
TO_GROUP = 0x80
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MOST_PAUSE_S = 0.5
"""Longest pause between two attempts to end what does not end."""


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, where the system can do that."""
    if ADOPTS:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> NoReturn:
    """Start the program, keep it, and end as it did."""
    number, parent, grace_s, deaf, files, *command = sys.argv[1:]
    lifeline = int(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    adopt_orphans()
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # its number is in the pipe
    keeper = os.getpid()
    program = os.fork()
    if not program:
        _become(command, keeper, lifeline, is_deaf=deaf == "deaf")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # a pipe that the parent reads ends with the program
        os.dup2(null, stream)
    for file in files.split(",")[:-1]:
        os.close(int(file))
    status = _watch(program, lifeline, woken, int(parent), float(grace_s))
    end_children(program)
    code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:  # a signal ended the program
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _become(command: list[str], keeper: int, lifeline: int, *, is_deaf: bool) -> NoReturn:
    """Become the program, in a session of its own, which the kernel ends with the keeper."""
    os.setsid()
    with suppress(OSError):  # the parent has ended
        os.write(lifeline, f"{os.getpid()}\n".encode())
    os.close(lifeline)
    if ADOPTS:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it was killed before that took effect
            os._exit(1)
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and they stay ignored
        signal.signal(name, signal.SIG_DFL)
    if is_deaf:
        for name in HEARD:
            signal.signal(name, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _watch(program: int, lifeline: int, woken: int, parent: int, grace_s: float) -> int | None:
    """Wait until there is a reason to end everything; return the program's status if it ended."""
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(lifeline, select.POLLIN)
    with suppress(AttributeError, OSError):
        # Processes that the parent forked hold the other end of its lifelines too.
        poller.register(os.pidfd_open(parent), select.POLLIN)
    deadline = inf if os.getppid() == parent else time.monotonic() + grace_s
    while True:
        status = _reap(program)
        wait_s = deadline - time.monotonic()
        if status is not None or wait_s <= 0:
            return status
        for file, _ in poller.poll(None if wait_s == inf else 1000 * wait_s):
            if file == woken:
                os.read(woken, 4096)
                continue
            requests = b""
            with suppress(OSError):  # a reset: the parent has ended
                requests = os.read(lifeline, 64) if file == lifeline else b""
            for request in requests:
                if request == signal.SIGKILL:
                    return _reap(program)
                send = os.killpg if request & TO_GROUP else os.kill
                with suppress(ProcessLookupError, PermissionError):
                    send(program, request & ~TO_GROUP)
            if not requests:
                poller.unregister(file)
                deadline = min(deadline, time.monotonic() + grace_s)


def _reap(program: int) -> int | None:
    """Collect children that have ended; return the program's status if it was among them."""
    program_status = None
    with suppress(ChildProcessError):
        while True:
            number, status = os.waitpid(-1, os.WNOHANG)
            if number == 0:
                break
            if number == program:
                program_status = status
    return program_status


def end_children(group: int = 0, *, spared: Collection[int] = (), limit_s: float = inf) -> None:
    """Kill the children of this process and their groups until there are none but those `spared`.

    What a child started becomes ours when it ends; processes of another user (sudo) stay. A child's
    number is its own until it is reaped here, and its group lies in a session that a descendant
    made: no stranger can be hit. Without subreapers the process `group` is ended. After `limit_s`
    what does not end is left.
    """
    if not ADOPTS:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    pause, deadline = 0.0, time.monotonic() + limit_s
    while time.monotonic() < deadline:
        children, refusals = [child for child in _children() if child not in spared], 0
        for child in children:
            try:
                group = os.getpgid(child)
                # A child that has not yet left this process's group is killed alone.
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
        if not ended and (children or spared) and refusals == len(children):
            return
        pause = 0.0 if ended else min(2 * pause + 0.0005, MOST_PAUSE_S)
        time.sleep(pause)


def _children() -> Iterator[int]:
    """Yield the children of this process, including those that have ended."""
    try:
        for thread in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:
                yield from map(int, file.read().split())
        return
    except FileNotFoundError:  # a kernel without CONFIG_PROC_CHILDREN, or a thread that has ended
        names = [name for name in os.listdir("/proc") if name.isdecimal()]
    for name in names:
        with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as f:
            # "12 (a name) S 7 …": the parent is 7
            if int(f.read().rpartition(")")[2].split()[1]) == os.getpid():
                yield int(name)


if __name__ == "__main__":
    main()
