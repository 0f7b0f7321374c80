"""However an outside agent ends, its rollout ends with its words, and the run goes on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import parts
import pytest
from agent_kit import ASK, ask, client, rollout
from test_command_agent import SEVEN, attempts, program, run, unused

from agenttrain.agents.command_agent import CommandAgent
from agenttrain.agents.output import LOG_BYTES, TAIL_BYTES
from agenttrain.agents.task import AgentFailed, AgentTask
from agenttrain.agents.workers import WorkerAgent
from agenttrain.types import StopReason, Task

READ = "given = json.loads(sys.stdin.readline()); ask(given)\n"
EACH = "for line in sys.stdin:\n    ask(json.loads(line))\n    "
DEATH = signal.SIGRTMIN + 1
LINES = {
    "nested": ("print('[' * 1500)", "nested too deeply"),
    "nested objects": ("print('{\"reward\":' * 3000)", "nested too deeply"),
    "400 digits": ("print('{\"reward\": 1' + '0' * 400 + '}')", "a reward is a finite number"),
    "5000 digits": ("print('{\"reward\": 1' + '0' * 5000 + '}')", "cannot be read"),
    "NaN": ("print(json.dumps({'reward': float('nan')}))", "returned nan; a reward is a finite"),
    "Infinity": ("print(json.dumps({'reward': -float('inf')}))", "returned -inf; a reward is"),
    "70 KB": ("print(json.dumps({'log': 'x' * 70_000, 'reward': 1.0}))", "line of over 64 KiB"),
    "1e101": ("print('{\"reward\": 1e101}')", "a number of at most 1e+100"),
    "text": ('print(\'{"reward": "7"}\')', "a reward is a finite number"),
    "true": ("print('{\"reward\": true}')", "gave reward=True"),
}
"""What a program prints when it is done, and words of the error."""


@pytest.mark.parametrize("name", LINES)
def test_a_result_that_cannot_be_read_is_an_error(tmp_path: Path, name: str) -> None:
    text, words = LINES[name]
    done = run(tmp_path, READ + text)
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert words in str(done.error)


@pytest.mark.parametrize("name", ["nested", "5000 digits", "NaN"])
def test_a_result_of_a_reused_process_that_cannot_be_read_is_an_error(
    tmp_path: Path, name: str
) -> None:
    text, words = LINES[name]
    done = run(tmp_path, EACH + f"{text}; sys.stdout.flush()", reuse=True, timeout_s=60)
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert words in str(done.error)


def test_rollouts_beside_one_of_a_nested_line_are_errors_too(tmp_path: Path) -> None:
    text = EACH + "print('[' * 1500, flush=True)"
    settings = {"reuse": True, "per_process": 2, "timeout_s": 60}
    done = asyncio.run(attempts(tmp_path, text, "r0", "r1", **settings))
    assert [rollout.stop_reason for rollout in done] == [StopReason.error] * 2


def test_death_by_a_real_time_signal_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, READ + f"os.kill(os.getpid(), {DEATH})")
    assert done.stop_reason is StopReason.error
    assert str(done.error) == "the agent was ended by SIGRTMIN+1"


@pytest.mark.parametrize("reuse", [False, True])
def test_an_agent_that_removes_its_log_and_its_folder(tmp_path: Path, reuse: bool) -> None:
    folder = tmp_path / "agents"
    end = "print('a line', flush=True); import shutil, time; time.sleep(0.3)\n"
    end += f"shutil.rmtree({str(folder)!r}); print(json.dumps({{'reward': 0.5}}), flush=True)\n"
    text = (EACH + end.replace("\n", "\n    ")) if reuse else READ + end
    command = program(tmp_path, text)
    done = rollout(unused, SEVEN, folder=folder, command=command, reuse=reuse)
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.5)


class Wordless(Exception):
    """An error without words of its own."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED: dict[str, Any] = {
    "SystemExit": SystemExit(3),
    "CancelledError": asyncio.CancelledError("mine"),
    "KeyboardInterrupt": KeyboardInterrupt("mine"),
    "GeneratorExit": GeneratorExit("mine"),
    "BaseExceptionGroup": BaseExceptionGroup("mine", [KeyboardInterrupt()]),
    "Wordless": Wordless(),
    "ValueError": ValueError("mine"),
}


@pytest.mark.parametrize("name", RAISED)
def test_whatever_a_function_raises_is_an_error_of_its_rollout(name: str) -> None:
    async def solve(agent: Any) -> None:
        async with client(agent) as http:
            await ask(http, ASK)
        raise RAISED[name]

    done = rollout(solve, SEVEN)
    assert (done.stop_reason, done.turns) == (StopReason.error, 1)
    assert str(done.error).startswith(f"the agent raised {name}")


