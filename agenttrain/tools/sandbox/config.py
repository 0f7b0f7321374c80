"""Settings of the `python` and `bash` tools: what a sandbox may use, and which backend makes it.

Nothing here or in the pool imports a package, not even pydantic: sandboxes also run under a Python
without packages.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import isfinite

from agenttrain.utils.names import did_you_mean

INTERPRETER = "agenttrain.tools.sandbox.tool.interpreter"
LANGUAGES = ("python", "bash")
BACKENDS = ("bwrap", "unshare")
RUNTIME = "runtime"
"""The rollout's container: a run with `runtime=podman` sets it in place of `required`."""
CHOICES = ("required", *BACKENDS, RUNTIME, "none")
MINIMUM = {
    **{"memory_mb": 64, "disk_mb": 1, "file_mb": 1},
    **{"cpu_s": 1, "processes": 4, "max_chars": 1},
}
"""Setting that is a whole number -> its minimum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Limits of one rollout's sandbox.

    Tools whose settings differ only in `call_s` and `max_chars` share a sandbox and its folders.
    """

    sandbox: str = "required"
    """`required`: Linux namespaces, by bubblewrap where it is installed, else by unshare(2);
    `bwrap` or `unshare`: this one; `none`: no sandbox, only limits per process; `runtime`: the
    rollout's container, whose limits are those of `runtime`."""
    memory_mb: int = 512
    """Memory of each process, and of all together with what they wrote to their folders; an
    interpreter alone needs 64."""
    disk_mb: int = 64
    """Size of /work, /tmp and /dev/shm together; they are in memory."""
    file_mb: int = 32
    """Size of one file."""
    cpu_s: int = 60
    """Processor seconds of one process, over all its calls."""
    processes: int = 32
    """Processes and threads at once, two of them the sandbox's own."""
    call_s: float = 8.0
    """Seconds of a call; below the tool's timeout_s, so that the model reads what became of it."""
    max_chars: int = 4000
    """Characters of a call's output; of a longer one the middle is left out."""
    packages: str | None = None
    """A folder of packages that the code may import, e.g. some environment's site-packages."""

    def __post_init__(self) -> None:
        """Raises ValueError, beginning with ``name=value``, for what cannot work."""
        if self.sandbox not in CHOICES:
            hint = did_you_mean(str(self.sandbox), CHOICES)
            raise ValueError(f"sandbox={self.sandbox}: expected one of: {', '.join(CHOICES)}{hint}")
        for name, minimum in MINIMUM.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                shown = str(value).lower() if isinstance(value, bool) else value
                raise ValueError(f"{name}={shown}: expected a whole number")
            if value < minimum:
                raise ValueError(f"{name}={value}: must be at least {minimum}")
        if isinstance(self.call_s, bool) or not isinstance(self.call_s, int | float):
            raise ValueError(f"call_s={self.call_s}: expected a number")
        if not isfinite(self.call_s):
            raise ValueError(f"call_s={self.call_s}: must be a finite number")
        if self.call_s <= 0:
            raise ValueError(f"call_s={self.call_s}: must be more than 0")
        if self.disk_mb > self.memory_mb:
            raise ValueError(
                f"disk_mb={self.disk_mb}: more than memory_mb={self.memory_mb}, which counts it "
                "too; lower it, or raise memory_mb"
            )
        if self.packages is not None and not os.path.isdir(self.packages):
            raise ValueError(f"packages={self.packages}: there is no such folder")
        if self.packages is not None and not os.stat(self.packages).st_mode & 0o001:
            raise ValueError(
                f"packages={self.packages}: the sandbox's user may not read it; chmod a+rX it"
            )


def is_sandbox(choice: object) -> bool:
    """Return True for a sandbox; False for ``none``, where the model's code runs as the user."""
    return choice in ("required", *BACKENDS, RUNTIME)


def check_language(language: object) -> None:
    """Raise ValueError, which begins ``language=``, for a language without an interpreter."""
    if language not in LANGUAGES:
        hint = did_you_mean(str(language), LANGUAGES)
        raise ValueError(f"language={language!r}: expected one of: {', '.join(LANGUAGES)}{hint}")
