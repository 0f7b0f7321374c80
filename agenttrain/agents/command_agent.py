"""Agents as programs: a process for each rollout.

Nothing that a program has started is left when it ends, when it is ended, or when the run is
killed.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agenttrain.agents.output import TAIL_BYTES, BoundedLog, copy_output
from agenttrain.agents.task import AgentFailed, AgentTask, agent_reward
from agenttrain.utils.child_process import LAST_WORDS_S, AsyncChildProcess, how_ended

PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE"),
    *("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH"),
    *("NODE_PATH", "JAVA_HOME", "OMP_NUM_THREADS", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Environment variables that every agent gets; those that begin with LC_ too."""
LAST_WORDS = 2000
"""Last characters of an agent's output that a failure quotes."""


def environment_of(named: Sequence[str]) -> dict[str, str]:
    """Return the environment of agents: what every program needs, and the variables `named`."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name.startswith("LC_") or name in named
    }


async def start(
    command: Sequence[str], env: Mapping[str, str], *, line_limit: int = 2**16
) -> AsyncChildProcess:
    """Start the program of an agent; raises AgentFailed."""
    try:
        return await AsyncChildProcess.start(command, env=env, line_limit=line_limit)
    except (OSError, ValueError) as error:
        raise AgentFailed(f"cannot be started: {error}") from error


class CommandAgent:
    """A process for each rollout: an `OutsideAgent` of `Agents`."""

    def __init__(
        self, command: Callable[[], Sequence[str]], env: dict[str, str], *, exit_code: bool
    ) -> None:
        """`command` returns the command of a rollout when it begins. With `exit_code` the exit code
        is the reward: 1.0 for exit code 0, else 0.0."""
        self._command, self._env, self._exit_code_is_reward = command, env, exit_code

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Run the program to its end; return the reward in its last line, if there is one."""
        task_line = assignment.line()
        program = await start(make_command(self._command), assignment.environment(self._env))
        out, err = (BoundedLog(log.with_suffix(f".{name}")) for name in ("stdout", "stderr"))
        copying = [
            asyncio.ensure_future(copy_output(program.stdout, out)),
            asyncio.ensure_future(copy_output(program.stderr, err)),
        ]
        try:
            await program.send(task_line)
            program.stdin.close()
            code = await program.wait()
        finally:
            await program.end()  # with all processes that it has started
            await asyncio.wait(copying, timeout=LAST_WORDS_S)
            for task in copying:
                task.cancel()
            out.close()
            err.close()
        if self._exit_code_is_reward and code >= 0:  # below 0: a signal ended it, which is a crash
            return float(code == 0)
        if code != 0:
            words = err.last_words(LAST_WORDS) or out.last_words(LAST_WORDS)
            raise AgentFailed(how_ended(code) + (f"; it printed: {words}" if words else ""))
        if out.cut_line and out.last_line().endswith("}"):
            raise AgentFailed(
                f"printed a last line of over {TAIL_BYTES >> 10} KiB, which is not read: print the "
                'reward in a line of its own, {"reward": 1.0}'
            )
        return result_reward(out.last_line())

    async def aclose(self) -> None:
        """Nothing is kept between rollouts."""


def make_command(command: Callable[[], Sequence[str]]) -> Sequence[str]:
    """Return the command of a process. Raises AgentFailed if no sandbox can be made for it."""
    try:
        return command()
    except (OSError, ValueError) as error:
        raise AgentFailed(f"cannot be started: {error}") from error


def parse_result(line: str | bytes) -> dict[str, Any] | None:
    """Return a line's JSON object, or None. Raises AgentFailed for JSON that Python cannot load."""
    try:
        result = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError):  # no JSON: a line of ordinary output
        return None
    except RecursionError as error:
        raise AgentFailed("printed a line of JSON that is nested too deeply to be read") from error
    except ValueError as error:  # a number of more than 4300 digits, which `int` refuses
        raise AgentFailed(f"printed a line of JSON that cannot be read: {error}") from error
    return result if isinstance(result, dict) else None


def result_reward(line: str) -> float | None:
    """Return the reward in a line, or None. Raises AgentFailed unless it is a finite number."""
    return agent_reward((parse_result(line) or {}).get("reward"))
