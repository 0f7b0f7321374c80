"""The bundled trackers, with their own files: what is in them after kills and a resume."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from urllib.request import urlopen

import pytest
from mlflow.tracking import MlflowClient
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tracking_rollouts import three
from wandb.proto.wandb_internal_pb2 import Record

from agenttrain.tracking.backends.base import RunEnd, TrackedRun
from agenttrain.tracking.backends.mlflow import MLflow
from agenttrain.tracking.backends.trackio import Trackio
from agenttrain.tracking.backends.wandb import WandB
from agenttrain.tracking.config import BUNDLED, TrackerConfig
from agenttrain.tracking.following import Cursor, cursor_path
from agenttrain.tracking.machine import MachineLoad
from agenttrain.tracking.tracker import Tracker
from agenttrain.utils.signals import Preempted

ALL = tuple(BUNDLED)
CONFIG = {"seed": 7, "optimizer": {"name": "adamw", "lr": 0.001}}
STEPS = list(range(1, 13))


def tracked(folder: Path, out: io.StringIO, *names: str, **settings) -> Tracker:
    """A run with some of the bundled trackers."""
    sections = {name: {"enabled": True, "finish_s": 60.0} for name in names}
    return Tracker(
        folder,
        TrackerConfig(console=False, **sections),
        project="shop",
        name=folder.name,
        total_steps=12,
        run_config=CONFIG,
        console=Console(file=out, width=500),
        **settings,
    )


@dataclass
class Finished:
    """A run whose four tracker processes were killed at step 4, and that was resumed at step 8
    after it had done 10."""

    shared: Path
    folder: Path
    id: str
    printed: str
    views: list[str]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    patch = pytest.MonkeyPatch()
    for name in ("TRACKIO_DIR", "WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        patch.delenv(name, raising=False)
    patch.setenv("NETRC", "/dev/null")
    folder = tmp_path_factory.mktemp("shop") / "run"
    out = io.StringIO()

    def do(tracker: Tracker, steps: range) -> None:
        for step in steps:
            tracker.step(step, {"reward": step / 100, "kl": float("nan")}, three())

    def wait(step: int) -> None:
        paths = [cursor_path(folder, name) for name in ALL]
        for _ in range(1200):
            cursors = [Cursor.read(path) for path in paths]
            if all(c and (c.step, c.table, c.evaluated) == (step, 1, 0) for c in cursors):
                return
            time.sleep(0.05)
        pytest.fail(f"{cursors}; {out.getvalue()}")

    with tracked(folder, out, *ALL) as tracker:
        tracker.evaluation("before/sampled", 0, {"reward": 0.25, "reward_low": 0.125})
        do(tracker, range(1, 5))
        wait(4)
        os.kill(tracker._followers._process.pid, signal.SIGKILL)
        do(tracker, range(5, 11))
    with tracked(folder, out, *ALL, resume_step=8) as tracker:
        do(tracker, range(9, 13))
        tracker.evaluation("after/sampled", 12, {"reward": 0.75, "reward_low": 0.5})
    cursor = Cursor.read(cursor_path(folder, "wandb"))
    assert cursor is not None
    yield Finished(folder.parent, folder, cursor.id, out.getvalue(), tracker.views)
    patch.undo()


@pytest.mark.slow
def test_every_tracker_has_everything_and_says_where_it_can_be_seen(finished):
    assert "have arrived" not in finished.printed and "is off" not in finished.printed
    assert finished.printed.count("its process was ended by SIGKILL") == 4
    program = "trackio" if shutil.which("trackio") else finished.views[0].split()[1]
    assert finished.views == [
        f"TRACKIO_DIR={finished.shared}/trackio {program} show --project shop",
        f"wandb sync {finished.folder}/wandb/offline-run-*",
        f"tensorboard --logdir {finished.shared}",
        f"MLFLOW_ALLOW_FILE_STORE=true mlflow ui --backend-store-uri file://{finished.shared}/mlflow",
    ]


@pytest.mark.slow
def test_trackio_has_every_step_once(finished):
    with sqlite3.connect(finished.shared / "trackio" / "shop.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step, id")
        points = [(name, step, json.loads(text)) for name, step, text in rows]
        traces = database.execute("select step, count(*) from traces group by step").fetchall()
        system = database.execute("select metrics from system_metrics").fetchall()
        runs = database.execute("select count(distinct run_id) from metrics").fetchone()
        (config,) = database.execute("select config from configs").fetchone()
    assert [(step, m["reward"]) for _, step, m in points if "reward" in m] == [
        (step, step / 100) for step in STEPS
    ]
    assert {name for name, _, _ in points} == {"run"} and runs == (1,)
    assert all("kl" not in metrics for _, _, metrics in points)
    assert ("run", 0, {"eval/sampled/reward": 0.25, "eval/sampled/reward_low": 0.125}) in points
    assert traces == [(1, 3), (11, 3)]
    assert [step for _, step, metrics in points if "rollouts_table" in metrics] == [1, 11]
    assert "cpu_percent" in json.loads(system[0][0])
    assert json.loads(config)["optimizer"] == {"name": "adamw", "lr": 0.001}


def wandb_records(file: Path) -> Iterator[Record]:
    """Read wandb's log of records: blocks of 32 kB, in which a record may begin and end."""
    content, position, parts = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:
            position += 32768 - position % 32768
            continue
        length, kind = (
            int.from_bytes(content[position + 4 : position + 6], "little"),
            content[position + 6],
        )
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield Record.FromString(parts)
            parts = b""


