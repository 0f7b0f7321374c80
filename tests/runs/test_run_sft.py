"""`agenttrain sft` through the command line: what is learnt, repetition, resume, refusals."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from process_runs import agenttrain
from recurrent_families import hybrid_folder
from safetensors.torch import load_file

from agenttrain.cli import main
from agenttrain.tracking.names import depends_on_clock
from agenttrain.utils.model_path import model_folder

pytestmark = pytest.mark.timeout(1200)  # whole runs

TINY = ("sft", "experiment=shop_warmstart", "debug=tiny", "tracker=none")


def sft(folder: Path, *overrides: str) -> None:
    assert main([*TINY, *overrides, f"hydra.run.dir={folder}"]) == 0


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    # Sharded weights are in a file by each process.
    files = sorted((folder / "checkpoints" / "latest").glob("model*.safetensors"))
    return {name: weight for file in files for name, weight in load_file(file).items()}


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft") / "whole"
    sft(folder, "steps=4", "checkpoint.every=2")
    return folder


@pytest.mark.slow
def test_random_weights_begin_at_the_entropy_of_the_vocabulary(whole: Path) -> None:
    """ln 641 = 6.46 nats: the vocabulary of bundled:shop."""
    first, *_, last = metrics(whole)
    assert first["loss"] == pytest.approx(math.log(641), abs=0.1)
    assert last["loss"] < first["loss"]
    assert first["sft/conversations"] == 2
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["verb"] == "sft"
    assert summary["eval"]["after"]["loss"] < summary["eval"]["before"]["loss"]
    assert summary["eval"]["after"]["conversations"] == 4


def killed(finished: Path, tmp_path: Path) -> Path:
    """A copy as after a kill in step 4: the last checkpoint and the last row are gone."""
    folder = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    rows = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(rows[:3]))
    (folder / "checkpoints" / "step-000004").rename(tmp_path / "gone")
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {"status": "running", "latest_checkpoint": "checkpoints/step-000002"}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_an_interrupted_and_resumed_run_equals_an_uninterrupted_one(
    whole: Path, tmp_path: Path
) -> None:
    folder = killed(whole, tmp_path)
    assert main(["sft", f"resume={folder}"]) == 0
    assert metrics(folder) == metrics(whole)
    resumed, expected = weights(folder), weights(whole)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_a_finished_run_says_so_and_how_to_go_on(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", f"resume={whole}"]) == 0
    assert f"agenttrain sft resume={whole} steps=8" in capsys.readouterr().out
    assert "holds a run of `agenttrain sft`" in refusal(capsys, f"resume={whole}", "steps=8")


@pytest.fixture
def hybrid(tmp_path: Path) -> Path:
    return hybrid_folder(tmp_path / "hybrid")


@pytest.mark.slow
def test_a_model_with_recurrent_layers_is_trained_packed_and_resumed_to_the_bit(
    hybrid: Path, tmp_path: Path
) -> None:
    """A warning would say that it is trained one rollout at a time; here warnings are errors."""
    model = (f"model.path={hybrid}", "model.init=pretrained", "training.share_prefix=always")
    folder = tmp_path / "trained"
    sft(folder, *model, "steps=4", "checkpoint.every=2", "eval.questions=2")
    assert metrics(folder)[-1]["loss"] < metrics(folder)[0]["loss"]
    resumed = killed(folder, tmp_path)
    assert main(["sft", f"resume={resumed}"]) == 0
    assert metrics(resumed) == metrics(folder)
    expected = weights(folder)
    assert any("linear_attn.A_log" in name for name in expected)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights(resumed).items())


@pytest.mark.long
def test_the_warm_started_model_acts_and_its_rollouts_pass_the_ledger(
    whole: Path, tmp_path: Path
) -> None:
    """Every rollout of a run is verified; a break would stop it."""
    model = f"model.path={whole / 'checkpoints' / 'latest'}"
    folder = tmp_path / "rl"
    assert main(["debug=tiny", model, "tracker=none", f"hydra.run.dir={folder}"]) == 0
    assert len(metrics(folder)) == 2


@pytest.mark.slow
def test_eval_of_the_run_wants_tasks_and_loads_what_was_learnt(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"run={whole}"
    assert "its data are demonstrations" in refusal(capsys, "eval", run)
    folder = f"hydra.run.dir={tmp_path / 'eval'}"
    assert main(["eval", run, "data=shop", "eval.questions=2", folder]) == 0
    config = (tmp_path / "eval" / "config.yaml").read_text()
    assert "init: pretrained" in config


PROCESSES = "distributed.processes=2"
DEALT = (
    *("sft.batch_size=3", "eval.questions=3", "checkpoint.every=2"),
    *("optimizer=sgd", "optimizer.lr=1.0"),
)
"""Three rows a step: the first process has two, the second one."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dealt") / "alone"
    sft(folder, *DEALT, "steps=4")
    return folder


