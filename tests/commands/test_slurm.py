"""Jobs of a real SLURM: scripts/test-slurm brings one up and runs these."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from same_run import assert_same, metrics

from agenttrain.tracking.run_folder import read_summary

pytestmark = pytest.mark.skipif(
    "AGENTTRAIN_SLURM" not in os.environ, reason="needs a private SLURM: scripts/test-slurm"
)

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400
"""Only what hangs takes so long."""
RUN = (
    *("debug=tiny", "steps=6", "tasks_per_step=4", "tracker=none", "eval.questions=2"),
    *("reward=[]", "+reward.holding._target_=holding.reward", "+reward.holding.timeout_s=4000"),
)
DDP = ("distributed=ddp", "distributed.processes=2")
JOB = ("slurm.cpus=4", "slurm.time=00:30:00", "slurm.memory=4G")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A working folder with the user's module; its jobs are gone afterwards."""
    shutil.copy(ROOT / "tests" / "kit" / "holding.py", tmp_path)
    before = jobs()
    yield tmp_path
    for job in jobs() - before:
        subprocess.run(["scancel", job], check=False)
    wait("its jobs are gone", lambda: not jobs() - before)


def jobs() -> set[str]:
    """The numbers of all jobs that are in the queue."""
    command = ["squeue", "--noheader", "--format=%A"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def wait(what: str, holds: Callable[[], object], detail: Callable[[], str] = str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end, f"not within {PATIENCE_S} s: {what}\n{detail()}"
        time.sleep(0.1)


def agenttrain(work: Path, *arguments: str, code: int = 0) -> str:
    """What the command printed."""
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def submit(work: Path, *arguments: str) -> str:
    """The job's number."""
    said = agenttrain(work, "submit", "--no-check", *RUN, *JOB, *arguments)
    found = re.search(r"^submitted +(\d+)", said, re.MULTILINE)
    assert found, said
    return found[1]


def sbatch(work: Path, *arguments: str) -> str:
    """The number of a job of SLURM's own command."""
    command = ["sbatch", "--parsable", *arguments]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def shown(job: str, key: str) -> str:
    """What SLURM says of a job, e.g. ``shown("7", "JobState") == "COMPLETED"``."""
    done = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", job], capture_output=True, text=True, check=True
    )
    return re.search(rf"\b{key}=(\S+)", done.stdout)[1]


def ended(job: str, state: str, work: Path) -> None:
    """Wait for the job's end, which must be that one."""
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
    wait(f"job {job} ends", lambda: shown(job, "JobState") in over, lambda: logs(work))
    assert shown(job, "JobState") == state, logs(work)


def logs(work: Path) -> str:
    return "\n".join(f"{path}:\n{path.read_text()}" for path in sorted(work.rglob("*.out")))


def test_before_its_wall_time_ends_a_run_is_saved_requeued_and_goes_on(work):
    """Both of its processes, in a folder whose name needs quotes; to the bit, as without SLURM."""
    agenttrain(work, *RUN, *DDP, "hydra.run.dir=whole")
    (work / "hold").write_text("all")
    job = submit(work, *DDP, "slurm.time=00:01:00", "slurm.signal_s=50", "hydra.run.dir='my run=1'")
    wait(
        "back in the queue",
        lambda: int(shown(job, "Restarts")) > 0,
        lambda: logs(work),
    )
    # A slow machine needs more than a minute.
    subprocess.run(["scontrol", "update", f"JobId={job}", "TimeLimit=30"], check=True)
    ended(job, "COMPLETED", work)
    folder = work / "my run=1"
    assert read_summary(folder)["status"] == "finished"
    assert [row["step"] for row in metrics(folder)] == [1, 2, 3, 4, 5, 6]
    assert_same(folder, work / "whole")
    log = logs(work)
    assert "JOB REQUEUE" in log
    assert re.findall(r"^step (\d)/6 ", log, re.MULTILINE) == [*"123456"], log


def test_a_preempted_run_gives_way_and_goes_on_exactly(work):
    """To the bit, as a whole run without SLURM."""
    agenttrain(work, *RUN, "hydra.run.dir=whole")
    (work / "hold").write_text("all")
    job = submit(work, "slurm.cpus=96", "hydra.run.dir=run")
    wait("the run is at its step", (work / "held").exists, lambda: logs(work))
    node = shown(job, "NodeList")
    urgent = ["--partition=high", f"--nodelist={node}", "--cpus-per-task=96", "--wrap=true"]
    other = sbatch(work, *urgent, "--output=/dev/null")
    ended(other, "COMPLETED", work)
    assert int(shown(job, "Restarts")) == 1
    ended(job, "COMPLETED", work)
    assert len(metrics(work / "run")) == 6
    assert_same(work / "run", work / "whole")


def test_a_sweep_is_an_array_whose_jobs_go_on_alone(work):
    (work / "hold").write_text("2")
    axes = ("-m", "algorithm=grpo,rloo", "seed=0,1", "hydra.sweep.dir=sweep")
    job = submit(work, *axes, "slurm.concurrent=3")
    wait("one is at its step", (work / "held").exists, lambda: logs(work))
    subprocess.run(["scancel", "--batch", "--signal=USR1", f"{job}_2"], check=True)
    for number in range(4):
        ended(f"{job}_{number}", "COMPLETED", work)
    assert [shown(f"{job}_{n}", "Restarts") for n in range(4)] == ["0", "0", "1", "0"]
    sweep = work / "sweep"
    assert [read_summary(sweep / str(n))["status"] for n in range(4)] == ["finished"] * 4
    assert [len(metrics(sweep / str(n))) for n in range(4)] == [6] * 4
    table = agenttrain(work, "compare", "sweep")
    assert "rloo" in table and "grpo" in table


def test_two_nodes_train_together(work):
    job = submit(
        work,
        *("distributed=ddp", "distributed.processes=1", "slurm.nodes=2", "hydra.run.dir=run"),
    )
    ended(job, "COMPLETED", work)
    assert shown(job, "NumNodes") == "2"
    assert len(metrics(work / "run")) == 6


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: scripts/install_vllm_cpu")
@pytest.mark.parametrize(("how", "ahead"), [("signalled", 0), ("preempted", 1)])
def test_serving_and_training_are_steps_of_one_job(work, how, ahead):
    """On two nodes; the job gives way in the middle of a step, and both go on in its next life."""
    (work / "hold").write_text("all")
    job = submit(
        work,
        *("engine=vllm_server", "servers.nodes=1", "slurm.nodes=2", "engine.kv_cache_mb=32"),
        *("steps=4", "tasks_per_step=2", "eval.questions=0", "hydra.run.dir='my run=1'"),
        *(f"async_training.max_staleness={ahead}", "weight_sync.mode=abort_resume"),
        "slurm.cpus=96",
    )
    wait("the run is at its step", (work / "held").exists, lambda: logs(work))
    record = json.loads((work / "my run=1/servers/0.json").read_text())
    assert (record["condition"], record["boot"]) == ("ready", 1)
    assert record["host"] == socket.gethostname() and record["url"].startswith("http://")
    if how == "signalled":
        subprocess.run(["scancel", "--batch", "--signal=USR1", job], check=True)
    else:  # SIGTERM to both steps
        urgent = ["--partition=high", f"--nodelist={socket.gethostname()}", "--cpus-per-task=96"]
        sbatch(work, *urgent, "--wrap=true", "--output=/dev/null")
    ended(job, "COMPLETED", work)
    assert (shown(job, "Restarts"), shown(job, "NumNodes")) == ("1", "2")
    folder = work / "my run=1"
    assert read_summary(folder)["status"] == "finished"
    rows = metrics(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["fleet/servers"] == 1 for row in rows)
    assert ahead or all(row["fleet/requests"] > 0 for row in rows)  # or those of a step before
    if ahead:
        lines = (folder / "rollouts/journal.jsonl").read_text().splitlines()
        assert sorted(json.loads(line)["serial"] for line in lines) == [*range(8)]
        assert max(row["async/staleness/max"] for row in rows) == ahead
    assert (folder / "servers/0.log").read_text().count("vllm serve ") == 2  # a server in each life
    left = sorted(path.name for path in (folder / "servers").iterdir())
    assert left == ["0.log", "status.json"]
    assert not processes_of(folder), logs(work)


def processes_of(folder: Path) -> list[str]:
    """The command lines of processes that name a run's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found += [words] if str(folder) in words else []
    return found


def test_a_cancelled_job_is_not_put_back(work):
    (work / "hold").write_text("all")
    job = submit(work, "hydra.run.dir=run")
    wait("the run is at its step", (work / "held").exists, lambda: logs(work))
    subprocess.run(["scancel", job], check=True)
    ended(job, "CANCELLED", work)
    assert shown(job, "Restarts") == "0"
    assert read_summary(work / "run")["status"] == "preempted"
    # Its script is still there, and goes on.
    (work / "hold").unlink()
    ended(sbatch(work, "run/job.sbatch"), "COMPLETED", work)
    assert len(metrics(work / "run")) == 6


def test_a_run_that_fails_is_not_put_back(work):
    (work / "holding.py").write_text("def reward(rollout, **columns):\n    raise KeyError('x')\n")
    job = submit(work, "hydra.run.dir=run")
    ended(job, "FAILED", work)
    assert (shown(job, "Restarts"), shown(job, "ExitCode")) == ("0", "1:0")


def test_a_finished_run_gets_more_steps(work):
    ended(submit(work, "hydra.run.dir=run", "steps=2"), "COMPLETED", work)
    said = agenttrain(work, "submit", "--no-check", *JOB, "resume=run", "steps=4")
    found = re.search(r"^submitted +(\d+)", said, re.MULTILINE)
    assert found, said
    ended(found[1], "COMPLETED", work)
    assert len(metrics(work / "run")) == 4


def test_what_slurm_refuses_is_told_and_leaves_nothing(work):
    said = agenttrain(
        work, "submit", "--no-check", *RUN, "slurm.partition=fast", "hydra.run.dir=run", code=2
    )
    assert "invalid partition specified: fast" in said
    assert "see slurm.partition" in said
    assert not (work / "run").exists()


@pytest.mark.parametrize("name", ["single_node", "multi_node", "array_sweep"])
def test_slurm_takes_the_examples(name):
    done = subprocess.run(
        ["sbatch", "--test-only", str(ROOT / "scripts" / "slurm" / f"{name}.sbatch")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
