"""Processes of this machine by process id and start time: ids are reused after a process's end."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def started_at(pid: int) -> int | None:
    """Return a process's start time in clock ticks since the boot, or None if it does not run.

    0: it runs, and /proc cannot be read, e.g. because this process has too many open files. A
    process that has ended does not run, even if its parent has not reaped it yet.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # After the command, which may hold anything, comes the state. The start is the 20th.
            fields = file.read().rpartition(")")[2].split()
    except OSError as error:
        if sys.platform == "linux" and isinstance(error, FileNotFoundError | ProcessLookupError):
            return None
        with suppress(PermissionError):  # it is somebody else's
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return 0
    return None if fields[0] in "ZX" else int(fields[19])  # Z, X: a zombie, or dead


def process_exists(pid: int, started: int = 0) -> bool:
    """Return True if a process runs; with `started`, only if it is the one that started then.

    A start time of 0 is not known, and equals any other.
    """
    start = started_at(pid)
    if start is None:
        return False
    return 0 in (start, started) or start == started
