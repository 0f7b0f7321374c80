"""Resource limits of the code in a sandbox, and the loss of every privilege."""

from __future__ import annotations

import os
import resource
import sys

from agenttrain.tools.sandbox.system import (
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    drop_bounding_set,
    drop_capabilities,
    prctl,
)

MB = 1 << 20
OPEN_FILES = 128
"""Open files of a process; the buffers of sockets are memory that is charged to nobody."""
SIGNALS = 256
"""Signals that may be queued."""


def limit_worker(memory_mb: int, file_mb: int, cpu_s: int) -> None:
    """Limits of one process of the model's code, which all that it starts inherit."""
    if sys.platform == "linux":  # macOS knows RLIMIT_AS and refuses to set it
        _limit(resource.RLIMIT_AS, memory_mb * MB)
    _limit(resource.RLIMIT_FSIZE, file_mb * MB)
    # One second between the signal that says why, and the one that nothing can ignore.
    _limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    # 0 would still feed a core_pattern that is a program of the machine's; 1 does not.
    _limit(resource.RLIMIT_CORE, 1)
    _limit(resource.RLIMIT_NOFILE, OPEN_FILES)


def limit_all(processes: int) -> None:
    """Limits of a sandbox as a whole; to be called as the user whom the code will have.

    Processes and threads are counted per user and user namespace (Linux 5.14), and one of the two
    is this sandbox's alone.
    """
    _limit(resource.RLIMIT_NPROC, processes)
    _limit(resource.RLIMIT_MEMLOCK, 0)
    _limit(resource.RLIMIT_MSGQUEUE, 0)
    _limit(resource.RLIMIT_SIGPENDING, SIGNALS)


def drop_privileges(user: int | None) -> None:
    """Lose every privilege for good; `user`: become this one, in a sandbox that root made."""
    drop_bounding_set()
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # Nobody may look into this process, or take its files: they lead to the parent.
    prctl(PR_SET_DUMPABLE, 0)


def _limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit for good, never above what already holds."""
    allowed = resource.getrlimit(kind)[1]
    values = [soft, soft if hard is None else hard]
    if allowed != resource.RLIM_INFINITY:
        values = [min(value, allowed) for value in values]
    resource.setrlimit(kind, (values[0], values[1]))
