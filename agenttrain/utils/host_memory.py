"""Memory of the host that this process may use: of the machine, its container or its job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil

ROOT = Path("/")
LIMITS = {
    "": ("sys/fs/cgroup", "memory.max"),
    "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}
"""Controller of a cgroup -> the folder of its groups, and the file with a group's limit in bytes.
Version 2 of cgroups has one hierarchy for all controllers, whose name is empty."""


def host_memory(root: Path = ROOT) -> int | None:
    """Return the bytes of the machine's memory, or of the share that a cgroup leaves this process.

    None: not known, as in a sandbox without /proc. `root` is the folder of /proc and /sys.
    """
    try:
        total = int(psutil.virtual_memory().total)
    except (OSError, psutil.Error):
        return None
    return min([total, *_read_limits(root)])


def _read_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the cgroups of this process, in bytes.

    A limit of a group holds for the groups in it too, so those of all groups above count.
    """
    path_of_controller = dict.fromkeys(LIMITS, "/")  # of "" (version 2) and "memory" (version 1)
    for line in _read(root / "proc/self/cgroup").splitlines():
        # Version 2: "0::/user.slice/job_7". Version 1: "5:memory,pids:/job_7".
        _, controllers, path = line.split(":", 2)
        path_of_controller |= {name: path for name in controllers.split(",") if name in LIMITS}
    for controller, path in path_of_controller.items():
        folder, file = LIMITS[controller]
        group = PurePosixPath(path.strip("/"))
        # A container may read the host's path of its group here, which it has no folders for. Its
        # own group is mounted at the top of its cgroup folder, the last of the parents.
        for ancestor in (group, *group.parents):
            limit = _read(root / folder / ancestor / file).strip()
            if limit.isdecimal():  # a group without a limit says "max"
                yield int(limit)


def _read(path: Path) -> str:
    """Return the text of a file; empty if there is none, or it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
