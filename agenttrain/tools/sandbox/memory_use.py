"""Memory that a sandbox uses, counted by a process inside it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

from agenttrain.tools.sandbox.confine import OPEN_FILES

MEMORY_LINES = (b"RssAnon:", b"RssShmem:", b"VmSwap:")
"""Lines of /proc/<pid>/status with a process's memory in kB, without that of mapped files."""
FREE_FILES = 16
"""Open files of each process that do not count as memory."""
FILE_BYTES = 212_992
"""Bytes that each further open file counts for: it may be a socket, whose buffer
(net.core.wmem_default) is charged to no process."""


def memory_in_use(disks: Sequence[str], max_files: int = OPEN_FILES) -> int:
    """Return the bytes that the sandbox uses for processes, open files and written files.

    `disks` are folders in memory, `max_files` the open files that a process may have. The number
    is an upper bound: memory that processes share counts for each of them. The first process and
    the calling one do not count: they are ours.
    """
    total = disk_in_use(disks)
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == "1" or int(name) == os.getpid():
            continue
        with suppress(OSError):  # the process has ended meanwhile
            with open(f"/proc/{name}/status", "rb") as file:
                lines = [line.split() for line in file]
            kilobytes = [int(words[1]) for words in lines if words[0] in MEMORY_LINES]
            if not kilobytes:  # a process that has ended and is not reaped yet
                continue
            open_files = max_files
            with suppress(PermissionError):  # a process may hide its files: assume the maximum
                open_files = len(os.listdir(f"/proc/{name}/fd"))
            # Each may be a socket, whose buffer is in no line of /proc.
            total += sum(kilobytes) * 1024 + max(open_files - FREE_FILES, 0) * FILE_BYTES
    return total


def disk_in_use(disks: Sequence[str]) -> int:
    """Return the bytes that are written to folders in memory; a file system counts once."""
    path_of_device = {os.stat(path).st_dev: path for path in disks}
    usages = [os.statvfs(path) for path in path_of_device.values()]
    return sum((usage.f_blocks - usage.f_bfree) * usage.f_frsize for usage in usages)
