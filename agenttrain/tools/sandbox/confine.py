"""Inside: confine this process and all that it starts, for good.

A model's code and an agent's program are confined alike: `confine` is the only way in.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from agenttrain.tools.sandbox import seccomp, system
from agenttrain.tools.sandbox.root import Root, build_root
from agenttrain.tools.sandbox.system import (
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    PR_SET_PDEATHSIG,
    drop_capabilities,
    prctl,
)

INNER_ID = 1000
"""User and group as the code sees them, if the sandbox has a user namespace."""

MB = 1 << 20
OPEN_FILES = 128
"""Open files of a process. The buffers of sockets are memory that no process is charged for."""
SIGNALS = 256
"""Signals that may be queued."""
CORE_BYTES = 1
"""Limit of a core dump. 0 would still start a core_pattern that is a program of the machine; 1 does
not."""


def confine(root: Root, *, user: int | None, processes: int, permitted: Sequence[str] = ()) -> None:
    """Build the sandbox's file system, drop all privileges, and install limits and filter.

    This process has namespaces of its own, in which it is still privileged. `user` is the id that
    it takes; None: it has a user namespace too, and keeps its id. `permitted` are the calls of
    `seccomp.REFUSED` that are allowed.
    """
    socket.sethostname("sandbox")
    if user is None:
        # No further user namespaces, in which the code would be privileged. The filter refuses the
        # calls that make them; this limit also stops calls that are newer than the filter. Without
        # a user namespace it would be the machine's limit. Where /proc is read-only, the filter is
        # enough.
        with suppress(OSError), open("/proc/sys/user/max_user_namespaces", "wb") as file:
            file.write(b"0")
    build_root(root, user=INNER_ID if user is None else user)
    drop_privileges(user)
    # SIGKILL (9) when the parent dies. After the change of user, which resets this setting.
    prctl(PR_SET_PDEATHSIG, 9)
    limit_all(processes)
    # For this process and all that it starts.
    system.install_filter(seccomp.program(system.MACHINE, permitted))


def die_first() -> None:
    """Have the kernel kill this process and its children first if the machine's memory is full."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")


def limit_worker(memory_mb: int, file_mb: int, cpu_s: int) -> None:
    """Limit this process of the model's code; processes that it starts inherit the limits."""
    if sys.platform == "linux":  # macOS knows RLIMIT_AS and refuses to set it
        set_limit(resource.RLIMIT_AS, memory_mb * MB)
    set_limit(resource.RLIMIT_FSIZE, file_mb * MB)
    # SIGXCPU shows the reason; one second later SIGKILL cannot be ignored.
    set_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    set_limit(resource.RLIMIT_CORE, CORE_BYTES)
    set_limit(resource.RLIMIT_NOFILE, OPEN_FILES)


def limit_all(processes: int) -> None:
    """Limit the sandbox as a whole; call it as the user that the code will have.

    Linux (since 5.14) counts processes and threads per user and user namespace. Each sandbox has a
    user or a user namespace of its own, so sandboxes do not share the limit.
    """
    set_limit(resource.RLIMIT_NPROC, processes)
    set_limit(resource.RLIMIT_MEMLOCK, 0)
    set_limit(resource.RLIMIT_MSGQUEUE, 0)
    set_limit(resource.RLIMIT_SIGPENDING, SIGNALS)


def drop_privileges(user: int | None) -> None:
    """Drop all privileges for good; in a sandbox that root made, become `user`."""
    # Programs that are started from now on can gain no capability.
    with open("/proc/sys/kernel/cap_last_cap", "rb") as file:
        last_capability = int(file.read())
    for capability in range(last_capability + 1):
        prctl(PR_CAPBSET_DROP, capability)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # No process may inspect this one or take its files, which are connected to the parent.
    prctl(PR_SET_DUMPABLE, 0)


def set_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a limit for good, never above the present one."""
    present_hard = resource.getrlimit(kind)[1]
    values = [soft, soft if hard is None else hard]
    if present_hard != resource.RLIM_INFINITY:
        values = [min(value, present_hard) for value in values]
    resource.setrlimit(kind, (values[0], values[1]))
