"""Agents as processes: their task, their reward, their output, and that nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import agent_kit
import httpx
import parts
import psutil
import pytest
from agent_kit import engine_of, rollout

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.engines.config import Sampling
from agenttrain.rollout.collector import why_unrewarded
from agenttrain.rollout.config import RolloutRequest
from agenttrain.types import StopReason

ASKS = """
import json, os, sys, urllib.request
def ask(given):
    body = json.dumps({"messages": given["messages"]}).encode()
    headers = {"authorization": "Bearer " + given["api_key"]}
    request = urllib.request.Request(given["base_url"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))
"""
SEVEN = "It is 7.<|im_end|>"


def program(folder: Path, text: str) -> list[str]:
    path = folder / "agent.py"
    path.write_text(ASKS + text)
    return [sys.executable, str(path)]


async def unused(agent) -> None:
    """The command is the agent."""


def run(folder: Path, text: str, **settings):
    return rollout(unused, SEVEN, folder=folder, command=program(folder, text), **settings)


def test_a_program_reads_its_task_and_prints_its_reward(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "given = json.loads(sys.stdin.readline())\n"
        'assert os.environ["OPENAI_BASE_URL"] == given["base_url"]\n'
        'ask(given); print("thinking"); print(json.dumps({"reward": 0.5}))\n',
    )
    assert (done.stop_reason, done.error, done.turns) == (StopReason.completed, None, 1)
    assert done.environment_reward == 0.5
    assert (tmp_path / "rollout.stdout").read_text() == 'thinking\n{"reward": 0.5}\n'
    assert not (tmp_path / "rollout.stderr").exists()


def test_a_crash_is_an_error_that_quotes_its_output(tmp_path: Path) -> None:
    done = run(tmp_path, 'ask(json.loads(sys.stdin.readline())); raise OSError("no disk")\n')
    assert done.stop_reason is StopReason.error
    assert "the agent ended with exit code 1" in str(done.error)
    assert "OSError: no disk" in str(done.error)
    missing = rollout(unused, SEVEN, folder=tmp_path, command=["./no-such-program"])
    assert "exit code 127; it printed: ./no-such-program: No such file" in str(missing.error)


def test_an_agent_that_fails_at_a_limit_names_the_limit_and_its_output(tmp_path: Path) -> None:
    text = (
        "given = json.loads(sys.stdin.readline())\n"
        "while True:\n"
        "    turn = ask(given)['choices'][0]['message']\n"
        "    given['messages'] += [turn, {'role': 'user', 'content': 'again'}]\n"
    )
    done = run(tmp_path, text, limits={"max_turns": 3})
    assert done.stop_reason is StopReason.max_turns
    assert str(done.error).startswith("rollout.max_turns=3 turns were sampled, and the agent ended")
    assert "HTTPError" in str(done.error)
    reason = str(why_unrewarded([done]))
    assert reason == done.error
    ended = run(tmp_path, text.replace("while True", "for _ in range(3)"), limits={"max_turns": 3})
    ended.rewards = {"agent": None}
    assert f"ended as {ended.stop_reason}, and" in str(why_unrewarded([ended]))


def test_the_exit_code_may_be_the_reward(tmp_path: Path) -> None:
    text = "ask(json.loads(sys.stdin.readline())); sys.exit(3)\n"
    done = run(tmp_path, text, exit_code_reward=True)
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.0)


def test_secrets_are_passed_only_by_name(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    text = 'ask(json.loads(sys.stdin.readline())); print(os.environ.get("MY_TOKEN"))\n'
    run(tmp_path, text)
    assert (tmp_path / "rollout.stdout").read_text() == "None\n"
    run(tmp_path, text, env=["MY_TOKEN"])
    assert (tmp_path / "rollout.stdout").read_text() == "secret\n"


def test_a_models_name_in_the_environment_stays(tmp_path: Path, monkeypatch) -> None:
    names = ["OPENAI_MODEL", "ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"]
    text = f"ask(json.loads(sys.stdin.readline())); print([os.environ.get(n) for n in {names}])\n"
    monkeypatch.setenv("OPENAI_MODEL", "haiku")
    run(tmp_path, text)
    assert (tmp_path / "rollout.stdout").read_text() == "['policy', 'policy', 'policy']\n"
    models = {"haiku": "frozen", "*": "policy"}
    run(tmp_path, text, env=["OPENAI_MODEL"], models=models)
    assert (tmp_path / "rollout.stdout").read_text() == "['haiku', 'policy', None]\n"


def test_a_reused_worker_attempts_one_rollout_after_the_other(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "for line in sys.stdin:\n"
        "    ask(json.loads(line)); print('log', file=sys.stderr)\n"
        "    print(json.dumps({'reward': 1}), flush=True)\n",
        reuse=True,
    )
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 1.0)


SEVERAL = """
import asyncio
async def attempt(given):
    await asyncio.to_thread(ask, given)
    print(given["rollout_id"])
    if given["rollout_id"].startswith("bad"): os._exit(3)
    result = {"rollout_id": given["rollout_id"], "reward": os.getpid()}
    print(json.dumps(result), flush=True)
