"""Runs that stall, in processes of their own: the evidence, the exit code, and who is left."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from agenttrain.cli import main
from agenttrain.health import watchdog as module
from agenttrain.health.config import WatchdogConfig
from agenttrain.health.watchdog import Watchdog
from agenttrain.training.world import World
from agenttrain.utils.exit_codes import STALLED

pytestmark = pytest.mark.timeout(1200)  # whole runs, and what hangs is ended after HANG_S
HANG_S = 600
"""Only a run that the watchdog does not end takes this long."""
MARK = "AGENTTRAIN_TEST_STALL"
CODE = '''
import asyncio, re, threading, time

async def holds_the_loop(query: str) -> str:
    """Ask the database.

    Args:
        query: What.
    """
    time.sleep(10_000)

async def never_returns(query: str) -> str:
    """Ask the database.

    Args:
        query: What.
    """
    await asyncio.Event().wait()

def deadlock(rollout, **columns) -> float:
    """From now on updates wait for a lock that nobody gives back."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    lock = threading.Lock()
    register_optimizer_step_pre_hook(lambda *_: (lock.acquire(), lock.acquire()))
    return float(rollout.sample)

def backtracks(rollout, **columns) -> float:
    """A regular expression that takes longer than the universe, and lets no thread run."""
    return float(bool(re.fullmatch("(a+)+", "a" * 60 + "b")))
