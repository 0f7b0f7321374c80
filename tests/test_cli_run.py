"""The command from the outside: processes that train, evaluate and sweep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from agenttrain.cli import main

ROOT = Path(__file__).parents[1]
SHORT = ("debug=tiny", "steps=1", "tracker=none")


def agenttrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def summary(folder: Path) -> dict[str, object]:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.long
def test_a_run_has_the_folder_that_it_was_given_and_keeps_it(tmp_path: Path) -> None:
    arguments = (*SHORT, "eval.questions=0", "hydra.run.dir=mine")
    first = agenttrain(*arguments, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert summary(tmp_path / "mine")["status"] == "finished"
    assert OmegaConf.load(tmp_path / "mine" / "config.yaml").steps == 1
    before = (tmp_path / "mine" / "summary.json").read_text()

    again = agenttrain(*arguments, cwd=tmp_path)
    assert again.returncode == 2
    assert "mine: holds a run already; resume=" in again.stderr
    assert "Traceback" not in again.stderr
    assert (tmp_path / "mine" / "summary.json").read_text() == before


@pytest.mark.long
def test_a_run_is_evaluated_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "mine"
    trained = agenttrain(*SHORT, "eval.questions=2", f"hydra.run.dir={run}", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr

    evaluated = agenttrain(
        "eval", f"run={run}", "data.test.split=test_phrasing", "hydra.run.dir=e", cwd=tmp_path
    )
    assert evaluated.returncode == 0, evaluated.stderr
    config = OmegaConf.load(tmp_path / "e" / "config.yaml")
    assert config.model.path == str((run / "checkpoints" / "step-000001").resolve())
    assert config.data.test.split == "test_phrasing"
    assert summary(tmp_path / "e")["eval"]

    resumed = agenttrain(f"resume={run}", "steps=2", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert summary(run)["steps"] == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


LORA = ("model.lora.rank=4", "optimizer=muon", "algorithm.kl.beta=0.01", "eval.questions=0")


def test_adapters_are_trained_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*SHORT, *LORA, "hydra.run.dir=mine"]) == 0
    assert main(["export", "mine", "to=served", "dtype=bfloat16"]) == 0
    assert "step-000001 -> served" in capsys.readouterr().out
    assert (tmp_path / "served" / "model.safetensors").is_file()


@pytest.mark.long
def test_adapters_are_resumed_evaluated_and_exported(tmp_path: Path) -> None:
    done = agenttrain(*SHORT, *LORA, "hydra.run.dir=mine", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = agenttrain("resume=mine", "steps=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    evaluation = ("eval", "run=mine", "eval.questions=2", "hydra.run.dir=judged")
    done = agenttrain(*evaluation, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = agenttrain("export", "mine", "to=served", "dtype=bfloat16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step-000002 -> served" in done.stdout
    assert (tmp_path / "served" / "model.safetensors").is_file()
    done = agenttrain("check", "debug=tiny", "model.path=served", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_an_export_that_cannot_be_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "manifest.json").write_text("{}")
    for arguments, problem in (
        (["nowhere", "to=out"], "neither a run with a checkpoint nor a checkpoint"),
        (["checkpoint"], "--to: where to?"),
        (["checkpoint", "to=full"], "--to full: holds something already"),
        (["checkpoint", "to=."], "--to .: is the folder that you are in"),
        (["checkpoint", "to=out", "dtype=int8"], "expected one of auto, float32"),
        (["checkpoint", "to=out", "merge=1"], "merge=1: is not an option of agenttrain export"),
        (["run=checkpoint", "to=out", "format=adapter"], "has no adapters, its weights are"),
        (["checkpoint", "to=out", "public=true"], "--public true: goes with"),
    ):
        assert main(["export", *arguments]) == 2
        assert problem in capsys.readouterr().err
    assert (tmp_path / "full" / "notes.txt").read_text() == "mine"
