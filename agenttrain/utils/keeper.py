"""The keeper of a child process: its parent, which ends it with everything that it has started.

A process can leave its group and its session (``start_new_session=True``, ``setpgid``, a double
fork), but on Linux it cannot leave the tree below a *subreaper*: a process whose parent ends
becomes the subreaper's child. So once the keeper has no child left, no descendant is left either::

    run ── keeper ── program ── shell ── make     the shell ends: make becomes the keeper's child

Elsewhere only the program's process group is ended.

`child_process.py` starts this file as a script, which imports nothing of the package::

    python -I -S keeper.py <lifeline> <parent> <grace_s> <deaf> <files> program argument …

`lifeline` is a socket. The program writes its pid into it, as a line. The keeper reads signals for
the program from it, a byte each: SIGKILL ends everything, and `TO_GROUP` is added for the program's
whole group. When the socket or the process `parent` ends, the program has `grace_s` to end by
itself. The keeper exits as the program did. `files` are descriptors that only the program uses,
``5,7,``. A `deaf` program ignores `HEARD`.
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
"""Signals that ask to stop. A scheduler sends them to all processes of a job. The keeper blocks
them: its parent and the program decide what to do."""
TO_GROUP = 0x80
"""Bit of a request on the lifeline: the signal goes to the program's process group."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
MAX_PAUSE_S = 0.5
"""Longest pause between two attempts to kill children that have not ended."""


def adopt_orphans() -> None:
    """Become the parent of descendants that lose theirs, where the system can do that."""
    if ADOPTS:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> NoReturn:
    """Start the program, wait for its end or a reason to end it, and exit as it did.

    The arguments are described at the top of this file.
    """
    lifeline_fd, parent, grace_s, deaf, files, *command = sys.argv[1:]
    lifeline = int(lifeline_fd)
    # The parent gets these signals too, and passes on by the lifeline what the program is to get.
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    adopt_orphans()  # so that `end_children` finds them below this process
    wakeup_reader = _wake_at_child_ends()
    keeper = os.getpid()
    program = os.fork()
    if not program:
        _exec_program(command, keeper, lifeline, is_deaf=deaf == "deaf")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # or the pipes to the parent would stay open after the program's end
        os.dup2(null, stream)
    for file in filter(None, files.split(",")):  # "5,7,": descriptors that only the program needs
        os.close(int(file))
    status = _watch(program, lifeline, wakeup_reader, int(parent), float(grace_s))
    end_children(program)
    # Without a status the program did not end by itself: `end_children` has killed it.
    _exit_with(-signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status))


def _wake_at_child_ends() -> int:
    """Return the descriptor of a pipe that can be read whenever a child has ended (SIGCHLD)."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # Without a handler Python writes no SIGCHLD into the pipe.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader


def _exit_with(code: int) -> NoReturn:
    """End this process with the program's exit code, or by its signal: -9 for SIGKILL."""
    if code < 0:  # a signal ended the program: die by the same one, without a core dump
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _exec_program(command: list[str], keeper: int, lifeline: int, *, is_deaf: bool) -> NoReturn:
    """Replace this forked process by the program, in a new session; it dies with the keeper.

    `keeper` is the pid of the parent, `lifeline` the keeper's socket to the process that started
    it. A program that `is_deaf` ignores the signals HEARD, which ask to stop.
    """
    os.setsid()
    with suppress(OSError):  # nobody reads it: the process that started the keeper has ended
        os.write(lifeline, f"{os.getpid()}\n".encode())  # for `ChildProcess.pid`
    os.close(lifeline)
    if ADOPTS:  # only Linux has the call below
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # the keeper was killed before prctl took effect
            os._exit(1)
    for name in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and they stay ignored
        signal.signal(name, signal.SIG_DFL)
    if is_deaf:
        for name in HEARD:
            signal.signal(name, signal.SIG_IGN)
    # The keeper blocks them, and a program inherits that: one that is not deaf has to get them.
    # Unblocked for a deaf one too, whose own children may want to handle them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HEARD)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _watch(
    program: int, lifeline: int, wakeup_reader: int, parent: int, grace_s: float
) -> int | None:
    """Wait until all processes have to end; return the program's wait status, None if it runs.

    The reasons: the program ended, SIGKILL was requested, or `grace_s` passed after the parent.
    Other requests are passed on to the program. A request is a byte on the `lifeline`: a signal's
    number, plus the bit TO_GROUP if it is for the program's group.
    """
    poller = select.poll()
    poller.register(wakeup_reader, select.POLLIN)
    poller.register(lifeline, select.POLLIN)
    with suppress(AttributeError, OSError):
        # Processes that the parent forked keep the socket open after its end.
        poller.register(os.pidfd_open(parent), select.POLLIN)
    # The parent may have ended before this process could watch it.
    deadline = inf if os.getppid() == parent else time.monotonic() + grace_s
    while True:
        status = _reap(program)
        wait_s = deadline - time.monotonic()
        if status is not None or wait_s <= 0:
            return status
        for file, _ in poller.poll(None if wait_s == inf else 1000 * wait_s):
            if file == wakeup_reader:  # a child has ended, which `_reap` sees above
                os.read(wakeup_reader, 4096)
                continue
            requests = b""
            if file == lifeline:
                with suppress(OSError):  # connection reset: the parent has ended
                    requests = os.read(lifeline, 64)
            for request in requests:
                if request == signal.SIGKILL:
                    return _reap(program)
                send = os.killpg if request & TO_GROUP else os.kill
                with suppress(ProcessLookupError, PermissionError):
                    send(program, request & ~TO_GROUP)
            if not requests:  # end of the lifeline, or the parent's pidfd: the parent has ended
                poller.unregister(file)
                deadline = min(deadline, time.monotonic() + grace_s)


def _reap(program: int) -> int | None:
    """Reap all ended children; return the program's wait status if it was one of them, or None."""
    program_status = None
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == program:
                program_status = status
    return program_status


def end_children(group: int = 0, *, spared: Collection[int] = (), limit_s: float = inf) -> None:
    """Kill this process's children and their groups until only the pids `spared` are left.

    This process has called `adopt_orphans`: when a child ends, the processes that it started become
    children of this one. Processes of another user (sudo) and, after `limit_s`, those that do not
    end are left. No stranger can be hit: a pid is not reused before it is reaped here, and the
    group of a child is in a session that a descendant made.

    Where orphans cannot be adopted (not ADOPTS), only the process group `group` is killed.
    """
    if not ADOPTS:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        return
    pause, deadline = 0.0, time.monotonic() + limit_s
    while time.monotonic() < deadline:
        children = [child for child in _children() if child not in spared]
        killed = [child for child in children if _kill_with_group(child)]
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:  # there is no child
            return
        # Those that are left may not be killed, or are spared. If none is listed at all, /proc does
        # not show the child yet of which `waitpid` knows: try again.
        is_any_listed = bool(children or spared)
        if not ended and not killed and is_any_listed:
            return
        pause = 0.0 if ended else min(2 * pause + 0.0005, MAX_PAUSE_S)
        time.sleep(pause)


def _kill_with_group(child: int) -> bool:
    """Send SIGKILL to a child and its process group; return False if that is not permitted."""
    try:
        group = os.getpgid(child)
        # A child that has not yet left this process's group is killed alone.
        if group == os.getpgid(0):
            os.kill(child, signal.SIGKILL)
        else:
            os.killpg(group, signal.SIGKILL)
    except PermissionError:
        return False
    return True


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