@pytest.mark.slow
def test_wandb_has_every_step_once(finished):
    files = sorted((finished.folder / "wandb").glob(f"offline-run-*-{finished.id}/*.wandb"))
    assert len(files) == 3  # the process that was killed, its successor, and the resumed run
    records = [record for file in files for record in wandb_records(file)]
    # Its own of the machine: programs, packages, user and load.
    assert not any(r.HasField("environment") or r.HasField("stats") for r in records)
    rows = [
        {
            item.key or ".".join(item.nested_key): json.loads(item.value_json)
            for item in r.history.item
        }
        for r in records
        if r.HasField("history")
    ]
    assert [(row["step"], row["reward"]) for row in rows if "reward" in row] == [
        (step, step / 100) for step in STEPS
    ]
    assert [row["_step"] for row in rows] == list(range(len(rows)))
    assert [row["step"] for row in rows if "eval/sampled/reward" in row] == [0, 12]
    assert [row["step"] for row in rows if any(key.startswith("rollouts") for key in row)] == [
        1,
        11,
    ]
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {
        (finished.id, "run", "shop")
    }
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["seed"] == 7 and config["optimizer"] == {"name": "adamw", "lr": 0.001}


def test_tensorboard_has_the_steps_of_a_run(tmp_path):
    with tracked(tmp_path, io.StringIO(), "tensorboard") as tracker:
        for step in (1, 2):
            tracker.step(step, {"reward": step / 100}, three())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    rewards = [(event.step, round(event.value, 4)) for event in events.Scalars("reward")]
    assert rewards == [(1, 0.01), (2, 0.02)]


