"""Real programs as agents, unpatched, with a scripted policy: the work is done, and merged.

`scripts/test-clients` installs them and sets CLIENTS, the folder that they are in. A sandbox lets
none of them connect anywhere but to the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import parts
import pytest

from agenttrain import cli
from agenttrain.agents.config import AgentConfig
from agenttrain.agents.restarts import Restart
from agenttrain.agents.runner import Agents
from agenttrain.chat.wire.normal import Question
from agenttrain.data.bundled.shop import row
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
AT_ONCE = 3
"""Rollouts that are attempted at the same time: programs wait more than they compute."""
HERE = Path(__file__).parent / "clients"
BIN = CLIENTS / "python" / "bin"
PROGRAMS = {
    "claude": (CLIENTS / "npm/node_modules/.bin/claude", "Bash", "command"),
    "codex": (CLIENTS / "npm/node_modules/.bin/codex", "exec_command", "cmd"),
    "opencode": (CLIENTS / "npm/node_modules/.bin/opencode", "bash", "command"),
    "qwen": (CLIENTS / "npm/node_modules/.bin/qwen", "run_shell_command", "command"),
    "mini": (CLIENTS / "python/bin/mini", "bash", "command"),
}
"""Path of each program, name of its shell for the model, and of the shell's argument."""
EXAMPLE_OF = {"claude": ("CLAUDE", "claude_code"), "codex": ("CODEX", "codex")}
"""Variable with the path of a program, and the example that runs it."""
DESCRIBED = {
    "claude": {"description": "work"},
    "opencode": {"description": "work"},
    "qwen": {"is_background": False},
}
"""Further arguments of its shell."""


def call(name: str, **arguments: Any) -> str:
    return parts.call(name, json.dumps(arguments)).removesuffix("<|im_end|>")


def shell(program: str, command: str) -> str:
    """A call of a program's shell."""
    _, tool, argument = PROGRAMS[program]
    return call(tool, **{argument: command}, **DESCRIBED.get(program, {}))


class Policy:
    """Works through its turns: one for each turn of a conversation with tools."""

    def __init__(
        self, turns: Sequence[str] | Mapping[str, Sequence[str]], helper: Sequence[str] = ()
    ) -> None:
        """`turns` by the text of the task that the user's messages hold, or of all tasks.

        `helper` are the turns of a sub-agent: of a conversation that begins with HELP.
        """
        self.turns = turns if isinstance(turns, Mapping) else {"": turns}
        self.helper = helper
        self.questions: dict[str, Question] = {}

    def __call__(self, ids: Sequence[int], session: str, turn: int) -> tuple[int, ...]:
        question = self.questions[session]
        answered = sum(
            "tool_calls" in message or "Calling tools" in str(message["content"])
            for message in question.messages
            if message["role"] == "assistant"
        )
        asked = "".join(str(m["content"]) for m in question.messages if m["role"] == "user")
        of_task = (turns for text, turns in self.turns.items() if text in asked)
        turns = self.helper if HELP in asked else next(of_task, ())
        if not question.schemas:
            text = "A title"
        else:
            text = turns[answered] if answered < len(turns) else "It is done."
        return parts.ids(f"{text}<|im_end|>")


HELP = "Count the lines."


def note_task(x: int = 7) -> Task:
    """A task that ends with two files: `x` is changed in one, the other is new."""
    return Task(
        task_id=f"note/{x}",
        messages=({"role": "user", "content": f"Make x {x} in note.py, and y 1 in more.py."},),
        columns={
            "files": {"note.py": "x = 3\n"},
            "check": f"grep -qx 'x = {x}' note.py && grep -qx 'y = 1' more.py",
        },
    )


def attempt(
    program: str,
    policy: Policy,
    folder: Path,
    tasks: Sequence[Task] = (note_task(),),
    **settings: Any,
) -> list[Rollout]:
    """Let a program attempt the tasks, and check the ledger of each rollout."""
    if program in EXAMPLE_OF:
        variable, example = EXAMPLE_OF[program]
        command = [sys.executable, str(EXAMPLES / example / "agent.py")]
        path = CLIENTS / "npm" / "node_modules" / ".bin" / program
    else:
        variable, path = "PROGRAM", PROGRAMS[program][0]
        command = [sys.executable, str(HERE / "with_program.py"), program]
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(variable, str(path))
        return attempt_tasks(tasks, command, policy, folder, env=[variable], **settings)


