"""`agenttrain sft` and `agenttrain eval` of a model that processes share: one process's numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from process_runs import agenttrain, ids, metrics, rollouts
from safetensors.torch import load_file

# Whole runs; that of one process is made once.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

SFT = (
    *("sft", "experiment=shop_warmstart", "debug=tiny", "tracker=none", "steps=3"),
    *("model.init=pretrained", "sft.batch_size=5", "eval.questions=5", "checkpoint.every=3"),
    *("optimizer=sgd", "optimizer.lr=0.1"),
)
EVAL = ("eval", "debug=tiny", "tracker=none", "eval.questions=6", "eval.samples=2")
WHOLE = "every process loads all weights"
SHARDED = "distributed=fsdp2"


def run(folder: Path, *arguments: str) -> str:
    return agenttrain(*arguments, f"hydra.run.dir={folder}")


def summary(folder: Path) -> dict[str, Any]:
    """The scores in summary.json."""
    return json.loads((folder / "summary.json").read_text())["eval"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = (folder / "checkpoints" / "latest").glob("model*.safetensors")
    return {name: weight for file in files for name, weight in load_file(file).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both runs by one process."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder / "sft", *SFT)
    run(folder / "eval", *EVAL)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_sft(processes: int, alone: Path, tmp_path: Path) -> None:
    printed = run(tmp_path / "run", *SFT, SHARDED, f"distributed.processes={processes}")
    assert WHOLE not in printed  # each process read its rows
    files = sorted((tmp_path / "run/checkpoints/latest").glob("policy-*.pt"))
    assert len(files) == processes
    mine, theirs = metrics(tmp_path / "run"), metrics(alone / "sft")
    assert [one["loss"] for one in mine] == pytest.approx([one["loss"] for one in theirs], rel=1e-5)
    for when in ("before", "after"):
        scores = summary(tmp_path / "run")[when]
        assert scores == pytest.approx(summary(alone / "sft")[when], rel=1e-5)
    expected = weights(alone / "sft")
    for name, weight in weights(tmp_path / "run").items():
        assert torch.allclose(weight, expected.pop(name), rtol=1e-4, atol=1e-6), name
    assert not expected


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 4])
def test_eval(processes: int, alone: Path, tmp_path: Path) -> None:
    printed = run(tmp_path / "run", *EVAL, SHARDED, f"distributed.processes={processes}")
    assert WHOLE not in printed
    assert summary(tmp_path / "run")["after"] == summary(alone / "eval")["after"]
    mine, theirs = (
        {r["rollout_id"]: ids(r) for r in rollouts(f, 0)}
        for f in (tmp_path / "run", alone / "eval")
    )
    assert mine == theirs
