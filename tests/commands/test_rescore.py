"""Stored rollouts by another reward: both means, by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from agenttrain.cli import main
from agenttrain.commands.rescore import Rescored, report
from agenttrain.types import Rollout, Task

pytestmark = pytest.mark.timeout(1200)  # whole runs

TASK = Task(task_id="t", messages=())
MINE = """
def by_sample(rollout, answer: str) -> float:
    assert answer
    return float(rollout.sample)

def fails(rollout) -> float:
    raise RuntimeError("broken")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """Two steps of two groups of two, whose rewards are made those of the test."""
    folder = tmp_path_factory.mktemp("rescore") / "run"
    arguments = ["debug=tiny", "tracker=none", "eval.questions=0", f"hydra.run.dir={folder}"]
    assert main(arguments) == 0
    for step, rewards in ((1, (0.0, 1.0, 0.0, 1.0)), (2, (1.0, 0.0, 1.0, 1.0))):
        file = folder / "rollouts" / f"step-{step:06d}.jsonl"
        records = [json.loads(line) for line in file.open()]
        for record, reward in zip(records, rewards, strict=True):
            record.update(rewards={"exact_match": reward}, reward=reward)
        file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture
def mine(tmp_path, monkeypatch) -> None:
    (tmp_path / "rescore_rewards.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def test_both_means_of_every_step(run, mine, tmp_path, capsys):
    arguments = ["reward=[]", "reward.mine._target_=rescore_rewards.by_sample", "to=scores.jsonl"]
    assert main(["rescore", str(run), *arguments]) == 0
    # Old 0 1 0 1 | 1 0 1 1, new 0 1 0 1 | 0 1 0 1: means 0.5 and 0.5, 0.75 and 0.5, together 0.625
    # and 0.5. Over all eight: the sum of products is 3, so the covariance is
    # 3/8 - 0.625 * 0.5 = 0.0625 over sqrt(0.625 * 0.375) * 0.5 = 0.2421, r = 0.258.
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["step", "rollouts", "reward", "now", "exact_match", "now", "mine", "now"],
        ["1", "4", "0.5000", "0.5000", "0.5000", "-", "-", "0.5000"],
        ["2", "4", "0.7500", "0.5000", "0.7500", "-", "-", "0.5000"],
        ["all", "8", "0.6250", "0.5000", "0.6250", "-", "-", "0.5000"],
    ]
    assert lines[4] == "3 of 8 rollouts have another reward; old and new: r = 0.258"
    rows = [json.loads(line) for line in (tmp_path / "scores.jsonl").open()]
    assert len(rows) == 8
    assert rows[4]["step"] == 2 and rows[4]["rollout_id"] == "train-2-0-0"
    assert rows[4]["old"] == {"rewards": {"exact_match": 1.0}, "reward": 1.0}
    assert rows[4]["new"] == {"rewards": {"mine": 0.0}, "reward": 0.0}

    assert main(["rescore", str(run), *arguments]) == 2
    assert "--to scores.jsonl: is there already" in capsys.readouterr().err


def test_the_runs_own_reward_with_another_weight(run, capsys):
    assert main(["rescore", str(run), "step=1", "reward.exact_match.weight=2.0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "rollouts", "reward", "now", "exact_match", "now"]
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "reward: by which one?"),
        (
            ["step=9", "reward=[exact_match]"],
            "--step 9: no rollouts of that step; there are 1 to 2",
        ),
        (["reward=[exact_mach]"], "did you mean 'exact_match'?"),
        (["reward=[]", "optimizer.lr=1"], "optimizer.lr=1: cannot be combined with rescore"),
        (["reward=[]", "reward.mine._target_=rescore_rewards.fails"], "RuntimeError: broken"),
    ],
)
def test_what_cannot_be_rescored_is_told(run, mine, capsys, arguments, told):
    assert main(["rescore", str(run), *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_reward_of_a_row_that_is_gone_is_refused(run, mine, tmp_path, capsys):
    copy = Path(shutil.copytree(run, tmp_path / "copy", symlinks=True))
    for file in (copy / "rollouts").glob("*.jsonl"):
        file.write_text(file.read_text().replace('"task_id": "shop/', '"task_id": "gone/'))
    reward = ["reward=[]", "reward.mine._target_=rescore_rewards.by_sample"]
    assert main(["rescore", str(copy), *reward]) == 2
    assert "reward.mine reads the column answer, and task gone/" in capsys.readouterr().err
    # One that reads no column needs no row.
    assert main(["rescore", str(copy), "reward=[stop_tool_called]"]) == 0


def rescored(old: float | None, new: float | None) -> Rescored:
    return Rescored(
        step=1,
        old=Rollout(task=TASK, rollout_id="a", reward=old, rewards={"x": old}),
        new=Rollout(task=TASK, rollout_id="a", reward=new, rewards={"x": new}),
    )


def test_rollouts_without_a_reward_count_in_no_mean():
    rows = [rescored(1.0, None), rescored(0.0, 0.5), rescored(None, 1.0)]
    _, means, alike = report(rows)
    # Old (1 + 0) / 2, new (0.5 + 1) / 2; only one rollout has both.
    assert means.split() == ["1", "3", "0.5000", "0.7500", "0.5000", "0.7500"]
    assert alike == (
        "3 of 3 rollouts have another reward; old and new: no correlation, one of them does not "
        "vary"
    )
