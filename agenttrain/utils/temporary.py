"""Temporary folders that are removed even if their process is killed: by the next one that starts.

A folder's process holds a lock on a file in it, which the kernel releases when the process ends in
any way. The next process that makes a folder in the same place removes those without a holder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from agenttrain.utils.file_locks import lock_descriptor

PREFIX = "agenttrain-tmp-"
UNFINISHED = "agenttrain-new-"
"""Beginning of the name of a folder whose process does not hold its lock yet."""
UNFINISHED_S = 3600
"""Age in seconds of an unfinished folder from which its process is taken for killed."""
LOCK = ".lock"


class TemporaryFolder:
    """A new folder that exists until `remove` or the end of the block.

    If this process dies before, the next one that makes such a folder in the same place removes it.

    Example::

        with TemporaryFolder() as folder:
            (folder / "logging.json").write_text("{}")
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Make it in `parent`, by default where temporary files lie."""
        parent = Path(tempfile.gettempdir() if parent is None else parent)
        remove_abandoned(parent)
        # It gets its name when its lock is held: before that, `remove_abandoned` in another process
        # would take it for abandoned.
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
        self._lock = os.open(unfinished / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        # On a file system without locks nothing is locked, and `remove_abandoned` removes nothing.
        lock_descriptor(self._lock)
        self.path = unfinished.rename(parent / unfinished.name.replace(UNFINISHED, PREFIX, 1))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *error: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folder, if it is still there."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that have ended; those of other users are left alone.

    An unfinished folder, whose process was killed before it held the lock, is removed when it is
    UNFINISHED_S old: no lock shows that its process is gone.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                # Raises OSError while the folder's process lives, which holds the lock.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    for folder in parent.glob(f"{UNFINISHED}*"):
        with suppress(OSError):
            status = folder.lstat()
            is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if is_own and time.time() - status.st_mtime > UNFINISHED_S:
                shutil.rmtree(folder, ignore_errors=True)
