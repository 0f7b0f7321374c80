"""The level of activation checkpointing that a run chooses, records and keeps."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest
import yaml

from agenttrain import cli
from agenttrain.runs.run import Run
from agenttrain.settings.compose import Source, compose_run, hydra_session

KEY = "training.activation_checkpointing"
RUN = ("debug=tiny", "tracker=none", "eval.questions=0", "steps=1")


def level_in(folder: Path) -> str:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    return config["training"]["activation_checkpointing"]


def update_gb(capsys: pytest.CaptureFixture[str], level: str) -> float:
    """GiB of an update by the plan, on a machine without a GPU."""
    capsys.readouterr()
    cli.main(["plan", "--json", "--cpu", *RUN, f"{KEY}={level}"])
    plan = json.loads(capsys.readouterr().out)
    return plan["moments"]["update"]["host_node"] / 2**30


@pytest.mark.slow
def test_a_run_records_what_it_chose_and_a_resumed_one_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = psutil.virtual_memory
    memory = 0.0

    def reported() -> object:
        return real()._replace(total=int(memory * 2**30))

    memory = (update_gb(capsys, "none") + update_gb(capsys, "blocks")) / 2
    monkeypatch.chdir(tmp_path)
    auto = [*RUN, "resume=auto", "hydra.run.dir=run"]
    monkeypatch.setattr(psutil, "virtual_memory", reported)
    assert cli.main(auto) == 0
    assert level_in(tmp_path / "run") == "blocks"
    assert f"{KEY}=blocks" in capsys.readouterr().out
    # On a larger machine.
    memory = 64
    assert cli.main(["resume=run", "steps=2"]) == 0
    assert level_in(tmp_path / "run") == "blocks"
    assert cli.main([*auto, "steps=3"]) == 0
    assert level_in(tmp_path / "run") == "blocks"
    # On a smaller one too.
    memory = 0.01
    assert cli.main(["resume=run", "steps=4"]) == 0
    assert level_in(tmp_path / "run") == "blocks"
    assert cli.main([*RUN, "hydra.run.dir=given", f"{KEY}=none"]) == 0
    assert level_in(tmp_path / "given") == "none"


@pytest.mark.slow
def test_a_run_of_the_bundled_model_keeps_all_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, words in {"train": (), "sft": ("sft", "experiment=shop_warmstart")}.items():
        assert cli.main([*words, *RUN, f"hydra.run.dir={name}"]) == 0
        assert level_in(tmp_path / name) == "none"


def test_a_machine_that_does_not_say_its_memory_keeps_all_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with hydra_session(Source()):
        composed = compose_run([], Source())
    run = Run(verb="train", config=composed.config, plain=composed.plain, folder=tmp_path)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))  # without meminfo
    assert run.choose_level()
    assert run.plain["training"]["activation_checkpointing"] == "none"
    assert "memory" in capsys.readouterr().out
