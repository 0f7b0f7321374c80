"""`python` and `bash`: interpreters in a sandbox. Each rollout has its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

from agenttrain.tools.config import Isolation, ToolSettings
from agenttrain.tools.machine import machine_of, run_bash, run_python
from agenttrain.tools.sandbox.config import (
    RUNTIME,
    SandboxSettings,
    check_language,
    is_sandbox,
)
from agenttrain.tools.sandbox.pool import Pool
from agenttrain.types import ToolContext
from agenttrain.utils.data_fields import Data, DataWhere


class _Interpreter:
    """Base class of both tools: a sandbox from a rollout's first call to its end."""

    def __init__(self, settings: SandboxSettings) -> None:
        """Raises ValueError if this machine cannot make such a sandbox."""
        self._settings = settings
        self._pool = None if settings.sandbox == RUNTIME else Pool.of(settings)

    async def release(self, rollout_id: str) -> None:
        """End the sandbox of a finished rollout."""
        if self._pool is not None:
            await self._pool.release(rollout_id)

    async def close(self) -> None:
        """End all sandboxes at the end of the run."""
        if self._pool is not None:
            await self._pool.close()

    async def _call(self, kind: str, code: str, context: ToolContext) -> str:
        """Run code in the rollout's sandbox, or in its container."""
        if self._pool is not None:
            return await self._pool.call(context.rollout_id, kind, code, self._settings)
        run = run_python if kind == "python" else run_bash
        return await run(machine_of(context), code, self._settings)


class Python(_Interpreter):
    """Runs Python code in an interpreter whose variables last for the rollout."""

    async def __call__(self, code: str, context: ToolContext) -> str:
        """Run Python code. Variables are kept between calls. Returns what it prints, and the value of the last expression.

        Args:
            code: The Python code.
        """  # noqa: E501 (a description is one line in the schema)
        return await self._call("python", code, context)


class Bash(_Interpreter):
    """Runs shell commands in a bash whose folder and variables last for the rollout."""

    async def __call__(self, command: str, context: ToolContext) -> str:
        """Run a bash command. Folder and variables are kept between calls.

        Args:
            command: The command.
        """
        return await self._call("bash", command, context)


DEFAULTS = SandboxSettings()


def interpreter(
    language: Data[str],
    *,
    sandbox: Annotated[str, DataWhere(is_sandbox)] = DEFAULTS.sandbox,
    memory_mb: Data[int] = DEFAULTS.memory_mb,
    disk_mb: Data[int] = DEFAULTS.disk_mb,
    file_mb: Data[int] = DEFAULTS.file_mb,
    cpu_s: Data[int] = DEFAULTS.cpu_s,
    processes: Data[int] = DEFAULTS.processes,
    call_s: Data[float] = DEFAULTS.call_s,
    max_chars: Data[int] = DEFAULTS.max_chars,
    packages: str | None = DEFAULTS.packages,
) -> Callable[..., object]:
    """Make the tool `python` or `bash`; SandboxSettings explains the settings.

    Raises ValueError, beginning with ``name=value``, for settings that cannot work, and if no
    sandbox can be made. ``sandbox="none"`` runs code without a sandbox, and warns on stderr.

    Example: ``interpreter("python", memory_mb=256, call_s=2.0)``
    """
    check_language(language)
    settings = SandboxSettings(
        sandbox=sandbox,
        memory_mb=memory_mb,
        disk_mb=disk_mb,
        file_mb=file_mb,
        cpu_s=cpu_s,
        processes=processes,
        call_s=call_s,
        max_chars=max_chars,
        packages=packages,
    )
    tool = Python(settings) if language == "python" else Bash(settings)
    if sandbox == "none":
        print(
            f"warning: sandbox=none: the `{language}` tool runs the model's code without a sandbox,"
            " as this user, with its files and the network; only limits per process hold",
            file=sys.stderr,
        )
    return tool


def interpreter_problems(
    key: str, settings: ToolSettings, arguments: Mapping[str, Any]
) -> Iterator[str]:
    """Yield problems of an interpreter's settings and arguments, whose names are valid."""
    if settings.isolation is Isolation.process:
        # Each worker process would have a pool of its own, and the next call of a rollout may go to
        # another worker: variables and files would be gone.
        yield (
            f"{key}.isolation=process: its code runs in processes of the rollout's own already, "
            "which other workers would not find again; leave isolation out"
        )
    limits = dict(arguments)
    try:
        check_language(limits.pop("language", None))
        sandbox = SandboxSettings(**limits)
    except ValueError as error:
        yield f"{key}.{error}"
        return
    if sandbox.call_s >= settings.timeout_s:
        yield (
            f"{key}.call_s={sandbox.call_s:g}: not below {key}.timeout_s={settings.timeout_s:g}, "
            "which would end the call first; lower it or raise timeout_s"
        )
