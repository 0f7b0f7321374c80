"""Rejection-sampling fine-tuning: a run writes rollouts, `agenttrain sft` learns the best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from same_run import assert_same

from agenttrain.cli import main
from agenttrain.tracking.rollouts import read_step, step_path, write_records

pytestmark = pytest.mark.timeout(1200)  # whole runs

TINY = ("debug=tiny", "tracker=none")


def records(folder: Path) -> list[dict]:
    """The recorded rollouts of all steps."""
    return [
        json.loads(line)
        for file in sorted((folder / "rollouts").glob("*.jsonl"))
        for line in file.read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight rollouts, of which some call the stop tool."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    reward = ["reward=[stop_tool_called]", "rollout.max_turn_tokens=64", "eval.questions=0"]
    command = [*TINY, *reward, "steps=1", "algorithm.group_size=4", f"hydra.run.dir={folder}"]
    assert main(command) == 0
    rewards = {record["reward"] for record in records(folder)}
    assert rewards == {0.0, 1.0}
    return folder


def chosen(recorded: Path) -> list[str]:
    """The command that learns from the rollouts of reward 1."""
    return ["sft", *TINY, "data=rollouts", f"data.path={recorded}/rollouts/*.jsonl"]


def sampled(record: dict) -> list[list[int]]:
    return [
        trajectory["token_ids"][span["start"] : span["end"]]
        for trajectory in record["trajectories"]
        for span in trajectory["spans"]
        if span["origin"] == "sampled"
    ]


@pytest.mark.slow
def test_the_best_rollouts_are_learned_in_the_ids_that_were_sampled(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two epochs of the selected rollouts, interrupted after a step and resumed."""
    best = [record for record in records(recorded) if record["reward"] == 1]
    command = [*chosen(recorded), "data.min_reward=1", f"sft.batch_size={len(best)}"]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main([*command, f"hydra.run.dir={whole}"]) == 0
    assert f"{len(best)} of 8 rollouts; left out: " in capsys.readouterr().out
    learned = records(whole)
    assert len(learned) == 2 * len(best)
    for step in (learned[: len(best)], learned[len(best) :]):
        assert sorted(map(sampled, step)) == sorted(map(sampled, best))
        assert {json.dumps(one["trajectories"][0]["messages"]) for one in step} == {
            json.dumps(one["trajectories"][0]["messages"]) for one in best
        }
    tokens = [sum(map(len, sampled(record))) for record in best]
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["sft/conversations"] for row in rows] == [len(best)] * 2
    assert (
        rows[0]["sft/tokens"]
        == sum(len(one["trajectories"][0]["token_ids"]) for one in best)
        > sum(tokens)
    )
    assert rows[1]["loss"] < rows[0]["loss"]

    assert main([*command, "steps=1", f"hydra.run.dir={resumed}"]) == 0
    assert main(["sft", f"resume={resumed}", "steps=2"]) == 0
    assert_same(resumed, whole)
    assert main(["replay", str(whole)]) == 0
    assert f"{len(best)} of {len(best)} rollouts of step 2 replay" in capsys.readouterr().out

    more = Path(shutil.copytree(recorded, tmp_path / "more")) / "rollouts"
    shutil.copy(more / "step-000001.jsonl", more / "step-000002.jsonl")
    other = [f"data.path={more}/*.jsonl", "steps=3"]
    assert main(["sft", f"resume={resumed}", *other]) == 2
    assert "data.path" in capsys.readouterr().err


def test_data_shows_the_rollouts(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = "data.where=\"rollout.stop_reason=='stop_tool'\""
    assert main(["data", *chosen(recorded)[1:], where, "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    count = sum(record["stop_reason"] == "stop_tool" for record in records(recorded))
    assert f"is true of {count} of 8 rows of data.train" in shown
    assert "rollout (object)" in shown


@pytest.fixture
def arrays(recorded: Path, tmp_path: Path) -> Path:
    """The recorded run with the lists of its rollouts in a file of arrays."""
    copy = Path(shutil.copytree(recorded, tmp_path / "arrays" / "run", symlinks=True))
    write_records(step_path(copy, 1), list(read_step(recorded, 1)), arrays_above=64)
    assert list((copy / "rollouts").glob("*.npz"))
    return copy


def test_data_shows_rollouts_with_arrays(
    recorded: Path, arrays: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = 'data.where="length(rollout.trajectories[0].token_ids) > `100`"'
    shown = []
    for run in (recorded, arrays):
        assert main(["data", *chosen(run)[1:], where, "--rows", "8"]) == 0
        shown.append(capsys.readouterr().out.replace(str(run), "run"))
    assert shown[0] == shown[1] and "token_ids" in shown[0]


def test_a_missing_file_of_arrays_is_named_at_the_start(
    arrays: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file,) = (arrays / "rollouts").glob("*.npz")
    file.write_bytes(file.read_bytes()[:-30])
    assert main([*chosen(arrays), f"hydra.run.dir={tmp_path / 'run'}"]) == 2
    printed = capsys.readouterr().err
    assert f"data.train.path={arrays}/rollouts/step-000001.jsonl, line 1: {file}: " in printed
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_arrays_are_learned_as_lines_are(recorded: Path, arrays: Path, tmp_path: Path) -> None:
    folders = tmp_path / "of lines", tmp_path / "of arrays"
    for run, folder in zip((recorded, arrays), folders, strict=True):
        assert main([*chosen(run), "steps=2", f"hydra.run.dir={folder}"]) == 0
    assert_same(*folders)


REFUSALS = {
    "data.where=rollout.": "data.where=rollout.: is no JMESPath expression (position 8, at its end",
    "data.where=reward": "data.where=reward: is true of none of the 6 rows of data.train; their",
    "data.min_reward=2": "data.train.min_reward=2.0: leaves none of 8 rollouts: 8 with a reward ",
    "data.path=no/*.jsonl": "data.train.path=no/*.jsonl: the pattern matches no file in ",
    "data=shop": "data.min_reward=1.0: is not used by these rows; add data=rollouts",
}


@pytest.mark.parametrize("override", REFUSALS)
def test_mistakes_are_named(
    override: str, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*chosen(recorded), "data.min_reward=1", f"hydra.run.dir={tmp_path / 'run'}"]
    if override == "data=shop":
        command = [word for word in command if not word.startswith(("data.path", "data=rollouts"))]
    assert main([*command, override]) == 2
    assert REFUSALS[override] in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_rollouts_are_no_tasks(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(chosen(recorded)[1:]) == 2
    assert "rollouts hold the answers and are learned by agenttrain sft" in capsys.readouterr().err
