"""What a sandbox may use, and which backend makes it."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from dataclasses import asdict, dataclass, fields

BACKENDS = ("bwrap", "unshare")
CHOICES = ("required", *BACKENDS, "none")
WHOLE = ("memory_mb", "disk_mb", "file_mb", "cpu_s", "processes", "max_chars")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Limits of one rollout's sandbox. Tools with equal settings share it."""

    sandbox: str = "required"
    """`required`: Linux namespaces, by bubblewrap where it is installed, else by unshare(2);
    `bwrap` or `unshare`: this one; `none`: no sandbox, only limits per process."""
    memory_mb: int = 512
    """Of each process, and of all together with what they wrote to their folders."""
    disk_mb: int = 64
    """Of /work, /tmp and /dev/shm together; they are in memory."""
    file_mb: int = 32
    """Of one file."""
    cpu_s: int = 60
    """Processor seconds of one process, over all its calls."""
    processes: int = 32
    """Processes and threads at once, two of them the sandbox's own."""
    call_s: float = 8.0
    """Seconds of a call; below the tool's timeout_s, so that the model reads what became of it."""
    max_chars: int = 4000
    """Of a call's output; of a longer one the middle is left out."""
    packages: str | None = None
    """A folder of packages that the code may import, e.g. some environment's site-packages."""

    def __post_init__(self) -> None:
        """Raises ValueError, beginning with ``name=value``, for what cannot work."""
        if self.sandbox not in CHOICES:
            raise ValueError(f"sandbox={self.sandbox!r}: expected one of: {', '.join(CHOICES)}")
        for name in WHOLE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        if isinstance(self.call_s, bool) or not 0 < self.call_s < float("inf"):
            raise ValueError(f"call_s={self.call_s!r}: must be a positive number of seconds")
        for name, least, why in (
            ("memory_mb", 64, "an interpreter alone needs it"),
            ("processes", 4, "two are the sandbox's own"),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}: {why}")
        if self.disk_mb > self.memory_mb:
            raise ValueError(
                f"disk_mb={self.disk_mb}: more than memory_mb={self.memory_mb}, which counts it "
                "too; lower it, or raise memory_mb"
            )
        if self.packages is not None and not os.path.isdir(self.packages):
            raise ValueError(f"packages={self.packages!r}: there is no such folder")
        if self.packages is not None and not os.stat(self.packages).st_mode & 0o001:
            raise ValueError(
                f"packages={self.packages!r}: the sandbox's user may not read it; chmod a+rX it"
            )

    def backends(self) -> tuple[str, ...]:
        """What to try, in order."""
        return BACKENDS if self.sandbox == "required" else (self.sandbox,)


SETTING_NAMES = tuple(field.name for field in fields(SandboxSettings))


def inside(
    settings: SandboxSettings, backend: str, *, control: int, work: str, user: int | None
) -> dict[str, object]:
    """What `start.py` is told."""
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
    """The Python that runs agenttrain, outside of any virtual environment."""
    path = getattr(sys, "_base_executable", sys.executable) or sys.executable
    return os.path.realpath(path)


def environment(work: str) -> dict[str, str]:
    """The variables that the code sees: none of ours."""
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
    """bubblewrap, asked for namespaces only: files, limits and filter are set up inside."""
    found = shutil.which("bwrap")
    if found is None:
        raise FileNotFoundError("bwrap is not installed")
    spaces = [f"--unshare-{name}" for name in ("pid", "net", "ipc", "uts", "cgroup-try")]
    mapped = ["--unshare-user", "--uid", "1000", "--gid", "1000"] if user is None else []
    rest = ["--as-pid-1", "--cap-add", "ALL", "--dev-bind", "/", "/", "--"]
    return [found, *mapped, *spaces, *rest]


_users = iter(range(1, 1 << 62))


def next_user() -> int | None:
    """Where this process is root: a user id that nobody has; else None, for a user namespace.

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