def same_but_for_rounding(folder: Path, other: Path) -> None:
    """The same rows, losses and held-out losses; weights that plain gradients made."""
    assert len(metrics(folder)) == len(metrics(other)) == 4
    for mine, theirs in zip(metrics(folder), metrics(other), strict=True):
        names = {name for name in theirs if not name.startswith(("training/", "tokens_per"))}
        assert names <= mine.keys()
        assert {n: mine[n] for n in names} == pytest.approx(
            {n: theirs[n] for n in names}, rel=1e-4, nan_ok=True
        )
    for step in range(1, 5):
        files = [run / f"rollouts/step-{step:06d}.jsonl" for run in (folder, other)]
        mine, theirs = ([json.loads(line) for line in f.read_text().splitlines()] for f in files)
        assert [one["rollout_id"] for one in mine] == [one["rollout_id"] for one in theirs]
    mine, theirs = (json.loads((f / "summary.json").read_text())["eval"] for f in (folder, other))
    for when in ("before", "after"):
        assert mine[when] == pytest.approx(theirs[when], rel=1e-4)
    trained, expected = weights(folder), weights(other)
    for name, tensor in expected.items():
        assert torch.allclose(trained[name], tensor, rtol=1e-4, atol=1e-5), name


@pytest.mark.long
@pytest.mark.parametrize(
    "mode", ["ddp", pytest.param("fsdp2", marks=pytest.mark.long)], ids=["ddp", "fsdp2"]
)
def test_two_processes_learn_what_one_learns(mode: str, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    dealt = (*TINY, *DEALT, f"distributed={mode}", PROCESSES, f"hydra.run.dir={folder}")
    agenttrain(*dealt, "steps=4")
    same_but_for_rounding(folder, alone)


@pytest.mark.long
def test_a_run_of_one_process_goes_on_with_two(alone: Path, tmp_path: Path) -> None:
    folder = killed(alone, tmp_path)
    agenttrain("sft", f"resume={folder}", "distributed=ddp", PROCESSES)
    same_but_for_rounding(folder, alone)


@pytest.mark.long
def test_a_bad_row_of_one_process_ends_both(tmp_path: Path) -> None:
    # The first three rows are tried before the run begins; the sixth is the second process's.
    rows_file(tmp_path, *[ROW] * 5, ROW[:2] + ROW[3:])
    with pytest.raises(AssertionError, match=r"task 5: turn 0: 1 calls have 0 replies"):
        agenttrain(*own(tmp_path, "distributed=ddp", PROCESSES, "sft.batch_size=4"))
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "failed"


ROW = [
    {"role": "user", "content": "3 + 4?"},
    {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3, "b": 4}}}],
    },
    {"role": "tool", "content": "7"},
    {"role": "assistant", "content": "7"},
]


def rows_file(folder: Path, *conversations: list) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": rows}) + "\n" for rows in conversations))
    return str(file)


def own(folder: Path, *overrides: str) -> list[str]:
    return [
        *("sft", "experiment=none", "debug=tiny", "model=calculator", "tracker=none"),
        *("tools=[add]", "data=file", "eval.questions=0", "sft.batch_size=3", "data.shuffle=false"),
        *(f"data.path={folder / 'rows.jsonl'}", f"hydra.run.dir={folder / 'run'}", *overrides),
    ]