def attempt_tasks(
    tasks: Sequence[Task],
    command: Sequence[str],
    policy: Policy,
    folder: Path,
    **settings: Any,
) -> list[Rollout]:
    """Let a command attempt tasks in a sandbox, and check the ledger of each rollout."""
    config = AgentConfig(
        name="endpoint",
        command=list(command),
        timeout_s=600,
        sandbox="bwrap",
        memory_mb=8192,
        read=[str(CLIENTS / "npm"), str(CLIENTS / "python")],
        **settings,
    )
    chat = parts.chat()

    async def run() -> list[Rollout]:
        agents = Agents(config, chat, folder, on_request=policy.questions.__setitem__)
        engine = ScriptedEngine(policy, max_context=400_000, keeps_sent=False)
        places = asyncio.Semaphore(AT_ONCE)

        async def attempt_one(number: int, task: Task) -> Rollout:
            request = RolloutRequest(task=task, sampling=Sampling(), rollout_id=f"r-{number}")
            async with places:
                return await agents.attempt(request, engine, LIMITS)

        try:
            return await asyncio.gather(*map(attempt_one, range(len(tasks)), tasks))
        finally:
            await agents.aclose()

    done = asyncio.run(run())
    for rollout in done:
        output = "".join(path.read_text()[-2000:] for path in folder.rglob("*.std*"))
        assert (rollout.stop_reason, rollout.error) == (StopReason.completed, None), output
        verify(rollout, chat, [])
    return done


@pytest.mark.parametrize("program", EXAMPLE_OF)
def test_ten_tasks_are_done_and_are_a_trajectory_each(program: str, tmp_path: Path) -> None:
    turns: dict[str, list[str]] = {}
    tasks = [note_task(x) for x in range(10, 20)]
    for number, task in enumerate(tasks):
        words = turns[task.messages[0]["content"]] = [
            *(shell(program, f"cat note.py; echo {look}") for look in range(1 + number % 3)),
            shell(program, f"printf 'x = {10 + number}\\n' > note.py"),
            # Two calls at once.
            shell(program, "printf 'y = 1\\n' > more.py") + "\n" + shell(program, "ls"),
        ]
        if program == "codex":  # Anthropic's messages have no place for a malformed call
            words.insert(1, shell(program, "false").replace('"arguments": {', '"arguments": {"'))
    done = attempt(program, Policy(turns), tmp_path, tasks)
    for rollout, words in zip(done, turns.values(), strict=True):
        assert rollout.environment_reward == 1
        assert [(t.role, t.turns) for t in rollout.trajectories] == [("main", len(words) + 1)]
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


