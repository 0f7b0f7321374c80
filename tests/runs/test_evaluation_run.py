"""Evaluation in the loop, for real: training goes on as if there were none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agenttrain.cli import main
from agenttrain.tracking.names import depends_on_clock

pytestmark = pytest.mark.timeout(1200)  # whole runs

CODE = """
import random

import numpy as np
import torch

def noise(rollout) -> float:
    # Draws from every generator that a user's code may draw from.
    return random.random() + float(np.random.rand()) + float(torch.rand(()))

def lucky(rollout) -> float:
    versions = {span.policy_version for span in rollout.trajectories[0].spans} - {None}
    return float("eval" in rollout.rollout_id and versions == {2})
"""
SETTINGS = ("debug=tiny", "tracker=none", "reward=[]", "steps=3")
IN_LOOP = ("eval.every=1", "eval.questions=2", "eval.samples=2", "eval.greedy=false")


@pytest.fixture
def rewards(tmp_path, monkeypatch) -> None:
    (tmp_path / "evaluation_rewards.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))


def rows(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the clock."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in found]


def test_evaluation_changes_nothing_of_training(tmp_path, rewards):
    reward = "reward.r._target_=evaluation_rewards.noise"
    without, within = tmp_path / "without", tmp_path / "within"
    for run, settings in ((without, ("eval.questions=0",)), (within, IN_LOOP)):
        assert main([*SETTINGS, reward, *settings, f"hydra.run.dir={run}"]) == 0
    assert rows(within) == rows(without)
    last = Path("checkpoints") / "step-000003"
    weights = [(run / last / "model.safetensors").read_bytes() for run in (without, within)]
    assert weights[0] == weights[1]
    first = (without / "checkpoints" / "step-000002" / "model.safetensors").read_bytes()
    assert first != weights[0]  # the rewards of each step differ, so that it learns something
    evaluation = json.loads((within / "summary.json").read_text())["eval"]
    assert evaluation["best"]["step"] in (1, 2, 3) and evaluation["best"]["n"] == 2
    assert evaluation["best"]["reward"] >= evaluation["after"]["reward"]
    assert json.loads((without / "summary.json").read_text())["eval"]["best"] is None


@pytest.mark.slow
def test_the_best_evaluation_is_told_and_kept_over_a_resume(tmp_path, rewards, capsys):
    """Only what the policy of version 2 samples gets a reward."""
    run = tmp_path / "run"
    reward = "reward.r._target_=evaluation_rewards.lucky"
    assert main([*SETTINGS, reward, *IN_LOOP, f"hydra.run.dir={run}"]) == 0
    told = capsys.readouterr().out
    assert "step-2/sampled: reward 1 [0.342, 1]" in told
    assert "best       reward 1.00 after step 2" in told
    # Wilson's lower end for 2 of 2: 2 / (2 + 1.96^2) = 2 / 5.8415
    best = {"step": 2, "reward": 1.0, "low": pytest.approx(0.34238, abs=1e-5), "high": 1.0, "n": 2}
    assert json.loads((run / "summary.json").read_text())["eval"]["best"] == best
    assert main([f"resume={run}", "steps=4"]) == 0
    assert json.loads((run / "summary.json").read_text())["eval"]["best"] == best