async def main():
    loop, tasks = asyncio.get_running_loop(), []
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        tasks.append(asyncio.create_task(attempt(json.loads(line))))
asyncio.run(main())
"""


async def attempts(folder: Path, text: str, *names: str, **settings) -> list:
    """Rollouts of these names at once."""
    config = AgentConfig(name="endpoint", command=program(folder, text), **settings)
    agents = Agents(config, agent_kit.shared_chat(), folder)
    engine = engine_of(SEVEN)
    try:
        return await asyncio.gather(
            *(
                agents.attempt(
                    RolloutRequest(task=parts.TASK, sampling=Sampling(), rollout_id=name),
                    engine,
                    parts.LIMITS,
                )
                for name in names
            )
        )
    finally:
        await agents.aclose()


def test_a_reused_process_may_have_several_tasks_at_once(tmp_path: Path) -> None:
    names = [f"r{index}" for index in range(5)]
    done = asyncio.run(attempts(tmp_path, SEVERAL, *names, reuse=True, per_process=4))
    assert [rollout.stop_reason for rollout in done] == [StopReason.completed] * 5
    pids = [rollout.environment_reward for rollout in done]
    assert len(set(pids)) == 2 and pids[0] == pids[1] == pids[2] == pids[3]
    assert sorted((tmp_path / "worker-0.log").read_text().split()) == names[:4]


def test_a_crash_ends_all_tasks_of_a_process_as_errors(tmp_path: Path) -> None:
    done = asyncio.run(
        attempts(tmp_path, SEVERAL, "bad", "r1", reuse=True, per_process=2, timeout_s=60)
    )
    assert done[0].stop_reason is StopReason.error
    assert "the agent ended with exit code 3" in str(done[0].error)


def test_a_process_that_holds_a_task_too_long_gets_no_other(tmp_path: Path) -> None:
    text = SEVERAL.replace(
        "async def attempt(given):", "async def attempt(given):\n    stall(given)"
    )
    text = "import time\ndef stall(given):\n    time.sleep(60)\n" + text
    done = asyncio.run(attempts(tmp_path, text, "r0", "r1", reuse=True, per_process=2, timeout_s=2))
    assert [str(rollout.error) for rollout in done] == ["agent.timeout_s=2 passed"] * 2


CONFINED = """
import socket
given = json.loads(sys.stdin.readline())
ask(given)
seen = {}
try:
    socket.create_connection(("OUTSIDE", 0), timeout=5)
except OSError as error:
    seen["network"] = type(error).__name__
try:
    open("WRITTEN", "w")
except OSError as error:
    seen["disk"] = error.strerror
open("/tmp/own", "w").write("x")
seen["processes"] = len([name for name in os.listdir("/proc") if name.isdecimal()]) < 10
print(json.dumps({"reward": 1, **seen}))
"""


@pytest.mark.skipif(
    shutil.which("bwrap") is None,
    reason="bubblewrap is not installed; apt install bubblewrap, then scripts/test -k sandbox",
)
@pytest.mark.parametrize("reuse", [False, True])
def test_a_sandbox_reaches_the_endpoint_and_nothing_else(tmp_path: Path, reuse: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:  # a service of the machine
        outside = f'"127.0.0.1", {listening.getsockname()[1]}'
        text = CONFINED.replace('"OUTSIDE", 0', outside)
        text = text.replace("WRITTEN", str(Path(__file__).parent / "written"))
        # The program must lie outside /tmp, which the sandbox has for itself.
        folder = Path(tempfile.mkdtemp(dir=Path(__file__).parent, prefix=".sandbox-"))
        try:
            command = program(folder, text)
            done = rollout(
                unused, SEVEN, folder=tmp_path, command=command, sandbox="bwrap", reuse=reuse
            )
        finally:
            shutil.rmtree(folder)
    assert (done.stop_reason, done.error) == (StopReason.completed, None)
    assert done.environment_reward == 1.0
    if not reuse:
        assert json.loads((tmp_path / "rollout.stdout").read_text()) == {
            "reward": 1,
            "network": "ConnectionRefusedError",
            "disk": "Read-only file system",
            "processes": True,
        }


GREEDY = """
import subprocess, sys, time
ask(json.loads(sys.stdin.readline()))
print(os.getpid(), flush=True)
"""
HUNGRY = {
    "agent.memory_mb=150: its processes and files use more": """
