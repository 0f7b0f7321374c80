"""Outside: the settings, the environment and the command that start a sandbox's process."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from dataclasses import asdict

from agenttrain.config.sandbox import SandboxSettings


def inside(
    settings: SandboxSettings, backend: str, *, control: int, work: str, user: int | None
) -> dict[str, object]:
    """Collect the settings that `start.py` gets."""
    limits = asdict(settings)
    for name in ("sandbox", "call_s", "max_chars"):
        del limits[name]
    packages = None if settings.packages is None else os.path.realpath(settings.packages)
    prefix = os.path.realpath(sys.base_prefix)
    folders = [path for path in (prefix, packages) if path and not path.startswith("/usr/")]
    return {
        **limits,
        "packages": packages,
        "backend": backend,
        "control": control,
        "work": work,
        "user": user,
        "folders": [path for path in folders if path != "/usr"],
    }


def interpreter() -> str:
    """Return the Python that runs agenttrain, outside of any virtual environment."""
    path = getattr(sys, "_base_executable", sys.executable) or sys.executable
    return os.path.realpath(path)


def environment(work: str) -> dict[str, str]:
    """Return the variables that the code sees: none of ours."""
    folder = os.path.dirname(interpreter())
    return {
        "PATH": f"{folder}:/usr/local/bin:/usr/bin:/bin",
        "HOME": work,
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp" if work == "/work" else work,
        # A pool of threads per processor would use up the processes that are allowed.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def bwrap_command(user: int | None) -> list[str]:
    """Return bubblewrap's command, for namespaces only: `start.py` sets up all else inside."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("bwrap is not installed")
    spaces = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    mapped = ["--unshare-user", "--uid", "1000", "--gid", "1000"] if user is None else []
    root = ["--as-pid-1", "--cap-add", "ALL", "--dev-bind", "/", "/", "--"]
    return [program, *mapped, *spaces, *root]


_users = iter(range(1, 1 << 62))


def next_user() -> int | None:
    """Return a user id that nobody has, if this process is root; else None: a user namespace.

    The processes of a sandbox are counted by it, and root itself has no limit and could write to
    /proc/sys. Raises PermissionError where the machine's root has no other user to become.
    """
    if os.geteuid() != 0:
        return None
    inner, outer, count = _user_map()
    if inner == 0 and outer == 0 and count < 1 << 31:
        raise PermissionError("this process is the machine's root and can become no other user")
    if count < 1 << 31:
        return None
    return 0x7000_0000 + ((os.getpid() & 0xFFFF) << 11) + (next(_users) & 0x7FF)


@functools.cache
def _user_map() -> tuple[int, int, int]:
    with open("/proc/self/uid_map", encoding="utf-8") as file:
        inner, outer, count = file.readline().split()
    return int(inner), int(outer), int(count)
