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

from agenttrain.commands.sweep.config import Direction
from agenttrain.commands.sweep.expand import parse
from agenttrain.commands.sweep.process import JobProcess
from agenttrain.commands.sweep.record import (
    SweepJob,
    SweepRecord,
    TrialSearch,
    job_states,
    read_record,
    write_record,
)
from agenttrain.commands.sweep.run import trials
from agenttrain.commands.sweep.search import next_trial
from agenttrain.settings.compose import Source, hydra_session
from agenttrain.tracking.run_folder import update_summary
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
    with Path("job").open("a") as file:
        print(os.getpid(), file=file)
    while Path("hold").exists():
        time.sleep(0.1)

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


@pytest.mark.long
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
    jobs = job_states(tmp_path / "s", read_record(tmp_path / "s"))
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


@pytest.mark.slow
def test_a_job_tells_its_code_and_its_last_words(tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    process = JobProcess(["stepz=1"], output)
    while (ended := process.poll()) is None:
        time.sleep(0.1)
    assert ended.code == 2
    assert ended.last_words.startswith("agenttrain: stepz=1: unknown key")
    assert "unknown key" in output.read_text()


@pytest.mark.slow
def test_a_job_hears_ctrl_c_though_its_sweep_inherited_that_it_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in the background of a shell without job control."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    monkeypatch.chdir(tmp_path)
    held = (*TINY, "reward.held._target_=held.held", "hydra.run.dir=run")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = JobProcess(held, tmp_path / "output.txt", environment())
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        end = time.monotonic() + HANG_S
        while not (tmp_path / "job").exists():
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        process.send(signal.SIGINT)
        while (ended := process.poll()) is None:
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        process.stop()
    assert ended.code == INTERRUPTED


def wait_for_step(running: subprocess.Popen[str], metrics: Path) -> None:
    end = time.monotonic() + HANG_S
    while not metrics.exists() or not metrics.read_text().count("\n"):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < end, "no step was done"
        time.sleep(0.2)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "left"),
    [
        (signal.SIGINT, INTERRUPTED, "interrupted"),
        pytest.param(signal.SIGTERM, PREEMPTED, "preempted", marks=pytest.mark.long),
    ],
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


@pytest.mark.parametrize("parallel", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_jobs_of_a_sweep_that_is_killed_end_with_it(parallel: int, tmp_path: Path) -> None:
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    arguments = (*TINY, "seed=0,1", f"sweep.parallel={parallel}", "hydra.sweep.dir=s")
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
        job = tmp_path / "job"
        while not job.exists() or len(job.read_text().splitlines()) < parallel:
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.1)
        jobs = jobs_in(tmp_path)
        assert {int(line) for line in job.read_text().splitlines()} == {job.pid for job in jobs}
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


SEARCH = ("sweep.sampler=tpe", "sweep.objective=eval/reward", "hydra.sweep.dir=s")


@pytest.mark.long
def test_a_search_runs_trials_side_by_side_and_goes_on_after_failures(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(REWARD)
    (tmp_path / "broken").touch()
    space = ("reward.judge.mode=broken,good", "tasks_per_step=int(interval(2, 3))")
    reward = ("reward.judge._target_=judges.judged", "sweep.trials=4", "sweep.parallel=2")
    done = agenttrain("-m", *TINY, *reward, *space, *SEARCH, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 finished, 2 failed" in done.stdout
    # The second job starts before the first one ends.
    assert done.stdout.index("job 2 of 4: ") < done.stdout.index("job 1: ")
    assert "best       reward.judge.mode=good tasks_per_step=" in done.stdout
    record = read_record(tmp_path / "s")
    assert record.search is not None
    past = trials(tmp_path / "s", record, record.search)
    assert sorted((one.values, one.failed) for one in past) == [
        (("broken", "2"), True),
        (("broken", "3"), True),
        (("good", "2"), False),
        (("good", "3"), False),
    ]
    for job in job_states(tmp_path / "s", record):
        output = (job.folder / "output.txt").read_text()
        assert ("the judge is broken" in output) == (job.status == "failed")

    (tmp_path / "broken").unlink()
    done = agenttrain("-m", "resume=s", "sweep.parallel=1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 finished" in done.stdout
    assert read_record(tmp_path / "s").jobs == record.jobs


@pytest.mark.slow
def test_a_search_that_is_killed_goes_on_with_the_same_trials(tmp_path: Path) -> None:
    """Ten trials are on record; the eleventh is killed, and the twelfth is chosen by eleven."""
    (tmp_path / "held.py").write_text(HELD)
    (tmp_path / "hold").touch()
    common = [*TINY, "seed=0", "+reward.held._target_=held.held"]
    axis = "optimizer.lr=tag(log, interval(1e-4, 1e-2))"
    search = TrialSearch(trials=12, seed=0, direction="maximize", space=[axis], repeats=[common])
    jobs = [
        SweepJob(folder=str(number), overrides=[f"optimizer.lr={0.0002 * (number + 1)}", *common])
        for number in range(10)
    ]
    record = SweepRecord(verb="train", objective="eval/reward", search=search, jobs=jobs)
    write_record(tmp_path / "s", record)
    for number in range(10):
        (tmp_path / "s" / str(number)).mkdir()
        result = {"after": {"reward": -abs(number - 4)}}  # the fifth is the best
        update_summary(tmp_path / "s" / str(number), status="finished", eval=result)
    running = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", "-m", "resume=s"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + HANG_S
        while not (tmp_path / "job").exists():
            assert running.poll() is None and time.monotonic() < end
            time.sleep(0.1)
    finally:
        running.kill()
        running.wait()
    (eleventh,) = read_record(tmp_path / "s").jobs[10:]
    (tmp_path / "hold").unlink()
    done = agenttrain("-m", "resume=s", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 finished" in done.stdout
    after = read_record(tmp_path / "s")
    assert after.jobs[:11] == [*jobs, eleventh]
    with hydra_session(Source()):
        axes = {one.get_key_element(): one for one in parse([axis])}
    past = trials(tmp_path / "s", after, search)
    unbroken = next_trial(axes, 0, Direction.maximize, past[:11])
    assert unbroken == past[11].values
    assert [f"optimizer.lr={unbroken[0]}"] == after.jobs[11].overrides[:1]


@pytest.mark.long
def test_evaluations_are_swept_and_share_a_dashboard(tmp_path: Path) -> None:
    tracked = tuple(text for text in TINY if text != "tracker=none" and text != "steps=1")
    arguments = ("eval", "-m", *tracked, "seed=0,1", "hydra.sweep.dir=x/shop/s")
    done = agenttrain(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "x" / "shop" / "trackio" / "shop.db").is_file()
    assert "eval/pass@1" in agenttrain("compare", "x/shop/s", cwd=tmp_path).stdout
