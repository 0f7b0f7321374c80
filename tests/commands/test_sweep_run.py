"""Sweeps as a user runs them: real processes, some of which fail or are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agenttrain.commands.sweep import run as process
from agenttrain.commands.sweep.record import read_record, standings
from agenttrain.utils.exit_codes import INTERRUPTED, PREEMPTED

ROOT = Path(__file__).parents[2]
TINY = ("debug=tiny", "steps=1", "tracker=none", "eval.questions=1", "eval.greedy=false")
HANG_S = 600
"""Only what hangs takes as long."""
pytestmark = pytest.mark.timeout(3 * HANG_S)
REWARD = """
import os
from pathlib import Path

def judged(rollout, mode):
    path = Path("processes.txt")
    line = f"{mode} {os.getpid()}"
    if not path.exists() or line not in path.read_text().splitlines():
        with path.open("a") as file:
            print(line, file=file)
    if mode == "broken" and Path("broken").exists():
        raise OSError("the judge is broken")
    return 1.0
"""


HELD = """
import os, sys, time
from pathlib import Path

if "-m" not in sys.argv:  # a job and not its sweep
    Path("job").write_text(str(os.getpid()))
    time.sleep(600)

def held(rollout):
    return 1.0
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def agenttrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
        timeout=HANG_S,
    )


def status(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["status"])


