"""Machines without containers: what goes wrong beside them, by a back end of the test's own."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import container_kit
import parts
import pytest

from agenttrain.agents.config import AgentConfig
from agenttrain.agents.runner import Agents
from agenttrain.engines.config import Sampling
from agenttrain.engines.scripted import ScriptedEngine
from agenttrain.rollout.config import RolloutRequest
from agenttrain.runtimes.base import MachineLost, MachineSpec
from agenttrain.runtimes.channel import ExecChannel
from agenttrain.runtimes.client import call_client
from agenttrain.runtimes.config import RuntimeConfig
from agenttrain.runtimes.containers import Containers
from agenttrain.runtimes.local import LocalMachine, LocalRuntime
from agenttrain.runtimes.machines import Machines, limits_problem
from agenttrain.types import CommandResult, Rollout, StopReason, Task


class Grader(LocalMachine):
    """A folder in which programs run; scripts of the shell, as the grader's, only say 0.5."""

    async def exec(self, command: Sequence[str], **options: Any) -> CommandResult:
        if command[0] != "sh":
            return await super().exec(command, **options)
        return CommandResult(code=0, output=b"0.5", size=3, timed_out=False)

    async def copy_in(self, source: Path, target: str) -> None:
        """Keep nothing."""


class Graders(LocalRuntime):
    async def start(self, spec: MachineSpec) -> LocalMachine:
        return Grader(spec)


ASK = """
import json, os, time, urllib.request
body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
head = {**key, "Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), head)).read()
time.sleep(100)
"""


def test_the_task_s_time_for_its_agent_ends_a_program_too(tmp_path: Path) -> None:
    folder = container_kit.make_task(tmp_path / "task", "[agent]\ntimeout_sec = 4.0")
    row = Task(task_id="t", messages=(), columns={"harbor": str(folder)})

    async def work() -> Rollout:
        pool = Machines(RuntimeConfig(name="podman", trust=True), Graders())
        settings = AgentConfig(name="endpoint", command=[sys.executable, "-c", ASK], timeout_s=90.0)
        agents = Agents(settings, parts.chat(), tmp_path, machines=pool)
        request = RolloutRequest(task=row, sampling=Sampling(), rollout_id="r")
        try:
            engine = ScriptedEngine([parts.ids("It is 7.<|im_end|>")])
            return await agents.attempt(request, engine, parts.LIMITS)
        finally:
            await agents.aclose()
            await pool.aclose()

    done = asyncio.run(work())
    assert (done.stop_reason, done.grades) == (StopReason.timeout, {"reward": 0.5}), done.error


@pytest.mark.parametrize("setting", [{"name": "podman"}, {"_target_": "my_cloud.Cloud"}])
def test_a_start_that_fails_names_the_setting_of_its_back_end(setting: dict[str, str]) -> None:
    class Broken(LocalRuntime):
        async def start(self, spec: MachineSpec) -> LocalMachine:
            raise MachineLost("no room")

    async def work() -> None:
        pool = Machines(RuntimeConfig(**setting, image="x", retries=0), Broken())
        await pool.start("r", Task(task_id="t", messages=()))

    label = "runtime=podman" if "name" in setting else "runtime._target_=my_cloud.Cloud"
    with pytest.raises(MachineLost, match=f"^{label}: no room$"):
        asyncio.run(work())


def test_a_shell_that_reads_no_more_leaves_no_files_and_descriptors(tmp_path: Path) -> None:
    """Its FIFO holds 64 KiB: the 33rd of such commands finds it full, and all of them fail."""

    async def work() -> None:
        channel = ExecChannel(tmp_path)
        before = descriptors(), {"in", "status"}
        commands = [channel.exec(["echo", "x" * 2000], timeout_s=30.0) for _ in range(40)]
        results = await asyncio.gather(*commands, return_exceptions=True)
        assert {str(result) for result in results} == {"its shell reads no commands any more"}
        assert all(isinstance(result, MachineLost) for result in results)
        assert (descriptors(), {path.name for path in tmp_path.iterdir()}) == before
        channel.close()

    asyncio.run(work())


def test_a_process_without_free_descriptors_loses_machines_and_not_the_run() -> None:
    async def work() -> None:
        containers = Containers("podman")
        with no_more_descriptors():
            with pytest.raises(MachineLost, match="Too many open files"):
                await containers.start(MachineSpec(image="x"))
            with pytest.raises(MachineLost, match="Too many open files"):
                await call_client(["true"], timeout_s=30.0)
        await containers.aclose()

    asyncio.run(work())


def test_limits_without_root_need_the_second_version_of_cgroups(tmp_path: Path) -> None:
    assert limits_problem(is_root=True, cgroups=tmp_path) is None
    assert "cgroup v1" in str(limits_problem(is_root=False, cgroups=tmp_path))
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    assert limits_problem(is_root=False, cgroups=tmp_path) is None


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    """Let this process open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
