"""Agents as programs: a process for each rollout.

A program is started below a keeper (`tools/isolation_keeper.py`), so that nothing that it started
is left when it ends, when it is ended, or when the run is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from agenttrain.agents.task import AgentFailed, AgentTask
from agenttrain.utils.files import PACKAGE

PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE"),
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
    *("NODE_PATH", "JAVA_HOME", "OMP_NUM_THREADS", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables that every agent gets; those that begin with LC_ too."""
LAUNCHER = Path(__file__).with_name("launcher.py")
KILL_S = 5.0
"""Longest wait for a keeper to end its processes before it is killed itself."""
LAST_WORDS = 2000
"""Characters of its output that a failure quotes, the last ones."""
LINE_LIMIT = 2**24
"""Bytes of a line that a worker prints, at most."""


def environment_of(named: Sequence[str]) -> dict[str, str]:
    """Return the environment of agents: what every program needs, and the variables `named`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith("LC_") or name in named
    }


class AgentProcess:
    """A running program below its keeper."""

    def __init__(self, process: asyncio.subprocess.Process, lifeline: int) -> None:
        self.process = process
        self._lifeline: int | None = lifeline

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        env: dict[str, str],
        *,
        stdout: int | IO[bytes],
        stderr: int | IO[bytes],
    ) -> AgentProcess:
        """Start a command; raises AgentFailed."""
        watched, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(LAUNCHER), str(PACKAGE.parent)),
                *(str(os.getpid()), str(watched), *command),
                stdin=asyncio.subprocess.PIPE,
                stdout=stdout,
                stderr=stderr,
                env=env,
                pass_fds=(watched,),
                start_new_session=True,
                limit=LINE_LIMIT,
            )
        except BaseException:
            os.close(lifeline)
            raise
        finally:
            os.close(watched)
        return cls(process, lifeline)

    async def send(self, line: str) -> None:
        """Write a line to its standard input; one that does not read it misses nothing."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.write(line.encode() + b"\n")
            await self.process.stdin.drain()

    async def end(self) -> None:
        """End it with all that it started."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            async with asyncio.timeout(KILL_S):
                await self.process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


class CommandAgent:
    """A process for each rollout."""

    def __init__(
        self, command: Callable[[], Sequence[str]], env: dict[str, str], *, exit_code: bool
    ) -> None:
        """`command` returns it when a rollout begins; `exit_code`: it is the reward, 1 for 0 and 0
        for any other."""
        self._command, self._env, self._exit_code = command, env, exit_code

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Run the program to its end; return the reward in its last line, if there is one."""
        out, err = log.with_suffix(".stdout"), log.with_suffix(".stderr")
        with out.open("wb") as stdout, err.open("wb") as stderr:
            env = {**self._env, **assignment.environment()}
            program = await AgentProcess.start(self._command(), env, stdout=stdout, stderr=stderr)
        try:
            await program.send(assignment.line())
            assert program.process.stdin is not None
            program.process.stdin.close()
            code = await program.process.wait()
        finally:
            await program.end()
            printed = _tail(out)
            last, words = printed.rpartition("\n")[2], _tail(err) or printed
            for path in (out, err):
                if path.stat().st_size == 0:
                    path.unlink()
        if self._exit_code and code >= 0:
            return float(code == 0)
        if code != 0:
            raise AgentFailed(f"{ending(code)}" + (f"; it printed: {words}" if words else ""))
        return result_reward(last)

    async def aclose(self) -> None:
        """Nothing is kept between rollouts."""


def result_reward(line: str) -> float | None:
    """Return the reward in a line that is a JSON object with one; None for any other line."""
    with suppress(ValueError):
        result = json.loads(line)
        if isinstance(result, dict):
            return reward_in(result)
    return None


def reward_in(result: dict[str, Any]) -> float | None:
    """Return the `reward` of an agent's result; None if it has none. Raises AgentFailed."""
    value = result.get("reward")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AgentFailed(f"its result has reward={value!r}, which is no number")
    return float(value)


def ending(code: int) -> str:
    """Return how a program ended, as the end of a sentence."""
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(file.tell() - LAST_WORDS, 0))
        return file.read().decode("utf-8", "replace").strip()
