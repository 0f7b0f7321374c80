"""Whole runs with a container for each rollout: killed, resumed, and equal to one left alone."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import container_kit
import psutil
import pytest
from container_kit import IMAGE, make_image, make_task, needs_containers, ours
from same_run import assert_same

from agenttrain.cli import main
from agenttrain.tracking.rollouts import read_step, written_steps
from agenttrain.utils.exit_codes import DONE

pytestmark = [needs_containers, pytest.mark.timeout(3600)]
ROOT = Path(__file__).parents[2]
RUN = (
    *("experiment=none", "model=shop", "debug=tiny", "data=harbor", "data.path=tasks"),
    *("runtime=podman", "runtime.trust=true", "runtime.memory_mb=64", "reward=[harbor]"),
    *("tools=[bash]", "stop_tools=[]", "rollout.max_turns=2", "rollout.max_turn_tokens=16"),
    *("rollout.process=own", "eval.questions=0", "tracker=none"),
)
PROCESSES = {
    "run": "agenttrain.cli",
    "rollout": "agenttrain.runs.rollout_process",
    "reaper": "reaper.py",
}
"""Role -> part of the command lines of its processes."""
seen: set[int] = set()
"""Processes of the runs that a test has started."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with four tasks; task n has the reward n/10."""
    make_image()
    for number in range(1, 5):
        test = f"echo 0.{number} > /logs/verifier/reward.txt"
        make_task(tmp_path / "tasks" / f"t{number}", test=test, image=IMAGE)
    monkeypatch.chdir(tmp_path)
    seen.clear()
    yield tmp_path
    deadline = time.monotonic() + 60
    while ours(*seen) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert ours(*seen) == []


def start(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "agenttrain.cli", *RUN, *words, "resume=auto"]
    with folder.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            [*command, f"hydra.run.dir={folder}"],
            stdout=log,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )


def finish(folder: Path, *words: str) -> float:
    """Let a run go on to its end; return the seconds."""
    begun, process = time.monotonic(), start(folder, *words)
    while process.poll() is None:
        family(process)
        time.sleep(0.2)
    assert process.returncode == DONE, folder.with_suffix(".log").read_text()[-2000:]
    return time.monotonic() - begun


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return a run's processes that are alive."""
    members: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        members += [psutil.Process(process.pid)]
        members += members[0].children(recursive=True)
    seen.update(member.pid for member in members)
    return members


def kill(process: subprocess.Popen[bytes], roles: tuple[str, ...]) -> None:
    """Kill the processes of a run that have these roles, and the run a moment later."""
    for member in family(process):
        with suppress(psutil.NoSuchProcess):
            line = " ".join(member.cmdline())
            if any(PROCESSES[role] in line for role in roles):
                member.kill()
    time.sleep(0.2)
    process.kill()
    process.wait()


def graded(folder: Path) -> list[tuple[str, str, float]]:
    """Every recorded rollout of a run: its step and name, its task, its reward."""
    return [
        (f"{step} {record['rollout_id']}", record["task_id"], record["grades"]["reward"])
        for step in written_steps(folder, "test")
        for record in read_step(folder, step)
    ]


def killed_and_resumed(tmp_path: Path, kills: int, at_once: int, steps: int) -> None:
    """Kill a run `kills` times, resume it each time, and compare it with one left alone."""
    words = (f"steps={steps}", f"tasks_per_step={at_once // 2}")
    seconds = finish(tmp_path / "whole", *words)
    whole = graded(tmp_path / "whole")
    assert len(whole) == steps * at_once
    assert all(reward == int(task[1:]) / 10 for _, task, reward in whole)

    chance, roles = random.Random(3), (tuple(PROCESSES), ("run",), ("rollout",), ("reaper", "run"))
    stranger = container_kit.start_stranger()
    try:
        for number in range(kills):
            process = start(tmp_path / "killed", *words)
            pids = [process.pid]  # before it has a container nothing is at stake
            while process.poll() is None and not ours(*pids):
                pids = [member.pid for member in family(process)] or pids
                time.sleep(0.05)
            time.sleep(chance.uniform(0.0, min(seconds / 2, 8.0)))
            kill(process, roles[number % len(roles)])
        finish(tmp_path / "killed", *words)
        assert container_kit.is_running(stranger)
    finally:
        container_kit.remove(stranger)
    assert graded(tmp_path / "killed") == whole
    assert_same(tmp_path / "killed", tmp_path / "whole")


def test_a_run_that_is_killed_loses_no_rollout_and_grades_none_twice(tmp_path: Path) -> None:
    killed_and_resumed(tmp_path, kills=1, at_once=4, steps=2)


@pytest.mark.long
@pytest.mark.parametrize(("kills", "at_once", "steps"), [(20, 8, 24), (2, 64, 3)])
def test_runs_that_are_killed_again_and_again(
    tmp_path: Path, kills: int, at_once: int, steps: int
) -> None:
    killed_and_resumed(tmp_path, kills, at_once, steps)


def test_the_recipe_of_a_terminal_runs(place: Path) -> None:
    words = ("experiment=recipes/terminal", "model.path=bundled:shop", "debug=tiny", "steps=4")
    small = ("data.path=tasks", "runtime.trust=true", "runtime.memory_mb=64", "tools=[bash]")
    folder = place / "run"
    short = ("rollout.max_turn_tokens=16", "eval.questions=0", "tracker=none")
    assert main([*words, *small, *short, "tracker.rollouts=all", f"hydra.run.dir={folder}"]) == 0
    assert written_steps(folder, "view") == [1, 2, 3, 4]
    for record in read_step(folder, 4):
        # Task t3 has the reward 0.3, whatever was done.
        assert record["rewards"] == {"harbor": int(record["task_id"][-1]) / 10}
