"""The bundled agents learn, through the command line; minutes, so not in the default tests."""

from __future__ import annotations

import json
from statistics import mean

import pytest

from agenttrain.cli import main

pytestmark = pytest.mark.slow


def rewards(folder, *overrides):
    """Training reward by step, and the summary's evaluations."""
    arguments = [*overrides, "tracker=none", "eval.greedy=false", f"hydra.run.dir={folder}"]
    assert main(arguments) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gap = max(row["sampling/logprob_gap_max"] for row in rows)
    assert gap < 1e-4, "sampler and trainer disagree about the sampled tokens"
    return [row["reward"] for row in rows], json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_shop_agent_learns_to_chain_queries(tmp_path, algorithm):
    curve, summary = rewards(tmp_path, f"algorithm={algorithm}", "steps=30", "eval.questions=150")
    assert mean(curve[:3]) < 0.45
    assert mean(curve[-5:]) > 0.75
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    assert before["reward"] < 0.40
    assert after["reward"] > 0.75
    chained = {s["label"]: s["by_group"] for s in before["scores"]}["sampled"]
    assert chained["2"]["mean"] < 0.15


def test_the_calculator_agent_learns(tmp_path):
    curve, summary = rewards(tmp_path, "experiment=calculator", "steps=30", "eval.questions=150")
    assert mean(curve[-5:]) > mean(curve[:3]) + 0.3
    assert summary["eval"]["after"]["reward"] > 0.7
