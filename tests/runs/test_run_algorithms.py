"""Presets in the bundled agent: whole tiny runs, and a resumed one whose steps draw more tasks."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agenttrain.cli import main
from agenttrain.tracking.names import depends_on_clock

TINY = ["debug=tiny", "tracker=none", "eval.questions=0", "optimizer.schedule=constant"]


def run(folder: Path, *overrides: str) -> list[dict]:
    """A run in this process; the rows of metrics.jsonl without what depends on the clock."""
    assert main([*TINY, *overrides, f"hydra.run.dir={folder}"]) == 0
    return rows(folder)


def rows(folder: Path) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not depends_on_clock(k)} for row in parsed]


def cursor(folder: Path) -> int:
    return json.loads((folder / "checkpoints" / "latest" / "state.json").read_text())["cursor"]


@pytest.mark.slow
def test_a_run_that_draws_again_resumes_where_its_cursor_was(tmp_path: Path) -> None:
    dapo = ["algorithm=dapo", "algorithm.oversample=1.5", "algorithm.num_epochs=1"]
    whole = run(tmp_path / "whole", *dapo, "steps=4")
    part = run(tmp_path / "part", *dapo, "steps=2")
    assert part == whole[:2]
    assert cursor(tmp_path / "part") == sum(row["data/tasks"] for row in part)
    assert main([f"resume={tmp_path / 'part'}", "steps=4"]) == 0
    assert rows(tmp_path / "part") == whole
    # 2 tasks a step and 1.5 times as many in a round: more than 3 a step is a further round
    drawn = [row["data/tasks"] for row in whole]
    assert cursor(tmp_path / "whole") == sum(drawn)
    assert max(drawn) > 3
    first = tmp_path / "whole" / "rollouts" / "step-000001.jsonl"
    rollouts = [json.loads(line) for line in first.read_text().splitlines()]
    assert len(rollouts) == 2 * drawn[0]  # those that are not trained on stand there too
    sampled = [s for r in rollouts for s in r["trajectories"][0]["spans"] if s["turn"] == 0]
    trained = [s for s in sampled if s["origin"] == "sampled" and s["advantage"] is not None]
    assert len(trained) <= 4


RUNS = {
    "gspo": ["algorithm.minibatches=2"],
    "cispo": ["algorithm.behaviour=recomputed", "algorithm.correction.level=token"],
    "sapo": ["algorithm.entropy.adaptive.target=0.5", "algorithm.top_entropy=0.5"],
    "reinforce_pp": [
        "algorithm.kl.beta=0.01",
        "algorithm.kl.place=reward",
        "algorithm.kl.estimator=k1",
    ],
    "luspo": ["algorithm.kl.beta=0.1", "algorithm.kl.reference.sync_steps=1"],
    **{name: [] for name in ("bnpo", "dr_grpo", "gmpo", "vespo")},
}


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "overrides"), RUNS.items())
def test_presets_run(preset: str, overrides: list[str], tmp_path: Path) -> None:
    # So many that some group has unequal rewards.
    sizes = ("tasks_per_step=8", "algorithm.group_size=8")
    metrics = run(tmp_path / "run", f"algorithm={preset}", *overrides, *sizes)
    assert len(metrics) == 2
    assert not any(math.isnan(row["loss"]) for row in metrics)
    assert any(row["grad_norm"] > 0 for row in metrics)
