"""Settings of the `python` and `bash` tools: what a sandbox may use, and which backend makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.tools.config import Isolation, ToolSettings
from agenttrain.types import ConfigError
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import SETTINGS, Number, Whole, validated

INTERPRETER = "agenttrain.tools.sandbox.tool.interpreter"
LANGUAGES = ("python", "bash")
BACKENDS = ("bwrap", "unshare")


class Sandbox(StrEnum):
    """Backend of a sandbox."""

    required = "required"
    bwrap = "bwrap"
    unshare = "unshare"
    none = "none"


@dataclass(config=SETTINGS, frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """Limits of one rollout's sandbox.

    Tools share it, and the work folder in it, if they differ in `call_s` and `max_chars` only.
    """

    sandbox: Sandbox = Sandbox.required
    """`required`: Linux namespaces, by bubblewrap where it is installed, else by unshare(2);
    `bwrap` or `unshare`: this one; `none`: no sandbox, only limits per process."""
    memory_mb: Whole = Field(default=512, ge=64)
    """Memory of each process, and of all together with what they wrote to their folders; an
    interpreter alone needs 64."""
    disk_mb: Whole = Field(default=64, ge=1)
    """Size of /work, /tmp and /dev/shm together; they are in memory."""
    file_mb: Whole = Field(default=32, ge=1)
    """Size of one file."""
    cpu_s: Whole = Field(default=60, ge=1)
    """Processor seconds of one process, over all its calls."""
    processes: Whole = Field(default=32, ge=4)
    """Processes and threads at once, two of them the sandbox's own."""
    call_s: Number = Field(default=8.0, gt=0)
    """Seconds of a call; below the tool's timeout_s, so that the model reads what became of it."""
    max_chars: Whole = Field(default=4000, ge=1)
    """Characters of a call's output; of a longer one the middle is left out."""
    packages: str | None = None
    """A folder of packages that the code may import, e.g. some environment's site-packages."""

    @field_validator("packages")
    @classmethod
    def _can_be_read(cls, packages: str | None) -> str | None:
        if packages is not None and not os.path.isdir(packages):
            raise ValueError("there is no such folder")
        if packages is not None and not os.stat(packages).st_mode & 0o001:
            raise ValueError("the sandbox's user may not read it; chmod a+rX it")
        return packages

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.disk_mb > self.memory_mb:
            raise ValueError(
                f"disk_mb={self.disk_mb}: more than memory_mb={self.memory_mb}, which counts it "
                "too; lower it, or raise memory_mb"
            )
        return self

    def backends(self) -> tuple[str, ...]:
        """Return the backends to try, in order."""
        return BACKENDS if self.sandbox is Sandbox.required else (str(self.sandbox),)


def check_language(language: object) -> None:
    """Raises ValueError, beginning with ``language=``, unless there is an interpreter of it."""
    if language not in LANGUAGES:
        hint = did_you_mean(str(language), LANGUAGES)
        raise ValueError(f"language={language!r}: expected one of: {', '.join(LANGUAGES)}{hint}")


def interpreter_problems(
    key: str, settings: ToolSettings, arguments: Mapping[str, Any]
) -> Iterator[str]:
    """Yield problems of such a tool's settings and arguments; unknown names are checked before."""
    if settings.isolation is Isolation.process:
        yield (
            f"{key}.isolation=process: its code runs in processes of the rollout's own already, "
            "which other workers would not find again; leave isolation out"
        )
    limits = dict(arguments)
    try:
        check_language(limits.pop("language", None))
        sandbox = validated(SandboxSettings, limits, key)
    except ConfigError as error:
        yield from str(error).splitlines()
        return
    except ValueError as error:
        yield f"{key}.{error}"
        return
    if sandbox.call_s >= settings.timeout_s:
        yield (
            f"{key}.call_s={sandbox.call_s:g}: not below {key}.timeout_s={settings.timeout_s:g}, "
            "which would end the call first; lower it or raise timeout_s"
        )