def test_secrets_in_the_words_of_an_agent_are_hidden() -> None:
    async def solve(agent: Any) -> None:
        raise ValueError("no answer from https://search.example/v1?api_key=s3cret")

    done = rollout(solve, SEVEN)
    assert str(done.error).endswith(
        "ValueError: no answer from https://search.example/v1?api_key=***"
    )


def test_what_a_task_of_a_function_raises_is_an_error_too() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def solve(agent: Any) -> None:
        await asyncio.create_task(leave())

    done = rollout(solve, SEVEN)
    assert done.stop_reason is StopReason.error
    assert str(done.error) == "the agent raised SystemExit: 3"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "returned nan; a reward is a finite number"),
        ({"reward": float("inf")}, "returned inf; a reward is a finite number"),
        (10**400, "a reward is a finite number"),
        (True, "gave reward=True"),
        (Wordless(), "an object of Wordless"),
    ],
)
def test_a_returned_reward_that_is_none_is_an_error(value: Any, words: str) -> None:
    async def solve(agent: Any) -> Any:
        async with client(agent) as http:
            await ask(http, ASK)
        return value

    done = rollout(solve, SEVEN)
    assert (done.stop_reason, done.environment_reward) == (StopReason.error, None)
    assert words in str(done.error)


def test_a_number_of_numpy_is_a_reward() -> None:
    async def solve(agent: Any) -> Any:
        async with client(agent) as http:
            await ask(http, ASK)
        return np.float32(0.5)

    assert rollout(solve, SEVEN).environment_reward == 0.5


def test_a_run_s_own_cancellation_still_cancels_an_agent(tmp_path: Path) -> None:
    cancelled = []

    async def solve(agent: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(agent.rollout_id)
            raise

    done = rollout(solve, SEVEN, folder=tmp_path, timeout_s=0.2)
    assert str(done.error) == "agent.timeout_s=0.2 passed"
    assert cancelled == ["rollout"]


def test_a_process_that_cannot_be_started_is_the_agent_s_failure(tmp_path: Path) -> None:
    def refused() -> list[str]:
        raise PermissionError("no sandbox")

    async def try_both() -> None:
        task = AgentTask(rollout_id="r", task=parts.TASK, url="", api_key="", model="policy")
        nul = AgentTask(rollout_id="\0", task=parts.TASK, url="", api_key="", model="policy")
        for agent in (
            CommandAgent(refused, {}, exit_code=False),
            WorkerAgent(refused, {}, tmp_path),
        ):
            with pytest.raises(AgentFailed, match=r"^cannot be started: no sandbox"):
                await agent.attempt(task, tmp_path / "r")
        agent = CommandAgent(lambda: ["true"], {}, exit_code=False)
        with pytest.raises(AgentFailed, match=r"^cannot be started: embedded null byte"):
            await agent.attempt(nul, tmp_path / "r")

    asyncio.run(try_both())


def test_a_task_that_json_cannot_hold_is_the_agent_s_failure(tmp_path: Path) -> None:
    row = Task(task_id="t", messages=(), columns={"pairs": {(1, 2): 3}})
    task = AgentTask(rollout_id="r", task=row, url="", api_key="", model="policy")
    with pytest.raises(AgentFailed, match="cannot be sent its task as JSON"):
        task.line()


FLOOD = "part = b'x' * (1 << 20)\nfor _ in range(12): {stream}.write(part)\n"


@pytest.mark.parametrize("reuse", [False, True])
def test_output_is_bounded_and_its_end_is_read(tmp_path: Path, reuse: bool) -> None:
    """12 MiB to each stream, of which 4 MiB and 64 KiB are kept."""
    end = FLOOD.format(stream="sys.stderr.buffer")
    if not reuse:
        end += FLOOD.format(stream="sys.stdout.buffer")
    end += "print(); print(json.dumps({'reward': 0.5}), flush=True)\n"
    text = (EACH + end.replace("\n", "\n    ")) if reuse else READ + end
    done = run(tmp_path, text, reuse=reuse, timeout_s=60)
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.5)
    files = {path.name: path.read_bytes() for path in tmp_path.glob("rollout.*")}
    assert set(files) == ({"rollout.log"} if reuse else {"rollout.stdout", "rollout.stderr"})
    for name, kept in files.items():
        assert LOG_BYTES < len(kept) < LOG_BYTES + TAIL_BYTES + 100, name
        assert b"bytes left out" in kept[LOG_BYTES : LOG_BYTES + 100]


def test_output_of_a_function_is_bounded(tmp_path: Path) -> None:
    async def solve(agent: Any) -> None:
        for _ in range(6):
            print("x" * (1 << 20))
        print("the end")

    rollout(solve, SEVEN, folder=tmp_path)
    kept = (tmp_path / "rollout.stdout").read_bytes()
    assert LOG_BYTES < len(kept) < LOG_BYTES + TAIL_BYTES + 100
    assert kept.endswith(b"the end\n")
