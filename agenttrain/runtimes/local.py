"""The double of a runtime: commands run in a folder of this machine, without any confinement.

For tests and for trying a back end of your own; a model's commands would run as you.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from agenttrain.runtimes.base import MachineLost, MachineSpec
from agenttrain.runtimes.output import Clipped
from agenttrain.types import CommandResult
from agenttrain.utils.temporary import TemporaryFolder

KILLED = 137
"""Exit code of a command that SIGKILL ended, as shells count: 128 + 9."""


class LocalMachine:
    """A folder in which commands run."""

    def __init__(self, spec: MachineSpec) -> None:
        self.spec = spec
        self.folder = TemporaryFolder()
        self.ended = False

    async def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        max_bytes: int = 1 << 20,
        on_output: Callable[[bytes], object] | None = None,
    ) -> CommandResult:
        """Run a command in the folder, as this process's user; see `RolloutMachine.exec`."""
        if self.ended:
            raise MachineLost("the machine has ended")
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, **self.spec.env, **(env or {})},
            cwd=self._inside(cwd or "."),
            start_new_session=True,
        )
        output, timed_out = Clipped(max_bytes, on_output), False
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(stdin)
                process.stdin.close()
                while data := await process.stdout.read(1 << 16):
                    output.add(data)
                code = await process.wait()
        except TimeoutError:
            timed_out, code = True, KILLED
        finally:
            # The command, if its time was up or this was cancelled, and in any case what it has
            # left running in the background.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if code < 0:  # ended by the signal -code: 128 + its number, as in shells and in KILLED
            code = 128 - code
        return CommandResult(
            code=code, output=output.bytes(), size=output.size, timed_out=timed_out
        )

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a file or a folder's contents into the folder."""
        path = self._inside(target)
        if source.is_dir():
            shutil.copytree(source, path, dirs_exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path)

    async def copy_out(self, source: str, target: Path) -> bool:
        """Copy a file or folder out of the folder; return False if there is none."""
        path = self._inside(source)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        elif path.exists():
            shutil.copy(path, target)
        return path.exists()

    async def stop(self) -> None:
        """Remove the folder."""
        self.ended = True
        self.folder.remove()

    def _inside(self, path: str) -> Path:
        return self.folder.path / path.lstrip("/")


class LocalRuntime:
    """Makes a folder for each rollout."""

    def __init__(self) -> None:
        self.started: list[LocalMachine] = []

    async def start(self, spec: MachineSpec) -> LocalMachine:
        """Return a machine that is a folder."""
        machine = LocalMachine(spec)
        self.started.append(machine)
        return machine

    async def aclose(self) -> None:
        """Remove the folders that are left."""
        for machine in self.started:
            await machine.stop()
