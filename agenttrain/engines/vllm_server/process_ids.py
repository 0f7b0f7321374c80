"""Processes of this machine by their numbers, which it gives to others once they have ended."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def started_at(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; 0 where no /proc says it, as
    this process has too many open files.

    None: there is no such process, or it has ended and its parent has not collected it yet.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            # After the command, which may hold anything: the state first, the start as the 20th.
            words = file.read().rpartition(")")[2].split()
    except OSError as error:
        if sys.platform == "linux" and isinstance(error, FileNotFoundError | ProcessLookupError):
            return None
        with suppress(PermissionError):  # it is somebody else's
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return None
        return 0
    return None if words[0] in "ZX" else int(words[19])


def process_exists(pid: int, started: int = 0) -> bool:
    """Return True if a process runs; with `started`, only if it is the one that started then."""
    start = started_at(pid)
    return start is not None and (not (started and start) or start == started)