@pytest.mark.parametrize("program", sorted(PROGRAMS.keys() - EXAMPLE_OF))
def test_other_programs_do_the_work(program: str, tmp_path: Path) -> None:
    turns = [
        shell(program, "cat note.py"),
        shell(program, "printf 'x = 7\\n' > note.py; printf 'y = 1\\n' > more.py"),
    ]
    if program == "mini":  # it ends by a call
        turns.append(shell(program, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"))
    (done,) = attempt(program, Policy(turns), tmp_path)
    assert done.environment_reward == 1
    assert [(t.role, t.turns) for t in done.trajectories] == [("main", 3)]


ADDING = [
    call("add", a=3, b=4),
    call("add", a=1, b=2) + "\n" + call("add", a=5, b=6),
    "It is 7.",
]
SELECTING = [
    call("sql", query="SELECT 7"),
    call("sql", query="SELECT 1") + "\n" + call("sql", query="SELECT 2"),
    call("final_answer", answer="It is 7."),
]
LIBRARIES: dict[str, tuple[Sequence[object], dict[str, Any]]] = {
    "openai-agents": ([BIN / "python", EXAMPLES / "with_openai_agents.py"], {}),
    "pydantic-ai": ([BIN / "python", EXAMPLES / "with_pydantic_ai.py"], {}),
    "smolagents": ([BIN / "python", EXAMPLES / "with_smolagents.py"], {"on_form": "ask"}),
    "LangGraph": ([BIN / "python", HERE / "with_langgraph.py"], {}),
    "strands": ([BIN / "python", HERE / "with_strands.py"], {}),
    "inspect-ai": ([BIN / "python", HERE / "with_inspect.py"], {}),
    "LiteLLM": ([BIN / "python", HERE / "with_litellm.py"], {}),
    "LiteLLM's proxy": ([BIN / "python", HERE / "with_litellm_proxy.py"], {}),
    "AI SDK, openai": (["node", CLIENTS / "npm" / "with_ai_sdk.mjs", "openai"], {}),
    "AI SDK, anthropic": (["node", CLIENTS / "npm" / "with_ai_sdk.mjs", "anthropic"], {}),
}
"""Command of each library's agent, and its settings."""


@pytest.mark.filterwarnings("ignore:agent/restarts/edited:RuntimeWarning")
@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries_converse_in_one_trajectory(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, settings = LIBRARIES[library]
    monkeypatch.setenv("PYTHONPATH", str(EXAMPLES.parent))  # the shop's agents import its database
    shutil.copy(HERE / "with_ai_sdk.mjs", CLIENTS / "npm")  # beside the packages that it imports
    is_example = any("examples" in str(word) for word in command)
    task = Task(
        task_id="sum",
        messages=({"role": "user", "content": "What is 3 + 4?"},),
        columns=row("test", 0, 0) if is_example else {},
    )
    (done,) = attempt_tasks(
        [task],
        [str(word) for word in command],
        Policy(SELECTING if is_example else ADDING),
        tmp_path,
        **settings,
    )
    # smolagents replaces calls by a text, so that each turn begins a trajectory.
    trajectories = {
        "smolagents": [("main", 1), ("main", 1), ("main", 1)],
        "LiteLLM's proxy": [("main", 3), ("agent", 3)],
    }
    assert [(t.role, t.turns) for t in done.trajectories] == trajectories.get(
        library, [("main", 3)]
    )
    assert len([result for result in done.tool_results if result.error is None]) >= 3
    (output,) = tmp_path.rglob("*.stdout")
    assert output.read_text().strip().endswith("It is 7.")


def write_demonstrations(path: Path, program: str) -> None:
    """Conversations that call the program's shell, behind system messages of 100 to 22,000 letters.

    The lengths make a model that learns them call it behind the program's own long prompt too.
    """
    _, tool, argument = PROGRAMS[program]
    arguments = {argument: "ls"}
    properties = {name: {"type": "string"} for name in arguments}
    schema = {"name": tool, "parameters": {"type": "object", "properties": properties}}
    pages = sorted((EXAMPLES.parent / "docs").rglob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    lines = text.splitlines()
    draw = random.Random(0)
    rows = []
    for _ in range(152):
        size = int(100 * 2 ** draw.uniform(0, 7.8))
        start = draw.randrange(len(text) - size)
        function = {"name": tool, "arguments": arguments}
        messages = [
            {"role": "system", "content": text[start : start + size]},
            {"role": "user", "content": draw.choice(lines)},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "a", "function": function}]},
            {"role": "tool", "tool_call_id": "a", "content": draw.choice(lines)},
            {"role": "assistant", "content": "It is done."},
        ]
        rows.append({"messages": messages, "tools": [{"type": "function", "function": schema}]})
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.long
@pytest.mark.parametrize("program", EXAMPLE_OF)
def test_four_steps_of_training(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a tiny model that has learnt nothing but to call the program's shell."""
    variable, example = EXAMPLE_OF[program]
    folder = shutil.copytree(EXAMPLES / example, tmp_path / example)
    new_model = [sys.executable, str(EXAMPLES.parent / "scripts" / "new_model.py")]
    subprocess.run([*new_model, "--task", "programs", "--out", folder / "blank"], check=True)
    write_demonstrations(folder / "demonstrations.jsonl", program)
    monkeypatch.chdir(folder)
    monkeypatch.setenv(variable, str(PROGRAMS[program][0]))
    words = ["sft", "experiment=none", "model=folder", "model.path=blank", "tools=[]"]
    words += ["stop_tools=[]", "data=file", "data.train.path=demonstrations.jsonl"]
    words += ["data.test.path=demonstrations.jsonl", "steps=38", "sft.batch_size=4"]
    words += ["sft.max_tokens=9000", "optimizer=muon_warmstart", "optimizer.warmup_steps=3"]
    words += ["eval.questions=0", "checkpoint.every=null", "tracker=none", "hydra.run.dir=warm"]
    assert cli.main(words) == 0
    words = ["--config-dir", "conf", f"experiment={example}", f"agent.read=[{CLIENTS / 'npm'}]"]
    words += ["model.path=warm/checkpoints/latest", "debug=tiny", "steps=4", "eval.questions=0"]
    words += ["reward=[length_penalty]"]  # that of the task would be 0 throughout
    assert cli.main([*words, "tracker=none", "hydra.run.dir=run"]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    for metrics in rows:
        assert metrics["turns/mean"] > 1
        assert metrics["agent/merged_share"] == 1.0
        assert not any(metrics.get(f"agent/restarts/{kind}") for kind in Restart)
