"""Files that a killed server leaves outside the run's folder: sockets, semaphores, shared memory.

vLLM's processes share up to hundreds of megabytes of memory under names in /dev/shm. They remove
them when they end by themselves; after SIGKILL somebody else has to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MEMORY = Path("/dev/shm")
SHARED = ("psm_", "sem.mp-", "vllm_dist_")
"""Beginnings of names: Python's of shared memory and semaphores; those of vLLM's CPU workers."""
SOCKETS = "agenttrain-server-"
"""Beginning of the name of a server's folder for sockets."""


def shared_by(group: int) -> set[str]:
    """Return the files in /dev/shm that the processes of a group have mapped."""
    mapped: set[str] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):  # it has ended, or is somebody else's
            if os.getpgid(int(entry.name)) != group:
                continue
            for line in (entry / "maps").read_text(errors="replace").splitlines():
                path = line[line.find("/") :]
                if path.startswith(str(MEMORY)) and _is_ours(Path(path)):
                    mapped.add(path)
    return mapped


def remove(paths: Iterable[str]) -> None:
    """Remove files of a server whose processes have ended; other names are left alone."""
    for path in map(Path, paths):
        if not _is_ours(path):
            continue  # a record that was copied, or edited
        if path.name.startswith(SOCKETS):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_ours(path: Path) -> bool:
    if path.name.startswith(SOCKETS):
        return path.is_dir() and not path.is_symlink()
    return path.parent == MEMORY and path.name.startswith(SHARED) and " " not in path.name
