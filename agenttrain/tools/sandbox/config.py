"""Settings of the `python` and `bash` tools: what a sandbox may use, and which backend makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agenttrain.tools.config import Isolation
from agenttrain.utils.names import did_you_mean

INTERPRETER = "agenttrain.tools.sandbox.tool.interpreter"
LANGUAGES = ("python", "bash")
BACKENDS = ("bwrap", "unshare")
CHOICES = ("required", *BACKENDS, "none")
WHOLE = ("memory_mb", "disk_mb", "file_mb", "cpu_s", "processes", "max_chars")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Limits of one rollout's sandbox.

    Tools share it, and the work folder in it, if they differ in `call_s` and `max_chars` only.
    """

    sandbox: str = "required"
    """`required`: Linux namespaces, by bubblewrap where it is installed, else by unshare(2);
    `bwrap` or `unshare`: this one; `none`: no sandbox, only limits per process."""
    memory_mb: int = 512
    """Memory of each process, and of all together with what they wrote to their folders."""
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
            raise ValueError(f"sandbox={self.sandbox!r}: expected one of: {', '.join(CHOICES)}")
        for name in WHOLE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
        number = isinstance(self.call_s, int | float) and not isinstance(self.call_s, bool)
        if not number or not 0 < self.call_s < float("inf"):
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
        if self.packages is not None and not os.path.isdir(str(self.packages)):
            raise ValueError(f"packages={self.packages!r}: there is no such folder")
        if self.packages is not None and not os.stat(self.packages).st_mode & 0o001:
            raise ValueError(
                f"packages={self.packages!r}: the sandbox's user may not read it; chmod a+rX it"
            )

    def backends(self) -> tuple[str, ...]:
        """Return the backends to try, in order."""
        return BACKENDS if self.sandbox == "required" else (self.sandbox,)


def check_language(language: object) -> None:
    """Raises ValueError, beginning with ``language=``, unless there is an interpreter of it."""
    if language not in LANGUAGES:
        hint = did_you_mean(str(language), LANGUAGES)
        raise ValueError(f"language={language!r}: expected one of: {', '.join(LANGUAGES)}{hint}")


def interpreter_problems(
    key: str, section: Mapping[str, Any], timeout_s: Any, limits: tuple[str, ...]
) -> Iterator[str]:
    """Yield what is wrong with the settings of such a tool; unknown names are found elsewhere."""
    if section.get("isolation", Isolation.thread) == Isolation.process:
        yield (
            f"{key}.isolation=process: its code runs in processes of the rollout's own already, "
            "which other workers would not find again; leave isolation out"
        )
    bound = {n: value for n, value in section.items() if n not in ("_target_", *limits)}
    try:
        check_language(bound.pop("language", None))
        settings = SandboxSettings(**bound)
    except TypeError:
        return
    except ValueError as error:
        yield f"{key}.{error}"
        return
    if isinstance(timeout_s, int | float) and settings.call_s >= timeout_s:
        yield (
            f"{key}.call_s={settings.call_s:g}: not below {key}.timeout_s={timeout_s:g}, which "
            "would end the call first; lower it or raise timeout_s"
        )
