"""Locks of files. An import needs the standard library alone, as sandboxes do."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that cannot lock."""


@contextmanager
def file_lock(path: Path, *, blocking: bool = True) -> Iterator[None]:
    """Hold a lock file for the block; the lock ends with the process.

    Without `blocking`, raises filelock's Timeout if another process holds it. On a file system
    without locks nothing is locked.
    """
    from filelock import FileLock  # sandboxes lack it, and it takes a fifth of a second

    lock = FileLock(path, blocking=blocking)
    try:
        lock.acquire()
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    try:
        yield
    finally:
        lock.release()


def lock_descriptor(descriptor: int) -> None:
    """Wait for the exclusive lock of an open file; nothing is locked where `file_lock` locks none.

    For a lock that another thread releases, or that goes with its file to another name; `file_lock`
    is for the others.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