@pytest.mark.slow
def test_tensorboard_has_every_step_once(finished):
    events = EventAccumulator(str(finished.folder / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    rewards = [(event.step, round(event.value, 4)) for event in events.Scalars("reward")]
    assert rewards == [(step, step / 100) for step in STEPS]
    assert [(e.step, e.value) for e in events.Scalars("eval/sampled/reward_low")] == [
        (0, 0.125), (12, 0.5),
    ]  # fmt: skip
    assert "system/cpu_percent" in events.Tags()["scalars"]
    tables = events.Tensors("rollouts")
    assert [table.step for table in tables] == [1, 11]
    text = tables[0].tensor_proto.string_val[0].decode()
    assert text.splitlines()[0].startswith("| rollout_id | task_id | reward | stop_reason |")
    assert "| g0-0 | sum-1 | 1.0 | completed | 2 | 4 | user: What is 3 + 4?<br>" in text
    assert "&lt;script" not in text and "<script" not in text
    (config,) = events.Tensors("config")
    assert '"seed":7' in config.tensor_proto.string_val[0].decode()


@pytest.mark.slow
def test_mlflow_has_every_step_once(finished, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient(tracking_uri=(finished.shared / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("shop")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(point.step, point.value) for point in history] == [(s, s / 100) for s in STEPS]
    ends = client.get_metric_history(run.info.run_id, "eval/sampled/reward_low")
    assert [(point.step, point.value) for point in ends] == [(0, 0.125), (12, 0.5)]
    assert run.data.params == {"seed": "7", "optimizer.name": "adamw", "optimizer.lr": "0.001"}
    assert "system/cpu_percent" in run.data.metrics
    files = client.list_artifacts(run.info.run_id, "rollouts")
    assert [file.path for file in files] == [f"rollouts/step-{s:06d}.json" for s in (1, 11)]
    table = json.loads(Path(client.download_artifacts(run.info.run_id, files[0].path)).read_text())
    assert table["columns"][:3] == ["rollout_id", "task_id", "reward"]
    assert table["data"][0][:4] == ["g0-0", "sum-1", 1.0, "completed"]


@pytest.mark.parametrize(
    ("how", "status"),
    [
        (RunEnd.finished, "FINISHED"),
        (RunEnd.failed, "FAILED"),
        (RunEnd.stalled, "FAILED"),
        (RunEnd.preempted, "KILLED"),
        (RunEnd.killed, "KILLED"),
    ],
)
def test_mlflow_shows_how_a_run_ended(how, status, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = TrackedRun(id="a", project="shop", name="run", folder=tmp_path, shared=tmp_path)
    tracker = MLflow()
    for _ in range(2):  # a resumed run is running again
        tracker.start(run, CONFIG)
        assert tracker.client.get_run(tracker.run_id).info.status == "RUNNING"
        tracker.ended(how)
        tracker.finish()
    shown = tracker.client.get_run(tracker.run_id)
    assert (shown.info.status, shown.data.tags["agenttrain.status"]) == (status, str(how))


@pytest.mark.slow
def test_wandb_shows_how_a_run_ended(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder, out = tmp_path / "run", io.StringIO()
    with pytest.raises(Preempted), tracked(folder, out, "wandb") as tracker:
        tracker.step(1, {"reward": 0.5}, [])
        raise Preempted("SIGTERM")
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    records = list(wandb_records(file))
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1]
    assert any(record.HasField("preempting") for record in records)
    updates = [item for record in records for item in record.summary.update]
    assert [item.value_json for item in updates if item.key == "status"] == ['"preempted"']


@contextmanager
def page(command: str, port: int, **environment: str) -> Iterator[str]:
    """Serve trackio's page by a shell command, on a port of its own."""
    environment = {"GRADIO_SERVER_PORT": str(port), "HF_HUB_OFFLINE": "1", **environment}
    process = subprocess.Popen(
        f"exec env {command}",
        shell=True,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urlopen(url, timeout=5).read()
                break
            except OSError:
                time.sleep(0.1)
        else:
            pytest.fail("no server")
        yield url
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.slow
def test_a_run_is_sent_to_a_server_that_is_named(tmp_path, monkeypatch):
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "secret")
    (tmp_path / "shop").mkdir()
    out, command = io.StringIO(), Trackio().describe(SimpleNamespace(shared=tmp_path, project="p"))
    with page(command.view, 7894) as url:
        config = TrackerConfig(
            console=False, trackio={"enabled": True, "server_url": url, "finish_s": 60.0}
        )
        settings = {"project": "shop", "name": "run", "console": Console(file=out, width=500)}
        folder = tmp_path / "shop" / "run"
        with Tracker(folder, config, total_steps=2, **settings) as tracker:
            for step in (1, 2):
                tracker.step(step, {"reward": step / 100}, three())
        assert tracker.views == [url], out.getvalue()
    with sqlite3.connect(tmp_path / "trackio" / "shop.db") as database:
        rows = database.execute("select step, metrics from metrics order by step, id").fetchall()
    points = [(step, json.loads(text)) for step, text in rows]
    assert [(step, m["reward"]) for step, m in points if "reward" in m] == [(1, 0.01), (2, 0.02)]


CHROMIUM = shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_run_on_trackios_page(finished, tmp_path):
    """The printed command opens a page on which the browser draws the run's charts."""
    arguments = [
        *(
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
        ),
        *("--no-first-run", f"--user-data-dir={tmp_path}", "--window-size=1400,1000"),
        *("--virtual-time-budget=15000", f"--screenshot={tmp_path}/page.png"),
    ]
    with page(finished.views[0], 7893) as url:
        done = subprocess.run(
            [*arguments, "--dump-dom", f"{url}/?project=shop"],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0
    assert "eval/sampled/reward" in done.stdout or "sampled" in done.stdout
    assert "reward" in done.stdout and ">run<" in done.stdout.replace(" ", "")


def test_the_users_trackio_folder_and_variables_that_are_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "mine & co"))
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/board")
    run = SimpleNamespace(shared=tmp_path, project="shop")
    described = Trackio().describe(run)
    assert shlex.split(described.view)[0] == f"TRACKIO_DIR={tmp_path}/mine & co"
    assert described.notes == (
        "trackio: TRACKIO_SPACE_ID is set and not used; tracker.trackio.space sends a run there",
    )
    described = Trackio(space="someone/board").describe(run)
    assert described.view == "https://huggingface.co/spaces/someone/board"
    assert described.notes == ()


def test_wandb_is_online_with_a_key_only(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    netrc = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(netrc))
    run = SimpleNamespace(folder=tmp_path, project="shop")
    assert WandB().mode == "offline"
    assert WandB().describe(run).notes == (
        "wandb: the run stays offline without an API key (wandb login, or WANDB_API_KEY)",
    )
    netrc.write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    assert WandB().mode == "online"
    assert WandB(entity="team").describe(run).view == "https://wandb.ai/team/shop"
    monkeypatch.setenv("WANDB_BASE_URL", "https://me:secret@wandb.example/")
    online = WandB(entity="team", mode="online")
    assert online.describe(run).view == "https://***@wandb.example/team/shop"
    monkeypatch.delenv("WANDB_BASE_URL")
    assert (
        WandB(mode="offline").mode == "offline" and WandB(mode="offline").describe(run).notes == ()
    )
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert WandB().mode == "disabled"


def test_mlflow_uses_the_named_store(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    run = SimpleNamespace(shared=tmp_path)
    assert MLflow().describe(run).view == "http://127.0.0.1:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:5000")
    assert MLflow().describe(run).view == "http://***@127.0.0.1:5000"
    command = "mlflow ui --backend-store-uri sqlite:////data/runs.db"
    assert MLflow(uri="sqlite:////data/runs.db").describe(run).view == command


def test_the_machines_load_is_averaged_over_samples():
    load = MachineLoad(os.getpid())
    assert load.take() == {}
    load.sample()
    load.sample()
    values = load.take()
    assert 0 <= values["system/cpu_percent"] <= 100
    assert 0.01 < values["system/run_memory_gb"] < values["system/memory_gb"] + 1
    assert load.take() == {}


def test_gpus_are_those_that_the_run_may_use(monkeypatch):
    library = SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 4,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda name: {"GPU-a": 1}[name],
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=10 * handle),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle * 10**9),
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-a")
    load = MachineLoad(os.getpid())
    load.sample()
    values = {name: value for name, value in load.take().items() if "gpu" in name}
    assert values == {
        **{"system/gpu0/percent": 30.0, "system/gpu0/memory_gb": 3.0},
        **{"system/gpu1/percent": 10.0, "system/gpu1/memory_gb": 1.0},
    }
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    load = MachineLoad(os.getpid())
    load.sample()
    assert not [name for name in load.take() if "gpu" in name]


def test_nothing_leaves_the_machine(tmp_path, monkeypatch):
    """Saved tokens and a Space in the environment must not make a tracker go online."""
    monkeypatch.setenv("HF_TOKEN", "hf_" + "x" * 34)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "someone/board")
    monkeypatch.setenv("TRACKIO_WEBHOOK_URL", "https://example.org/hook")
    monkeypatch.setenv("NETRC", "/dev/null")
    for name in ("TRACKIO_DIR", "WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent(
            f"""
            import pathlib, socket
            connect, look_up = socket.socket.connect, socket.getaddrinfo
            def is_local(address):
                return isinstance(address, str) or address[0] in ("127.0.0.1", "localhost", "::1")
            def refuse(address):
                with pathlib.Path({str(tmp_path / "went_online")!r}).open("a") as file:
                    file.write(repr(address))
                raise OSError("no network in this test")
            socket.socket.connect = lambda self, address: (
                connect(self, address) if is_local(address) else refuse(address)
            )
            socket.getaddrinfo = lambda host, *more, **named: (
                look_up(host, *more, **named) if is_local((host,)) else refuse(host)
            )
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    out = io.StringIO()
    with tracked(tmp_path / "run", out, *ALL) as tracker:
        for step in (1, 2):
            tracker.step(step, {"reward": 0.5}, three())
    cursors = [Cursor.read(cursor_path(tmp_path / "run", name)) for name in ALL]
    assert Counter(cursor.step for cursor in cursors if cursor) == {2: 4}, out.getvalue()
    assert not (tmp_path / "went_online").exists()
