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

from agenttrain.utils.files import lock_descriptor

PREFIX = "agenttrain-tmp-"
UNFINISHED = "agenttrain-new-"
"""Beginning of the name of a folder without its lock."""
UNFINISHED_S = 3600
"""Seconds after which a folder without its lock is taken for one of a killed process."""
LOCK = ".lock"


class TemporaryFolder:
    """A new folder that exists until `remove`, the end of the block, or the death of this process.

    Example::

        with TemporaryFolder() as folder:
            (folder / "logging.json").write_text("{}")
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Make it in `parent`, by default where temporary files lie."""
        parent = Path(tempfile.gettempdir() if parent is None else parent)
        remove_abandoned(parent)
        # Only a folder that has its lock gets the name that `remove_abandoned` looks for.
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=parent))
        self._lock = os.open(unfinished / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        lock_descriptor(self._lock)  # without locks nothing is removed as abandoned
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
    """Remove the folders of processes that have ended; others' folders are left alone."""
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
