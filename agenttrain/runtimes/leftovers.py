"""Containers of runs that have ended: found by label and name, and removed by the next start.

A name says whose it is: ``agenttrain-<machine>-<pid>-<start of the process>-<number>``. A container
without our label, of a live process, or of another machine or process namespace is left alone.
"""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from agenttrain.runtimes import reaper
from agenttrain.utils.process_ids import started_at

PREFIX = "agenttrain-"


def machine_id() -> str:
    """Return a digest of this machine and process namespace, in which pids have a meaning."""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
        return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]


def start_time(pid: int) -> str | None:
    """Return a text for the time at which a process started; None if there is no such process.

    Example: "18734211a3f0", clock ticks after the boot and the beginning of the boot's id. Without
    the id, a pid could come again with the same time after a restart of the machine.
    """
    ticks = started_at(pid)
    if ticks is None:
        return None
    boot = ""
    with suppress(OSError):  # only Linux has it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:4]
    return f"{ticks}{boot}"


def own_prefix() -> str:
    """Return the beginning of the names of this process's containers."""
    return f"{PREFIX}{machine_id()}-{os.getpid()}-{start_time(os.getpid())}-"


def is_left(name: str) -> bool:
    """Return True for a name of ours whose process has ended."""
    parts = name.split("-")
    if len(parts) != 5 or f"{parts[0]}-" != PREFIX or parts[1] != machine_id():
        return False
    if not parts[2].isdigit():
        return False
    pid = int(parts[2])
    # `started_at` returns 0 for a process that runs, but whose start cannot be read.
    return started_at(pid) != 0 and start_time(pid) != parts[3]


def remove_leftovers(client: str) -> list[str]:
    """Remove the containers of processes of this machine that have ended; return their names."""
    left = [name for name in reaper.names_of(client, PREFIX) or () if is_left(name)]
    if left:
        reaper.remove(client, left)
    return left


def start_reaper(client: str) -> None:
    """Start the process that removes this process's containers when it has ended."""
    subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, client, own_prefix(), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        cwd="/",
    )
