"""Real programs as agents, unpatched, with a scripted policy: the work is done, and merged.

`scripts/test-clients` installs them and sets CLIENTS, the folder that they are in. A sandbox lets
none of them connect anywhere but to the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import parts
import pytest

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.chat.wire.normal import Question
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.rollout.ledger import verify
from agenttrain.tracking.metrics import agent_metrics
from agenttrain.types import Rollout, StopReason, Task

CLIENTS = Path(os.environ.get("CLIENTS", "/nowhere"))
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = [
    pytest.mark.skipif("CLIENTS" not in os.environ, reason="scripts/test-clients runs it"),
    pytest.mark.timeout(900),
]
LIMITS = replace(parts.LIMITS, max_turns=50, max_completion_tokens=10**6, max_turn_tokens=10**5)
FILES = {"note.py": "x = 3\n"}
CHECK = "grep -qx 'x = 7' note.py && grep -qx 'y = 1' more.py"
SHELLS = {"claude": ("Bash", "command"), "codex": ("exec_command", "cmd")}
"""Name of each program's shell for the model, and of its argument."""
PROGRAMS = {"claude": ("CLAUDE", "claude_code"), "codex": ("CODEX", "codex")}
"""Variable with the path of each program, and the example that runs it."""


def call(name: str, **arguments: Any) -> str:
    return parts.call(name, json.dumps(arguments)).removesuffix("<|im_end|>")


def shell(program: str, command: str) -> str:
    """A call of a program's shell."""
    tool, argument = SHELLS[program]
    described = {"description": "work"} if program == "claude" else {}
    return call(tool, **{argument: command}, **described)


class Policy:
    """Works through its turns: one for each turn of a conversation with tools."""

    def __init__(self, turns: Sequence[str], helper: Sequence[str] = ()) -> None:
        """`helper` are the turns of a sub-agent: of a conversation that begins with HELP."""
        self.turns, self.helper = turns, helper
        self.questions: dict[str, Question] = {}

    def __call__(self, ids: Sequence[int], session: str, turn: int) -> tuple[int, ...]:
        question = self.questions[session]
        answered = sum(message["role"] == "assistant" for message in question.messages)
        is_helper = any(HELP in str(m["content"]) for m in question.messages if m["role"] == "user")
        turns = self.helper if is_helper else self.turns
        if not question.schemas:
            text = "A title"
        else:
            text = turns[answered] if answered < len(turns) else "It is done."
        return parts.ids(f"{text}<|im_end|>")


HELP = "Count the lines."


def attempt(program: str, policy: Policy, folder: Path, count: int = 1) -> list[Rollout]:
    """Let a program attempt the task, and check the ledger of each rollout."""
    variable, example = PROGRAMS[program]
    path = CLIENTS / "npm" / "node_modules" / ".bin" / program
    config = AgentConfig(
        name="endpoint",
        command=[sys.executable, str(EXAMPLES / example / "agent.py")],
        env=[variable],
        timeout_s=600,
        sandbox="bwrap",
        memory_mb=8192,
        read=[str(CLIENTS / "npm")],
    )
    task = Task(
        task_id="note",
        messages=({"role": "user", "content": "Make x 7 in note.py, and y 1 in more.py."},),
        columns={"files": FILES, "check": CHECK},
    )
    chat = parts.chat()

    async def run() -> list[Rollout]:
        agents = Agents(config, chat, folder, on_request=policy.questions.__setitem__)
        engine = ScriptedEngine(policy, max_context=400_000, keeps_sent=False)
        try:
            return [
                await agents.attempt(
                    RolloutRequest(task=task, sampling=Sampling(), rollout_id=f"{program}-{n}"),
                    engine,
                    LIMITS,
                )
                for n in range(count)
            ]
        finally:
            await agents.aclose()

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(variable, str(path))
        done = asyncio.run(run())
    for rollout in done:
        assert (rollout.stop_reason, rollout.error) == (StopReason.completed, None)
        verify(rollout, chat, [])
    return done


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_work_is_done_and_is_one_trajectory(program: str, tmp_path: Path) -> None:
    turns = [
        shell(program, "cat note.py"),
        shell(program, "printf 'x = 7\\n' > note.py"),
        # Two calls at once.
        shell(program, "printf 'y = 1\\n' > more.py") + "\n" + shell(program, "ls"),
    ]
    if program == "codex":  # Anthropic's messages have no place for a malformed call
        turns.insert(1, shell(program, "false").replace('"arguments": {', '"arguments": {"'))
    done = attempt(program, Policy(turns), tmp_path, count=10)
    for rollout in done:
        assert rollout.environment_reward == 1
        assert [(t.role, t.turns) for t in rollout.trajectories] == [("main", len(turns) + 1)]
        assert not rollout.untrained
    assert agent_metrics(done)["agent/merged_share"] == 1.0


def test_a_sub_agent_of_claude_code_is_a_trajectory_of_its_own(tmp_path: Path) -> None:
    helper = call("Agent", description="count", prompt=HELP, subagent_type="general-purpose")
    turns = [
        shell("claude", "printf 'x = 7\\n' > note.py; printf 'y = 1\\n' > more.py"),
        helper.replace('"subagent_type"', '"run_in_background": false, "subagent_type"'),
    ]
    (done,) = attempt("claude", Policy(turns, helper=[shell("claude", "wc -l note.py")]), tmp_path)
    assert done.environment_reward == 1
    assert [(t.role, t.turns) for t in done.trajectories] == [("main", 3), ("agent", 2)]
    assert agent_metrics([done])["agent/merged_share"] == 1.0
