"""Files that a killed server leaves outside the run's folder: sockets, semaphores, shared memory.

vLLM's processes share up to hundreds of megabytes of memory under names in /dev/shm. They remove
them when they end by themselves. After SIGKILL another process has to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
"""A file system in memory, where there is one."""
SHARED = ("psm_", "sem.mp-", "vllm_dist_")
"""Prefixes of file names: Python's shared memory and semaphores, and vLLM's CPU workers."""
SOCKETS = "agenttrain-server-"
"""Prefix of the name of a server's folder for sockets."""


def shared_by(group: int) -> set[str]:
    """Return the files in /dev/shm that the processes of a group have mapped.

    They are compared by inode. glibc makes a semaphore under another name, which it then removes,
    and the kernel shows the mapping under that removed name::

        7f0a… rw-s 00000000 00:1a 42  /dev/shm/sem.Xq3f9a (deleted)
        /dev/shm/sem.mp-5k2b8c1d, whose inode is 42
    """
    mapped: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has ended, or is somebody else's
            if os.getpgid(int(entry.name)) != group:
                continue
            for line in (entry / "maps").read_text(errors="replace").splitlines():
                columns = line.split(maxsplit=5)  # range, rights, offset, device, inode, path
                if len(columns) == 6 and columns[5].startswith(f"{MEMORY}/"):
                    mapped.add(int(columns[4]))
    shared: set[str] = set()
    with suppress(OSError), os.scandir(MEMORY) as entries:
        shared = {e.path for e in entries if _is_ours(Path(e.path)) and e.inode() in mapped}
    return shared


def remove(paths: Iterable[str]) -> None:
    """Remove what a server whose processes have ended has left: files, and its folder of sockets.

    `paths` are those of the server's record, a file that may have been copied or edited. So only
    paths are removed that have a name of this module and are in its place.
    """
    for path in map(Path, paths):
        if not _is_ours(path):
            continue
        if path.name.startswith(SOCKETS):  # a folder
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_ours(path: Path) -> bool:
    if path.name.startswith(SOCKETS):
        return path.is_dir() and not path.is_symlink()
    return path.parent == MEMORY and path.name.startswith(SHARED) and " " not in path.name
