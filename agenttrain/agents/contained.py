"""Agents as programs in the rollout's container, to which only the endpoint answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from agenttrain.agents.command_agent import LAST_WORDS, result_reward
from agenttrain.agents.output import BoundedLog
from agenttrain.agents.task import AgentFailed, AgentTask
from agenttrain.types import RolloutMachine

UNKILLED_S = 60.0
"""Seconds above the rollout's limit, after which the container ends a program by itself."""


class ContainedAgent:
    """A process for each rollout, in its container: an `OutsideAgent` of `Agents`."""

    def __init__(
        self,
        command: Sequence[str],
        machine_of: Callable[[str], RolloutMachine | None],
        *,
        env: Mapping[str, str],
        timeout_s: float,
        exit_code: bool,
    ) -> None:
        """`machine_of` returns the machine of a rollout; `env` is added to its variables. With
        `exit_code` the exit code is the reward, as of `CommandAgent`."""
        self._command, self._machine_of, self._env = list(command), machine_of, dict(env)
        self._exit_code_is_reward = exit_code
        # Above the limit at which `Agents` cancels an attempt, so that it never comes first.
        self._timeout_s = timeout_s + UNKILLED_S

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Run the program to its end; return the reward in its last line, if there is one."""
        machine = self._machine_of(assignment.rollout_id)
        if machine is None:
            raise AgentFailed("has no container to run in")
        out = BoundedLog(log.with_suffix(".stdout"))
        try:
            result = await machine.exec(
                self._command,
                timeout_s=self._timeout_s,
                stdin=assignment.line().encode() + b"\n",
                env=assignment.environment(self._env),
                max_bytes=1,  # the result need not hold the output, which goes to `out`
                on_output=out.write,
            )
        finally:
            out.close()
        # 128 + n: signal n ended it, which is a crash.
        if self._exit_code_is_reward and result.code < 128:
            return float(result.code == 0)
        if result.code:
            words = out.last_words(LAST_WORDS)
            how = f"ended with exit code {result.code}"
            raise AgentFailed(how + (f"; it printed: {words}" if words else ""))
        return result_reward(out.last_line())

    async def aclose(self) -> None:
        """Nothing is kept between rollouts: containers end with them."""
