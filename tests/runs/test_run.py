"""Whole runs through the command line: repetition, kill and resume, what stands on disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from recurrent_families import hybrid_folder
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agenttrain.cli import main
from agenttrain.tracking.names import depends_on_clock
from agenttrain.utils.model_path import model_folder

AGENTTRAIN = [sys.executable, "-m", "agenttrain.cli"]
MY_AGENT = '''
CAPITALS = {"France": "Paris", "Peru": "Lima"}


def lookup(country: str) -> str:
    """Look up the capital of a country.

    Args:
        country: Its English name.
    """
    return CAPITALS[country]


def found(rollout, answer, **columns) -> float:
    return float(answer in rollout.trajectories[0].messages[-1]["content"])
'''
ODD = """
def odd(rollout, **columns) -> float:
    ids = rollout.trajectories[0].token_ids
    return sum(token % 2 for token in ids) / len(ids)
"""
TINY = [
    "debug=tiny",
    "steps=6",
    "checkpoint.every=2",
    "tracker=none",
    "eval.questions=2",
    "optimizer.schedule=constant",  # a decay depends on the number of steps
]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def agenttrain(*arguments: str) -> str:
    """Run a command to its end; returns what was printed."""
    done = subprocess.run(
        [*AGENTTRAIN, *arguments],
        capture_output=True,
        text=True,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def run(folder: Path, *overrides: str) -> str:
    """A new run in `folder`."""
    return agenttrain(*overrides, f"hydra.run.dir={folder}")


def here(folder: Path, *overrides: str) -> None:
    """The same in this process, where nothing has to be imported again."""
    assert main([*overrides, f"hydra.run.dir={folder}"]) == 0


def metrics(folder: Path) -> list[dict]:
    """The rows of metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in rows]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / "latest" / "model.safetensors")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "shop" / "whole"
    here(folder, *TINY)
    return folder


@pytest.mark.slow
def test_one_seed_gives_one_run(uninterrupted, tmp_path):
    here(tmp_path / "again", *TINY)
    assert metrics(tmp_path / "again") == metrics(uninterrupted)
    other = tmp_path / "other"
    here(other, *TINY, "seed=1", "steps=2")
    assert metrics(other) != metrics(uninterrupted)[:2]


def kill_after(folder: Path, steps: int) -> None:
    """Start the run and SIGKILL it as soon as `steps` steps are on disk."""
    command = [*AGENTTRAIN, *TINY, f"hydra.run.dir={folder}"]
    process = subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    rows = folder / "metrics.jsonl"
    while process.poll() is None and not (rows.exists() and rows.read_text().count("\n") >= steps):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"