def test_a_sweep_stops_at_a_failure_and_its_unfinished_jobs_run_later(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(REWARD)
    (tmp_path / "broken").touch()
    reward = ("reward.judge._target_=judges.judged", "reward.judge.mode=broken,good")
    sweep = ("sweep.objective=eval/reward", "sweep.on_failed_job=stop", "hydra.sweep.dir=s")
    done = agenttrain("-m", *TINY, *reward, *sweep, cwd=tmp_path)
    assert done.returncode == 1
    assert "job 1 of 2: reward.judge.mode=broken -> " in done.stdout
    assert "job 1: failed: " in done.stdout and "the judge is broken" in done.stderr
    assert "1 failed, 1 never started" in done.stdout
    assert "agenttrain -m resume=s\n" in done.stdout
    jobs = standings(tmp_path / "s", read_record(tmp_path / "s"))
    assert [job.status for job in jobs] == ["failed", "never started"]
    assert "the judge is broken" in str(jobs[0].error)

    (tmp_path / "broken").unlink()
    done = agenttrain("-m", "resume=s", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "job 2: finished, eval/reward " in done.stdout
    assert "2 finished" in done.stdout
    assert json.loads((tmp_path / "s" / "1" / "summary.json").read_text())["sweep"] is True
    # One process per job and try: the broken one twice.
    ran = [line.split() for line in (tmp_path / "processes.txt").read_text().splitlines()]
    assert [mode for mode, _ in ran] == ["broken", "broken", "good"]
    assert len({number for _, number in ran}) == 3


def test_a_job_tells_its_code_and_its_last_words(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    ended = process.run(["stepz=1"], output)
    assert (ended.code, ended.signalled) == (2, False)
    assert ended.last_words.startswith("agenttrain: stepz=1: unknown key")
    assert "unknown key" in output.read_text()


def wait_for_step(running: subprocess.Popen[str], metrics: Path) -> None:
    end = time.monotonic() + HANG_S
    while not metrics.exists() or not metrics.read_text().count("\n"):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end, "no step was done"
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "left"),
    [(signal.SIGINT, INTERRUPTED, "interrupted"), (signal.SIGTERM, PREEMPTED, "preempted")],
)
def test_a_sweep_that_is_told_to_stop_stops_its_job_and_goes_on_later(
    number: signal.Signals, code: int, left: str, tmp_path: Path
) -> None:
    long = ("-m", *TINY, "seed=0,1", "steps=100000", "eval.questions=0", "hydra.sweep.dir=s")
    running = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", *long],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        wait_for_step(running, tmp_path / "s" / "0" / "metrics.jsonl")
        running.send_signal(number)
        said, _ = running.communicate(timeout=HANG_S)
    finally:
        running.terminate()
        running.wait()
    assert running.returncode == code, said
    assert "1 never started" in said and "agenttrain -m resume=s\n" in said
    assert status(tmp_path / "s" / "0") == left
    assert not (tmp_path / "s" / "1").exists()

    steps = (tmp_path / "s" / "0" / "metrics.jsonl").read_text().count("\n") + 1
    done = agenttrain("-m", "resume=s", f"steps={steps}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 finished" in done.stdout
    rows = (tmp_path / "s" / "0" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == list(range(1, steps + 1))


@pytest.mark.parametrize("launcher", ["basic", pytest.param("joblib", marks=pytest.mark.slow)])
def test_the_job_of_a_sweep_that_is_killed_ends_with_it(launcher: str, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    arguments = (*TINY, "seed=0,1", f"hydra/launcher={launcher}", "hydra.sweep.dir=s")
    running = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "agenttrain.cli",
            "-m",
            *arguments,
            "reward.held._target_=held.held",
        ],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + HANG_S
        while not (tmp_path / "job").exists() or not (tmp_path / "job").read_text():
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        jobs = jobs_in(tmp_path)
        assert int((tmp_path / "job").read_text()) in [job.pid for job in jobs]
    finally:
        running.kill()
        running.wait()
    _, alive = psutil.wait_procs(jobs, timeout=30)
    for job in alive:
        job.kill()
    assert alive == []


def jobs_in(folder: Path) -> list[psutil.Process]:
    """The jobs of sweeps that work in a folder."""
    found = []
    for one in psutil.process_iter():
        with suppress(psutil.Error):
            words = one.cmdline()
            if one.cwd() == str(folder) and "agenttrain.cli" in words and words.count("-m") == 1:
                found.append(one)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_other_launchers_run_the_jobs(launcher: str, tmp_path: Path) -> None:
    plugin = f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher"
    pytest.importorskip(plugin, reason=f"{plugin}: pip install 'agenttrain[sweep,slurm]'")
    arguments = (*TINY, "seed=0,1", f"hydra/launcher={launcher}", "hydra.sweep.dir=s")
    done = agenttrain("-m", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 finished" in done.stdout
    assert "train in s/0" in (tmp_path / "s" / "0" / "output.txt").read_text().replace(
        f"{tmp_path}/", ""
    )
    (tmp_path / "s" / "1" / "summary.json").unlink()
    (tmp_path / "s" / "1" / "config.yaml").unlink()
    first = (tmp_path / "s" / "0" / "summary.json").read_text()
    done = agenttrain("-m", "resume=s", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert status(tmp_path / "s" / "1") == "finished"
    assert (tmp_path / "s" / "0" / "summary.json").read_text() == first


@pytest.mark.slow
def test_a_sweeper_that_searches_sees_the_objective(tmp_path: Path) -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_optuna_sweeper", reason="pip install 'agenttrain[optuna]'"
    )
    optuna = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1")
    choice = ("optimizer.lr=interval(1e-4, 1e-3)", "hydra.sweeper.direction=maximize")
    refused = agenttrain("-m", *TINY, *optuna, *choice, cwd=tmp_path)
    assert refused.returncode == 2 and "the sweeper chooses by it" in refused.stderr
    objective = ("sweep.objective=steps", "hydra.sweep.dir=s")
    done = agenttrain("-m", *TINY, *optuna, *choice, *objective, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best_value: 1.0" in (tmp_path / "s" / "optimization_results.yaml").read_text()
    jobs = standings(tmp_path / "s", read_record(tmp_path / "s"))
    assert [job.status for job in jobs] == ["finished"] * 2


@pytest.mark.slow
def test_evaluations_are_swept_and_share_a_dashboard(tmp_path: Path) -> None:
    tracked = tuple(text for text in TINY if text != "tracker=none" and text != "steps=1")
    arguments = ("eval", "-m", *tracked, "seed=0,1", "hydra.sweep.dir=x/shop/s")
    done = agenttrain(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "x" / "shop" / "s" / "trackio" / "shop.db").is_file()
    assert "eval/pass@1" in agenttrain("compare", "x/shop/s", cwd=tmp_path).stdout
