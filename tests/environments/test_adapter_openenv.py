"""The adapter of OpenEnv, against real servers of the package in an environment of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from adapter_kit import arun, environments, run, texts
from parts import call

from agenttrain.environments.adapters.openenv import OpenEnv
from agenttrain.types import Rollout, StopReason, ToolError

PYTHON = os.environ.get("OPENENV_PYTHON", "")
"""A Python that has the package openenv."""
needs_openenv = pytest.mark.skipif(not PYTHON, reason="scripts/test-ecosystems openenv runs it")
SERVER = Path(__file__).parents[1] / "kit" / "openenv_server.py"


def count(by: int) -> str:
    return call("step", f'{{"by": {by}}}')


class Server:
    """A server process and its address."""

    def __init__(self, command: list[str], cwd: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url, self._log = f"http://127.0.0.1:{port}", log
        words = [word.format(port=port) for word in command]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [PYTHON, *words], cwd=cwd, stdout=out, stderr=subprocess.STDOUT, env=env
            )
        for _ in range(600):
            try:
                httpx.get(f"{self.url}/health", timeout=5)
                return
            except httpx.TransportError:
                assert self.process.poll() is None, log.read_text()
                time.sleep(0.1)
        raise AssertionError(log.read_text())

    def count(self, word: str) -> int:
        return self._log.read_text().splitlines().count(word)

    def wait_until_all_closed(self) -> None:
        for _ in range(200):
            if self.count("opened") == self.count("closed"):
                return
            time.sleep(0.05)
        raise AssertionError(self._log.read_text())


@contextmanager
def serving(tmp_path: Path, capacity: int) -> Iterator[Server]:
    server = Server([str(SERVER), "{port}", str(capacity)], tmp_path, tmp_path / "log")
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@needs_openenv
def test_the_example_that_openenv_makes_itself(tmp_path: Path) -> None:
    openenv = Path(PYTHON).with_name("openenv")
    subprocess.run([openenv, "init", "echo_env"], cwd=tmp_path, check=True, capture_output=True)
    server = Server(
        ["-m", "server.app", "--port", "{port}"], tmp_path / "echo_env", tmp_path / "log"
    )
    try:
        worlds = environments(OpenEnv, url=server.url)
        assert worlds.toolboxes["world"].schemas()[0]["function"]["parameters"] == {
            "type": "object",
            "properties": {
                "message": {
                    "type": "string",
                    "title": "Message",
                    "description": "Message to echo back",
                }
            },
            "required": ["message"],
        }
        said = call("step", '{"message": "hello"}')
        done = run(said, "It says hello.<|im_end|>", worlds=worlds)
        assert done.stop_reason is StopReason.completed
        assert texts(done, "tool") == ["echoed_message: hello\nmessage_length: 5"]
        assert done.environment_reward == 0.5
    finally:
        server.process.kill()
        server.process.wait()


@needs_openenv
def test_an_episode(tmp_path: Path) -> None:
    with serving(tmp_path, 1) as server:
        done = run(count(1), count(2), worlds=environments(OpenEnv, url=server.url))
        assert done.stop_reason is StopReason.environment_done
        assert texts(done, "user") == ["count: 0\ntarget: 3"]
        assert texts(done, "tool") == [
            "count: 1\ntarget: 3",
            "count: 3\ntarget: 3\nThe episode is over.",
        ]
        assert done.environment_reward == 1.0
        row, more = {"target": 5}, {"columns": ["target"], "rewards": "turns"}
        done = run(count(5), worlds=environments(OpenEnv, url=server.url, **more), row=row)
        assert done.trajectories[0].turn_rewards == {0: 1.0}
        assert done.environment_reward is None
        # What does not fit the schema is the model's mistake; an environment that breaks is not.
        done = run(count(21), count(0), count(4), worlds=environments(OpenEnv, url=server.url))
        errors = [result.error for result in done.tool_results]
        assert errors == [ToolError.invalid_arguments, ToolError.invalid_arguments, None]
        done = run(count(13), worlds=environments(OpenEnv, url=server.url))
        assert done.stop_reason is StopReason.error
        assert "step failed: EXECUTION_ERROR: bad luck" in str(done.error)
        done = run("x", worlds=environments(OpenEnv, url=server.url, columns=["goal"]))
        assert "columns=[goal]: the row has no such column" in str(done.error)
        server.wait_until_all_closed()


@needs_openenv
def test_more_rollouts_than_sessions(tmp_path: Path) -> None:
    async def many(worlds: Any) -> list[Rollout]:
        try:
            one = (arun(count(1), count(2), worlds=worlds, rollout_id=f"r{n}") for n in range(6))
            return await asyncio.gather(*one)
        finally:
            await worlds.aclose()

    with serving(tmp_path, 2) as server:
        ended = asyncio.run(many(environments(OpenEnv, url=server.url)))
        assert [done.environment_reward for done in ended] == [1.0] * 6
        server.wait_until_all_closed()
        assert server.count("opened") >= 6
        # One that is never free is an error that says what to change.
        holder = OpenEnv(url=server.url), OpenEnv(url=server.url)
        for one in holder:
            one.reset({}, 0)
        done = run("x", worlds=environments(OpenEnv, url=server.url, session_timeout_s=0.3))
        assert done.stop_reason is StopReason.error
        assert "rollout.concurrency=<its capacity>" in str(done.error)
        for one in holder:
            one.close()
        server.wait_until_all_closed()


@needs_openenv
@pytest.mark.parametrize("ended_by", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_hangs_is_an_error_and_never_a_zero(
    tmp_path: Path, ended_by: signal.Signals
) -> None:
    with serving(tmp_path, 2) as server:
        worlds = environments(OpenEnv, url=server.url, ping_s=0.3)
        kind = worlds.kinds["world"]
        step = OpenEnv.call_tool

        class Dies(OpenEnv):
            def call_tool(self, name: str, arguments: Any) -> Any:
                if arguments["by"] == 2:
                    os.kill(server.process.pid, ended_by)
                return step(self, name, arguments)

        kind.cls = Dies
        done = run(count(1), count(2), worlds=worlds)
        assert done.stop_reason is StopReason.error
        assert done.environment_reward is None
        assert "no reply to step: ConnectionClosedError" in str(done.error)
        assert kind.live == 0
        if ended_by is signal.SIGKILL:
            gone = run("x", worlds=worlds)
            assert gone.stop_reason is StopReason.error
            assert "cannot be reached" in str(gone.error)


URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "^url=None: must be the address of an OpenEnv server"),
        ({"url": "127.0.0.1:8000"}, "^url=127.0.0.1:8000: must be the address"),
        ({"url": URL, "rewards": "all"}, "^rewards=all: must be episode or turns"),
        ({"url": URL, "ping_s": 0}, "^ping_s=0: must be a number of seconds above 0"),
        ({"url": URL, "prompt": "{{ if"}, "^prompt: is no template"),
        ({"url": URL}, f"^url={URL}: no server answers"),
        ({"url": "http://[::1"}, r"^url=http://\[::1: must be the address of an OpenEnv server"),
        ({"url": "http://host:port"}, "^url=http://host:port: no server answers"),
    ],
)
def test_mistakes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OpenEnv.tools(**arguments)


def test_without_the_package_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "websockets.sync.client", None)
    with pytest.raises(ValueError, match=r"pip install 'agenttrain\[openenv\]'"):
        OpenEnv.check(url=URL)