@pytest.mark.parametrize("steps", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_killed_and_resumed_run_equals_an_uninterrupted_one(uninterrupted, tmp_path, steps):
    folder = tmp_path / "killed"
    kill_after(folder, steps)
    assert len(metrics(folder)) < 6
    assert main([f"resume={folder}"]) == 0
    assert metrics(folder) == metrics(uninterrupted)
    resumed, whole = weights(folder), weights(uninterrupted)
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


@pytest.mark.slow
def test_a_run_with_recurrent_layers_repeats_and_resumes_to_the_bit(tmp_path, monkeypatch):
    """Sampled with their states by the engine, and scored packed by the trainer."""
    start = hybrid_folder(tmp_path / "hybrid")
    monkeypatch.chdir(tmp_path)
    Path("odd.py").write_text(ODD)  # a random model earns nothing in the shop
    words = [*TINY, "experiment=shop", f"model.path={start}", "training.share_prefix=always"]
    words += ["checkpoint.every=1", "reward=[]", "reward.odd._target_=odd.odd"]
    here(tmp_path / "whole", *words, "steps=2")
    here(tmp_path / "resumed", *words, "steps=1")
    assert main([f"resume={tmp_path / 'resumed'}", "steps=2"]) == 0
    assert metrics(tmp_path / "resumed") == metrics(tmp_path / "whole")
    resumed, whole = weights(tmp_path / "resumed"), weights(tmp_path / "whole")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    before = load_file(start / "model.safetensors")
    assert all((before[name] != whole[name]).any() for name in whole if "linear_attn" in name)
    for row in metrics(tmp_path / "whole"):
        assert row["sampling/logprob_gap"] < 1e-5


def test_resuming_a_finished_run_says_so_and_changes_nothing(uninterrupted, capsys):
    before = (uninterrupted / "metrics.jsonl").read_bytes()
    assert main([f"resume={uninterrupted}"]) == 0
    assert "finished" in capsys.readouterr().out
    assert (uninterrupted / "metrics.jsonl").read_bytes() == before


@pytest.mark.long
def test_more_steps_continue_a_finished_run(uninterrupted, tmp_path):
    short = tmp_path / "short"
    run(short, *TINY, "steps=4")
    agenttrain(f"resume={short}", "steps=6")
    assert metrics(short) == metrics(uninterrupted)


def test_the_run_folder(uninterrupted):
    config = yaml.safe_load((uninterrupted / "config.yaml").read_text())
    assert config["algorithm"]["name"] == "grpo"
    assert config["provenance"]["versions"]["torch"] == torch.__version__
    assert len(config["provenance"]["template_certificate"]) == 64
    assert config["provenance"]["training_kernel"] == "flash"
    summary = json.loads((uninterrupted / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", 6)
    assert set(summary["eval"]) == {"before", "after", "best"}
    assert summary["eval"]["after"]["questions"] == 2
    assert (uninterrupted / summary["latest_checkpoint"]).is_dir()
    assert sorted(path.name for path in (uninterrupted / "rollouts").iterdir()) == [
        f"step-00000{step}.jsonl" for step in range(1, 7)
    ]
    assert len(list((uninterrupted / "checkpoints").glob("step-*"))) == 2


def test_a_rollout_on_disk_is_aligned(uninterrupted):
    line = (uninterrupted / "rollouts" / "step-000001.jsonl").read_text().splitlines()[0]
    (trajectory,) = json.loads(line)["trajectories"]
    ends = [span["end"] for span in trajectory["spans"]]
    assert [span["start"] for span in trajectory["spans"]] == [0, *ends[:-1]]
    assert ends[-1] == len(trajectory["token_ids"]) == len(trajectory["logprobs"])
    assert {span["policy_version"] for span in trajectory["spans"]} == {None, 0}


def test_view_writes_a_page_of_a_steps_rollouts(uninterrupted, capsys):
    assert main(["view", str(uninterrupted), "step=2"]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == uninterrupted / "rollouts" / "step-000002.html"
    assert "shop/train/0/" in page.read_text()
    page = uninterrupted.parent / "page.html"
    assert main(["view", str(uninterrupted), "step=2", f"to={page}"]) == 0
    assert "<html" in page.read_text()
    assert main(["view", str(uninterrupted), "step=2", f"to={page}"]) == 2
    assert f"--to {page}: is there already" in capsys.readouterr().err
    assert main(["view", str(uninterrupted), "step=99"]) == 2
    assert "there are 1 to 6" in capsys.readouterr().err


def test_a_checkpoint_loads_in_plain_transformers(uninterrupted):
    path = uninterrupted / "checkpoints" / "latest"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    assert tokenizer.chat_template
    assert model.num_parameters() < 2_000_000
    answer = tokenizer.encode("So: 7.<|im_end|>", add_special_tokens=False)
    assert tokenizer.parse_response(answer, prefix="")["content"] == "So: 7."


@pytest.mark.parametrize(
    ("experiment", "algorithm"),
    [
        ("calculator", "grpo"),
        pytest.param("shop", "rloo", marks=pytest.mark.slow),
        pytest.param("calculator", "rloo", marks=pytest.mark.slow),
        pytest.param("shop", "grpo", marks=pytest.mark.slow),
    ],
)
def test_every_experiment_runs_with_every_algorithm(tmp_path, capsys, experiment, algorithm):
    folder = tmp_path / experiment / algorithm
    here(folder, "debug=tiny", f"experiment={experiment}", f"algorithm={algorithm}")
    assert len(metrics(folder)) == 2
    assert "trackio show" in capsys.readouterr().out


def test_eval_of_a_checkpoint(uninterrupted, tmp_path):
    folder = tmp_path / "eval"
    checkpoint = uninterrupted / "checkpoints" / "latest"
    here(folder, "eval", f"model.path={checkpoint}", "eval.questions=3", "eval.samples=2")
    after = json.loads((folder / "summary.json").read_text())["eval"]["after"]
    assert {"reward", "pass@1", "pass@2", "reward_greedy"} <= set(after)
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
def test_evaluation_changes_nothing_of_training(tmp_path):
    """Also when it is larger than a training batch: 2 x 2 rollouts against 20."""
    tiny = ["debug=tiny", "steps=3", "tracker=none", "eval.questions=10", "eval.samples=2"]
    here(tmp_path / "without", *tiny, "eval.questions=0")
    here(tmp_path / "with", *tiny, "eval.every=1", "engine.max_rows=8")
    assert metrics(tmp_path / "with") == metrics(tmp_path / "without")


def test_a_users_own_tool_reward_and_rows(tmp_path, monkeypatch):
    """A tool, a reward and rows as in the README, on the bundled model."""
    (tmp_path / "my_agent.py").write_text(MY_AGENT)
    row = json.dumps({"prompt": "What is the capital of Peru?", "answer": "Lima"})
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    monkeypatch.chdir(tmp_path)
    here(
        tmp_path / "mine",
        "experiment=none",
        "debug=tiny",
        "model=folder",
        f"model.path={model_folder('bundled:shop')}",
        "data=file",
        "data.train.path=rows.jsonl",
        "data.test.path=rows.jsonl",
        "tools=[]",
        "tools.lookup._target_=my_agent.lookup",
        "reward=[]",
        "reward.found._target_=my_agent.found",
        "tracker=none",
    )
    assert "rewards/found/mean" in metrics(tmp_path / "mine")[0]
    assert "tools/lookup/calls" in metrics(tmp_path / "mine")[0]
