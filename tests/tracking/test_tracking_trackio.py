"""The dashboard's data, and runs whose dashboard fails."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console
from tracking_rollouts import three

from agenttrain.tracking.config import TrackerConfig
from agenttrain.tracking.dashboard import TrackioSink, dashboard_command
from agenttrain.tracking.tracker import Tracker, read_metrics


def rows(folder: Path) -> list[tuple[str, int, dict]]:
    with sqlite3.connect(folder / "shop.db") as database:
        query = "select run_name, step, metrics from metrics order by step, id"
        return [(name, step, json.loads(text)) for name, step, text in database.execute(query)]


def run(folder: Path, steps: range, **settings) -> str:
    """A run of some steps; what it printed."""
    out = io.StringIO()
    config = TrackerConfig(console=False)
    with Tracker(
        folder,
        config,
        project="shop",
        name=folder.name,
        total_steps=99,
        console=Console(file=out, width=500),
        **settings,
    ) as tracker:
        for step in steps:
            tracker.step(step, {"reward": step / 100, "kl": float("nan")}, three())
    return out.getvalue()


def children() -> set[int]:
    """Return the processes that this one has started."""
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def signal_all(pids: set[int]) -> None:
    """Send processes what a process group may get."""
    for pid in pids:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT):
            os.kill(pid, number)


def test_signals_to_the_process_group_do_not_end_the_dashboard(tmp_path):
    """The run handles them, and records steps until it stops."""
    folder, out = tmp_path / "run", io.StringIO()
    arguments = {"project": "shop", "name": "run", "total_steps": 2, "console": Console(file=out)}
    others = children()  # of tests that ran before in this process
    with Tracker(folder, TrackerConfig(console=False), **arguments) as tracker:
        (dashboard,) = children() - others
        signal_all({dashboard})  # before the process has begun
        tracker.step(1, {"reward": 0.25}, three())
        while not (folder / "trackio" / "shop.db").exists():
            time.sleep(0.05)
        signal_all({dashboard})
        tracker.step(2, {"reward": 0.5}, three())
    found = [m["reward"] for _, _, m in rows(folder / "trackio") if "reward" in m]
    assert (found, "trackio failed" in out.getvalue()) == ([0.25, 0.5], False)


def test_steps_evaluations_and_traces_reach_the_dashboard(tmp_path):
    folder = tmp_path / "run"
    with Tracker(folder, TrackerConfig(), project="shop", name="run", total_steps=11) as tracker:
        tracker.evaluation("before/sampled", 0, {"reward": 0.25})
        for step in range(1, 12):
            tracker.step(step, {"reward": step / 100, "kl": float("nan")}, three())
    points = rows(folder / "trackio")
    assert ("run", 0, {"eval/sampled/reward": 0.25}) in points
    assert [m["reward"] for _, _, m in points if "reward" in m] == [s / 100 for s in range(1, 12)]
    assert all("kl" not in metrics for _, _, metrics in points)
    with sqlite3.connect(folder / "trackio" / "shop.db") as database:
        traced = database.execute("select step, count(*) from traces group by step").fetchall()
    assert traced == [(1, 3), (11, 3)]


def test_a_resumed_run_goes_on_under_its_name(tmp_path):
    shared = tmp_path / "trackio"
    run(tmp_path / "0", range(1, 3), trackio_folder=shared)
    run(tmp_path / "0", range(3, 4), trackio_folder=shared, resume_step=2)
    run(tmp_path / "1", range(1, 2), trackio_folder=shared)
    assert [(name, step) for name, step, _ in rows(shared)] == [
        ("0", 1), ("1", 1), ("0", 2), ("0", 3),
    ]  # fmt: skip
    with sqlite3.connect(shared / "shop.db") as database:
        assert database.execute("select count(distinct run_id) from metrics").fetchone() == (2,)


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "trackio").write_text("a file where the folder should be")
    said = run(tmp_path / "run", range(1, 4))
    assert said.count("trackio failed") == 1
    assert "FileExistsError" in said and "tracker.name=none" in said
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_a_database_that_cannot_be_written_is_said_once(tmp_path):
    """trackio itself swallows this error and warns, from a thread."""
    folder = tmp_path / "run"
    (folder / "trackio" / "shop.db").mkdir(parents=True)
    said = run(folder, range(1, 30))
    assert said.count("trackio failed") == 1
    assert "unable to open database" in said
    assert len(read_metrics(folder / "metrics.jsonl")) == 29


def test_a_trackio_that_hangs_neither_blocks_the_run_nor_its_end(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("agenttrain.tracking.dashboard.FINISH_TIMEOUT_S", 0.2)
    said: list[str] = []
    sink = TrackioSink(tmp_path / "store", project="shop", name="run", warn=said.append)
    for step in range(40):  # 400 kB, more than a pipe takes
        sink.log(step, {f"{'long' * 20}/{i}": float(i) for i in range(100)})
    sink.close()
    assert len(said) == 1 and "did not finish within" in said[0]
    assert sink.failed


def test_a_missing_trackio_is_said(tmp_path, monkeypatch):
    (tmp_path / "trackio.py").write_text("raise ImportError('No module named trackio')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said: list[str] = []
    sink = TrackioSink(tmp_path / "store", project="shop", name="run", warn=said.append)
    sink.log(1, {"reward": 0.5})
    sink.close()
    assert len(said) == 1 and "ImportError: No module named trackio" in said[0]


def test_nothing_leaves_the_machine(tmp_path, monkeypatch):
    """A saved hub token and a Space in the environment must not make trackio go online."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/board")
    monkeypatch.setenv("TRACKIO_WEBHOOK_URL", "https://example.org/hook")
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import pathlib, socket
            def refuse(self, address):
                pathlib.Path({str(tmp_path / "went_online")!r}).write_text(repr(address))
                raise OSError("no network in this test")
            socket.socket.connect = refuse
            socket.getaddrinfo = lambda *address, **_: refuse(None, address)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    said = run(tmp_path / "run", range(1, 3))
    assert "trackio failed" not in said
    assert len(rows(tmp_path / "run" / "trackio")) == 2
    assert not (tmp_path / "went_online").exists()


def test_a_killed_run_keeps_every_row_it_sent(tmp_path):
    """SIGKILL of the run: the process that holds trackio sees the end of its input and finishes."""
    script = f"""
import os, signal, sys, time
from pathlib import Path
from agenttrain.tracking.dashboard import TrackioSink
sink = TrackioSink(Path({str(tmp_path)!r}), project="shop", name="run", warn=print)
for step in range(1, 21):
    sink.log(step, {{"reward": 0.5}})
while not sink._queue.empty():
    time.sleep(0.01)
time.sleep(0.1)
print(sink._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    wait_for_end(int(done.stdout))
    assert [step for _, step, _ in rows(tmp_path)] == list(range(1, 21))


def wait_for_end(pid: int) -> None:
    for _ in range(1500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


def test_the_dashboard_command_is_one_that_a_shell_runs(tmp_path):
    folder = tmp_path / "a run's folder"
    command = dashboard_command(folder, "shop & co")
    words = shlex.split(command)
    assert words[0] == f"TRACKIO_DIR={folder}/trackio"
    assert words[2:] == ["show", "--project", "shop & co"]
    helped = subprocess.run(
        f"{command} --help", shell=True, capture_output=True, text=True, env=os.environ
    )
    assert helped.returncode == 0 and "Project name to show" in helped.stdout