command = "x = b'7' * (60 << 20); import time; time.sleep(600)"
started = [subprocess.Popen([sys.executable, "-c", command]) for _ in range(3)]
time.sleep(600)
""",
    "agent.disk_mb=20: its files are larger": """
open("/dev/shm/large", "wb").write(b"7" * (30 << 20))
time.sleep(600)
""",
}


@pytest.mark.skipif(
    shutil.which("bwrap") is None,
    reason="bubblewrap is not installed; apt install bubblewrap, then scripts/test -k sandbox",
)
@pytest.mark.parametrize("message", HUNGRY)
def test_a_sandbox_that_uses_too_much_memory_is_ended(tmp_path: Path, message: str) -> None:
    folder = Path(tempfile.mkdtemp(dir=Path(__file__).parent, prefix=".sandbox-"))
    limits = {"sandbox": "bwrap", "memory_mb": 150, "disk_mb": 20}
    try:
        command = program(folder, GREEDY + HUNGRY[message])
        done = rollout(unused, SEVEN, folder=tmp_path, command=command, timeout_s=60, **limits)
    finally:
        shutil.rmtree(folder)
    assert (done.stop_reason, done.turns) == (StopReason.error, 1)
    assert f"the agent ended with exit code 1; it printed: {message}" in str(done.error)


ORPHANS = """
import subprocess, time
given = json.loads(sys.stdin.readline())
ask(given)
child = subprocess.Popen(["sleep", "4242"], start_new_session=True)
print(child.pid, flush=True)
"""


def gone(pid: int) -> bool:
    """Wait until a process is no more."""
    for _ in range(200):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("end", ["", "time.sleep(60)"], ids=["exit", "timeout"])
def test_what_an_agent_started_ends_with_it(tmp_path: Path, end: str) -> None:
    run(tmp_path, ORPHANS + end, timeout_s=3)
    assert gone(int((tmp_path / "rollout.stdout").read_text()))


def test_an_agent_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, ORPHANS + "os.kill(os.getpid(), 9)")
    assert "was ended by SIGKILL" in str(done.error)
    assert gone(int((tmp_path / "rollout.stdout").read_text()))


RUN = """
import sys; sys.path.insert(0, {tests!r})
from pathlib import Path
from agent_kit import rollout
from test_command_agent import ORPHANS, program, unused
folder = Path({folder!r})
rollout(unused, "It is 7.<|im_end|>", folder=folder,
        command=program(folder, ORPHANS + "time.sleep(60)"))
"""


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    tests = Path(__file__).parents[1]
    kit = tests / "kit"
    text = RUN.format(tests=str(kit), folder=str(tmp_path))
    path = os.pathsep.join([str(kit), str(tests / "agents"), *sys.path])
    run = subprocess.Popen([sys.executable, "-c", text], env={**os.environ, "PYTHONPATH": path})
    printed = tmp_path / "rollout.stdout"
    while not (printed.exists() and printed.read_text().endswith("\n")):
        assert run.poll() is None
        time.sleep(0.05)
    below = psutil.Process(run.pid).children(recursive=True)
    assert len(below) >= 3  # the keeper, the agent, its child
    run.send_signal(signal.SIGKILL)
    run.wait()
    assert all(gone(process.pid) for process in below)


def test_agents_that_somebody_else_starts_find_their_rollout(tmp_path: Path, capsys) -> None:
    async def somebody() -> None:
        while not (files := list(tmp_path.glob("*.json"))):
            await asyncio.sleep(0.01)
        assert files[0].stat().st_mode & 0o077 == 0
        given = json.loads(files[0].read_text())
        headers = {"authorization": f"Bearer {given['api_key']}"}
        async with httpx.AsyncClient(headers=headers, verify=False) as http:
            body = {"messages": given["messages"]}
            await http.post(f"{given['base_url']}/chat/completions", json=body)
            await http.post(f"{given['url']}/reward", json={"reward": 0.75})
            await http.post(f"{given['url']}/finish")

    async def both():
        agents = Agents(AgentConfig(name="endpoint"), agent_kit.shared_chat(), tmp_path)
        attempt = RolloutRequest(task=parts.TASK, sampling=Sampling(), rollout_id="rollout")
        work = agents.attempt(attempt, engine_of(SEVEN), parts.LIMITS)
        done, _ = await asyncio.gather(work, somebody())
        await agents.aclose()
        return done

    done = asyncio.run(both())
    assert (done.stop_reason, done.environment_reward) == (StopReason.completed, 0.75)
    assert "start one for each file" in capsys.readouterr().out
    assert list(tmp_path.glob("*.json")) == []
