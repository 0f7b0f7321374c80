"""Runs that are stopped, held, torn or full: what is told, and what stands on disk after."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sqlite3
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from agenttrain.cli import main
from agenttrain.runs.run import Run
from agenttrain.settings.compose import Source, compose_run, hydra_session, open_keys
from agenttrain.tracking.run_folder import lock_folder, read_summary, update_summary
from agenttrain.training.checkpoint import seed_random
from agenttrain.types import ConfigError
from agenttrain.utils.exit_codes import INTERRUPTED, PREEMPTED, REFUSED, TERMINATED

SHORT = ("debug=tiny", "steps=1", "tracker=none", "eval.questions=0")
STOPS = """
import os, signal

def stop(rollout, **columns) -> float:
    os.kill(os.getpid(), signal.{name})
    return 0.0
"""


def start(folder: Path, *overrides: str, verb: str = "train", sweep: bool = False) -> int:
    """The exit code of a run whose settings nobody checked before."""
    with hydra_session(Source()):
        composed = compose_run(open_keys([*SHORT, *overrides]), Source())
    run = Run(verb=verb, config=composed.config, plain=composed.plain, folder=folder, sweep=sweep)
    return run.execute()


def with_summary(folder: Path, **entries: object) -> Path:
    folder.mkdir(parents=True)
    update_summary(folder, **entries)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    assert start(folder) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of a finished run, to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "a run", symlinks=True))


@pytest.mark.parametrize(
    ("name", "code", "status", "told"),
    [
        ("SIGINT", INTERRUPTED, "interrupted", "interrupted; to go on"),
        ("SIGTERM", PREEMPTED, "preempted", "stopped by SIGTERM before the first step; to go on"),
        ("SIGUSR1", PREEMPTED, "preempted", "stopped by SIGUSR1 before the first step; to go on"),
        ("SIGHUP", PREEMPTED, "preempted", "stopped by SIGHUP before the first step; to go on"),
    ],
)
def test_a_signal_leaves_a_run_that_goes_on(
    tmp_path, monkeypatch, capsys, request, name, code, status, told
):
    module = f"stops_by_{name}"
    (tmp_path / f"{module}.py").write_text(STOPS.format(name=name))
    monkeypatch.syspath_prepend(str(tmp_path))
    # A process inherits from a shell's background that SIGINT is ignored, from nohup SIGHUP.
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in handlers.items():
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, handler)))
    folder = tmp_path / "my run"
    assert start(folder, "reward=[]", f"+reward.stop._target_={module}.stop") == code
    assert f"{told}: agenttrain resume='{folder}'" in capsys.readouterr().err
    summary = read_summary(folder)
    assert (summary["status"], summary["verb"]) == (status, "train")
    assert 0 < summary["training_seconds"] < summary["seconds"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_evaluation_has_nothing_to_go_on_with(tmp_path, monkeypatch, capsys):
    (tmp_path / "stops_an_evaluation.py").write_text(STOPS.format(name="SIGUSR1"))
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ("eval.questions=1", "reward=[]", "+reward.stop._target_=stops_an_evaluation.stop")
    assert start(tmp_path / "eval", *overrides, verb="eval") == TERMINATED
    assert capsys.readouterr().err == "interrupted\n"
    assert read_summary(tmp_path / "eval")["status"] == "interrupted"


@pytest.mark.slow
def test_a_run_that_is_stopped_before_it_is_built_goes_on(tmp_path, monkeypatch):
    """Importing the user's module is a part of building."""
    (tmp_path / "stops_at_once.py").write_text(STOPS.format(name="SIGTERM") + "stop(None)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    overrides = ("reward=[]", "+reward.stop._target_=stops_at_once.stop")
    assert start(tmp_path / "run", *overrides) == PREEMPTED
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["provenance"]["template_certificate"] is None
    (tmp_path / "stops_at_once.py").write_text("def stop(rollout, **columns):\n    return 0.0\n")
    assert main([f"resume={tmp_path / 'run'}"]) == 0
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert len(config["provenance"]["template_certificate"]) == 64


def test_a_run_that_cannot_be_built_leaves_its_name_free(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        start(tmp_path / "run", "model.path=nowhere")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.slow
def test_seconds_add_up_over_a_run_that_goes_on(run):
    update_summary(run, seconds=1000.0, training_seconds=900.0)
    assert main([f"resume={run}", "steps=2"]) == 0
    summary = read_summary(run)
    assert summary["seconds"] > 1000 and 900 < summary["training_seconds"] < summary["seconds"]


def test_a_run_without_a_checkpoint_starts_again_and_says_so(run, capsys):
    shutil.rmtree(run / "checkpoints")
    update_summary(run, status="interrupted", latest_checkpoint=None)
    row = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(row + row.replace('"step":1,', '"step":2,'))
    assert main([f"resume={run}"]) == 0
    said = "no checkpoint yet: starting again from step 0, 2 recorded steps are cut"
    assert said in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").open()] == [1]


def test_a_run_whose_checkpoints_are_gone_is_left_alone(run, capsys):
    shutil.rmtree(run / "checkpoints")
    before = (run / "metrics.jsonl").read_bytes()
    assert main([f"resume={run}", "steps=2"]) == 1
    assert "checkpoints/step-000001: the run saved this checkpoint" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_folder_that_cannot_be_made_is_told_in_a_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert start(tmp_path / "file" / "run") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("NotADirectoryError: ") and str(tmp_path / "file") in line


def test_a_disk_that_is_full_is_told_in_a_line(tmp_path, monkeypatch, capsys):
    open_file = os.open

    def full(path, *args, **kwargs):
        descriptor = open_file(path, *args, **kwargs)
        if "config.yaml" in str(path):
            os.write(descriptor, b"seed")
            os.close(descriptor)
            raise OSError(errno.ENOSPC, "No space left on device")
        return descriptor

    monkeypatch.setattr(os, "open", full)
    assert start(tmp_path / "run") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"No space left on device (run folder {tmp_path / 'run'})")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {".lock", "heartbeat.json", "summary.json"}
    assert read_summary(tmp_path / "run")["status"] == "failed"


@pytest.mark.slow
def test_the_checkpoint_of_the_best_evaluation_is_kept(tmp_path):
    settings = ("steps=4", "eval.every=1", "eval.questions=1", "eval.greedy=false")
    settings += ("checkpoint.every=null", "checkpoint.keep=1", "checkpoint.keep_best=true")
    settings += ("reward=[]", "+reward.drawn._target_=drawing.drawn")
    assert start(tmp_path / "run", *settings) == 0
    step = read_summary(tmp_path / "run")["eval"]["best"]["step"]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert (checkpoints / "best").readlink() == Path(f"step-{step:06d}")
    assert (checkpoints / "latest").readlink() == Path("step-000004")
    kept = {path.name for path in checkpoints.glob("step-*")}
    assert kept == {f"step-{step:06d}", "step-000004"}


def test_a_torn_checkpoint_is_not_evaluated(run, tmp_path, capsys):
    weights = run / "checkpoints" / "step-000001" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    assert main(["eval", f"run={run}", f"hydra.run.dir={tmp_path / 'eval'}"]) == 1
    assert "model.safetensors: its content is not what was written" in capsys.readouterr().err


def test_supervised_learning_does_not_begin_from_a_torn_checkpoint(run, tmp_path, capsys):
    model = shutil.copytree((run / "checkpoints" / "latest").resolve(), tmp_path / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\xff")
    words = ["sft", "debug=tiny", f"model.path={model}", f"hydra.run.dir={tmp_path / 'sft'}"]
    assert main(words) == 1
    assert "model.safetensors: its content is not what was written" in capsys.readouterr().err


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path, capsys):
    folder = with_summary(tmp_path / "run", status="running")
    with lock_folder(folder):
        assert start(folder) == 1
    assert "another process works in this run folder" in capsys.readouterr().err
    assert read_summary(folder) == {"status": "running"}


@pytest.mark.parametrize(("found", "verb"), [("eval", "train"), ("train", "eval")])
def test_a_folder_of_the_other_verb_is_refused(tmp_path, found, verb):
    folder = with_summary(tmp_path / "run", verb=found)
    with pytest.raises(ConfigError, match=f"holds a run of `agenttrain {found}`"):
        start(folder, verb=verb)
    assert read_summary(folder) == {"verb": found}


@pytest.mark.slow
def test_runs_of_a_sweep_share_a_dashboard(tmp_path, capsys):
    folder = tmp_path / "shop" / "sweep" / "0"
    assert start(folder, "tracker=trackio", "eval.questions=1", sweep=True) == 0
    database = tmp_path / "shop" / "trackio" / "shop.db"
    said = capsys.readouterr().out
    assert f"TRACKIO_DIR={tmp_path}/shop/trackio" in said and "--project shop" in said
    assert main([f"resume={folder}", "steps=2"]) == 0
    with sqlite3.connect(database) as connection:
        names = connection.execute("select distinct run_name from metrics").fetchall()
    assert names == [("sweep-0",)]
    assert not (folder / "trackio").exists()


@pytest.mark.slow
def test_a_dashboard_that_failed_is_not_recommended(tmp_path, capsys):
    (tmp_path / "trackio").write_text("a file where the folder should be")
    settings = ("tracker=trackio", "tracker.trackio.finish_s=5")
    assert start(tmp_path / "run", *settings) == 0
    said = capsys.readouterr().out
    assert "tracker.trackio: FileExistsError" in said and "trackio show" not in said


def test_an_evaluation_writes_as_many_rollouts_as_it_is_told(tmp_path):
    settings = ("eval.questions=2", "tracker.rollouts=1")
    assert start(tmp_path / "eval", *settings, verb="eval") == 0
    written = (tmp_path / "eval" / "rollouts" / "step-000000.jsonl").read_text()
    assert written.count("\n") == 1
    assert read_summary(tmp_path / "eval")["verb"] == "eval"


@pytest.mark.parametrize("seed", [0, -1, 2**40])
def test_a_seed_is_numpys_too(seed):
    seed_random(seed)
    drawn = np.random.rand()
    seed_random(seed)
    assert np.random.rand() == drawn


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        (["model.lora.rank=4", "model.lora.targets=[q_prj]"], "model.lora.targets=[q_prj]"),
        (["model.lora.rank=4", "model.lora.targets=[lm_head]"], "model.lora.targets=[lm_head]"),
        (
            ["model.lora.rank=4", "model.lora.target_parameters=[experts.up]"],
            "model.lora.target_parameters=[experts.up]",
        ),
        (["reward=[tool_success]", "reward.tool_success.tool=sqll"], "reward.tool_success"),
    ],
)
def test_settings_that_do_not_fit_the_model_or_the_tools_are_refused(
    tmp_path, capsys, settings, key
):
    """What is found while the components are built ends a run as any other wrong setting does."""
    assert main([*SHORT, f"hydra.run.dir={tmp_path}/run", *settings]) == REFUSED
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"agenttrain: {key}")
    assert not (tmp_path / "run" / "config.yaml").exists()