@pytest.mark.slow
def test_a_users_own_rows_are_learnt_in_their_order(tmp_path: Path) -> None:
    rows_file(tmp_path, ROW, ROW[:1] + ROW[3:])
    assert main(own(tmp_path, "optimizer.lr=1e-3")) == 0
    first, _ = metrics(tmp_path / "run")
    lines = [
        json.loads(line)
        for step in (1, 2)
        for line in (tmp_path / f"run/rollouts/step-00000{step}.jsonl").read_text().splitlines()
    ]
    # 3 + 3 conversations of 2 rows: 0 1 0, 1 0 1
    assert [line["task_id"] for line in lines] == ["0", "1", "0", "1", "0", "1"]
    learnt, short = (
        sum(s["end"] - s["start"] for s in trajectory["spans"] if s["origin"] == "sampled")
        for line in lines[:2]
        for trajectory in line["trajectories"]
    )
    assert first["train/tokens"] == 2 * learnt + short


def test_bad_and_long_rows_are_told_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows_file(tmp_path, ROW, ROW[:2] + ROW[3:], [*ROW[:3], {**ROW[3], "content": "7 " * 300}])
    assert main(own(tmp_path)) == 1
    told = capsys.readouterr().err
    assert "data.train: task 1: turn 0: 1 calls have 0 replies" in told
    assert "data.on_bad_row=skip" in told
    assert main(own(tmp_path, "data.on_bad_row=skip", "sft.max_tokens=200")) == 0
    first = metrics(tmp_path / "run")[0]
    assert [first[f"data/{n}"] for n in ("bad_rows", "overlong")] == [1, 1]
    assert first["sft/conversations"] == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("sft", "algorithm=rloo"), "algorithm=rloo: has no effect in agenttrain sft"),
        (("sft", "rollout.max_turns=3"), "rollout.max_turns=3: has no effect in agenttrain sft"),
        (("sft", "eval.samples=4"), "eval.samples=4: has no effect in agenttrain sft"),
        (("sft", "sft.batch_size=0"), "sft.batch_size=0: must be at least 1"),
        (("sft.batch_size=4",), "sft.batch_size=4: has no effect in agenttrain train"),
        (("experiment=shop_warmstart",), "model.init=random: such a model cannot act yet"),
    ],
)
def test_what_a_verb_does_not_read_is_refused(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert problem in refusal(capsys, *arguments)


@pytest.mark.long
def test_bundled_models_know_their_demonstrations(tmp_path: Path) -> None:
    """The shipped weights were made from these rows: their held-out loss is what training ended
    at (recipe.json: 0.051 over the last steps)."""
    folder = tmp_path / "run"
    path = f"model.path={model_folder('bundled:shop')}"
    sft(folder, path, "model.init=pretrained", "steps=1", "eval.questions=40")
    before = json.loads((folder / "summary.json").read_text())["eval"]["before"]
    assert 0.03 < before["loss"] < 0.09


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_short_warm_start_leaves_something_to_learn_and_reinforcement_learns_it(
    tmp_path: Path,
) -> None:
    """A third of the demonstrations, in the same proportions; then twelve steps of GRPO.

    The default's rate is that of the packaged model, and too high for one that knows less.
    """
    warm, then = tmp_path / "warm", tmp_path / "rl"
    arguments = ["sft", "experiment=shop_warmstart", "steps=180", "data.train.early=3840"]
    assert main([*arguments, "tracker=none", f"hydra.run.dir={warm}"]) == 0
    after = json.loads((warm / "summary.json").read_text())["eval"]["after"]
    assert after["loss"] < 0.2
    model = f"model.path={warm / 'checkpoints' / 'latest'}"
    mix = "data.train.curriculum=[[0,[0.5,0.3,0.2]]]"
    slower = ["steps=12", "optimizer.lr=8e-4", "optimizer.warmup_steps=5", mix]
    arguments = [model, *slower, "eval.questions=0", "tracker=none"]
    assert main([*arguments, f"hydra.run.dir={then}"]) == 0
    rewards = [row["reward"] for row in metrics(then)]
    assert 0.1 < sum(rewards[:3]) / 3 < 0.4
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