'''
DEADLINE = 15
"""Seconds without progress: longer than a slow machine takes for anything healthy in between."""
TOOL = ("tools=[final_answer]", "tools.sql.timeout_s=9000", f"watchdog.rollout_s={DEADLINE}")
NEVER_RETURNS = (*TOOL, "tools.sql._target_=stalling.never_returns")
BLOCKS = (*TOOL, "tools.sql._target_=stalling.holds_the_loop", "tracker=trackio")
DEADLOCK = (
    *("reward=[]", "reward.r._target_=stalling.deadlock", "tools.sql.isolation=process"),
    f"watchdog.train_s={DEADLINE}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stalled:
    code: int
    err: str
    run: Path
    left: list[str]
    """Command lines of processes that it left behind."""


def start(folder: Path, *overrides: str) -> tuple[subprocess.Popen[str], Path, str]:
    folder.mkdir()
    (folder / "stalling.py").write_text(CODE)
    mark = uuid.uuid4().hex
    command = [
        *(sys.executable, "-m", "agenttrain.cli", "debug=tiny", "eval.questions=0"),
        *("tracker=none", f"hydra.run.dir={folder / 'run'}", "watchdog.heartbeat_s=0.2"),
        *overrides,
    ]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, MARK: mark},
        start_new_session=True,
    )
    return process, folder / "run", mark


def marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def finish(started: tuple[subprocess.Popen[str], Path, str]) -> Stalled:
    process, run, mark = started
    try:
        _, err = process.communicate(timeout=HANG_S)
        left = marked(mark)
        # Killed ones take a moment to go.
        until = time.monotonic() + 60
        while left and time.monotonic() < until:
            time.sleep(0.05)
            left = marked(mark)
        names = []
        for one in left:
            with suppress(psutil.NoSuchProcess):  # it may end this moment
                names.append(" ".join(one.cmdline()))
        return Stalled(code=process.returncode, err=err, run=run, left=names)
    finally:
        for other in marked(mark):
            with suppress(psutil.NoSuchProcess):
                other.kill()


@pytest.fixture(scope="module")
def stalled(tmp_path_factory) -> Stalled:
    """An async tool that never returns."""
    return finish(start(tmp_path_factory.mktemp("stalls") / "a", *NEVER_RETURNS))


def check(run: Stalled, phase: str, frame: str) -> None:
    """The evidence that every stall leaves."""
    assert run.code == STALLED == 70, run.err
    assert run.left == []
    told = f"stalled: phase {phase} of step 1 made no progress for "
    text = (run.run / "stall-0.txt").read_text()
    assert text.startswith(told)
    assert f"(watchdog.{phase}_s={DEADLINE})" in text.splitlines()[0]
    assert frame in text and "\nthread MainThread:\n" in text
    assert text.strip() in run.err
    summary = json.loads((run.run / "summary.json").read_text())
    assert (summary["status"], summary["stalled_phase"]) == ("stalled", phase)
    assert summary["error"].startswith(told)
    beat = json.loads((run.run / "heartbeat.json").read_text())
    assert (beat["phase"], beat["step"], beat["rank"]) == (phase, 1, 0)
    assert beat["since"] <= beat["last_progress"] <= beat["time"]
    assert (sum(beat["in_flight"].values()) > 0) == (phase == "rollout")


@pytest.mark.slow
def test_a_tool_that_never_returns_ends_with_the_evidence(stalled):
    check(stalled, "rollout", "_execute")


@pytest.mark.slow
def test_a_tool_that_holds_the_event_loop_ends_with_the_evidence(tmp_path):
    """The process of the dashboard goes, too."""
    check(finish(start(tmp_path / "a", *BLOCKS)), "rollout", "holds_the_loop")


@pytest.mark.long
def test_a_deadlocked_update_ends_with_the_evidence(tmp_path):
    check(finish(start(tmp_path / "a", *DEADLOCK)), "train", "<lambda>")


@pytest.mark.slow
def test_the_table_says_which_tool_rollouts_wait_for(stalled):
    """No rollout can go on: the engine gives no turn until a stuck rollout is back."""
    text = (stalled.run / "stall-0.txt").read_text()
    table = text.partition("\nrollouts in flight: ")[2].partition("\n\n")[0].splitlines()
    rows = [line.split() for line in table[1:]]
    assert len(rows) == int(table[0]) > 0
    calls = [row for row in rows if row[5:7] == ["tool", "sql"]]
    assert calls and all(row[0].startswith("train-1-") for row in calls)
    assert all(row[1:3] == ["turn", "1"] and row[4] == "s" for row in calls)
    assert all(float(row[3]) > 0 for row in calls)
    # Where its coroutine waits, from the rollout's own code down.
    (chain,) = [line for line in text.splitlines() if line.startswith(f"{calls[0][0]}: ")]
    assert chain.index("run_rollout (loop.py:") < chain.index("_execute (loop.py:")


@pytest.mark.slow
def test_a_stalled_run_goes_on(stalled, monkeypatch):
    run = stalled.run
    monkeypatch.syspath_prepend(str(run.parent))
    code = CODE.replace("await asyncio.Event().wait()", "return '7'")
    (run.parent / "stalling.py").write_text(code)
    assert main([f"resume={run}", "tracker=none"]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and "stalled_phase" not in summary
    beat = json.loads((run / "heartbeat.json").read_text())
    assert (beat["phase"], beat["in_flight"]) == (None, {"engine": 0, "tool": 0, "other": 0})


@pytest.mark.long
def test_what_keeps_the_interpreter_to_itself_is_ended_too(tmp_path):
    hangs = ("reward=[]", "reward.r._target_=stalling.backtracks", "watchdog.rollout_s=5")
    run = finish(start(tmp_path / "a", *hangs))
    assert run.code == 1
    assert "Timeout" in run.err and "in backtracks" in run.err


def test_a_heartbeat_says_what_the_run_does(tmp_path):
    with Watchdog(tmp_path, WatchdogConfig(rollout_s=30.0, heartbeat_s=0.1)) as watchdog:
        with watchdog.phase("rollout", step=3):
            until = time.monotonic() + 60
            while not (tmp_path / "heartbeat.json").exists():
                assert time.monotonic() < until
                time.sleep(0.05)
            beat = json.loads((tmp_path / "heartbeat.json").read_text())
        assert (beat["phase"], beat["step"], beat["pid"]) == ("rollout", 3, os.getpid())
    assert not list(tmp_path.glob("stall-*"))


def test_a_process_that_waits_for_another_one_is_not_judged(tmp_path):
    world = World()
    with Watchdog(tmp_path, WatchdogConfig(rollout_s=600.0, heartbeat_s=0.05), world) as watchdog:
        watchdog.begin("rollout", step=3)
        until, seen = time.monotonic() + 60, set()
        while len(seen) < 3:  # signs of progress: that of the beginning, and two more
            assert time.monotonic() < until
            world.progress += 1
            with suppress(OSError):
                seen.add(json.loads((tmp_path / "heartbeat.json").read_text())["last_progress"])


def test_the_timer_of_c_is_set_again_whatever_the_heartbeat(tmp_path, monkeypatch):
    """It ends the process when it is not: a heartbeat rarer than a deadline must not let it."""
    set_again, times = threading.Event(), []

    def later(timeout: float, **settings: object) -> None:
        times.append(timeout)
        if len(times) == 3:
            set_again.set()

    monkeypatch.setattr(faulthandler, "dump_traceback_later", later)
    monkeypatch.setattr(module, "ARM_S", 0.0)
    with Watchdog(tmp_path, WatchdogConfig(rollout_s=600.0, heartbeat_s=1e6)) as watchdog:
        watchdog.begin("rollout", step=1)
        assert set_again.wait(60)
    assert set(times) <= {660.0, 3660.0}


@pytest.mark.parametrize(
    ("deadline_s", "longest_s"), [(None, 2.0), (3600.0, 2.0), (4.0, 1.0), (0.4, 0.25)]
)
def test_a_pause_of_the_whole_process_alone_is_no_stall(deadline_s, longest_s):
    assert module.longest_tick_s(deadline_s) == longest_s


def test_the_deadline_of_each_phase():
    config = WatchdogConfig(rollout_s=5.0, sync_s=None)
    assert config.deadline_of("rollout") == config.deadline_of("data") == ("rollout_s", 5.0)
    assert config.deadline_of("sync") == ("sync_s", None)
    assert config.deadline_of(None) == ("", None)
    assert config.deadline_of("heartbeat") == ("heartbeat_s", 5.0)
