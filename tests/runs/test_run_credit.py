"""Whole runs with credit per turn and with compaction: recorded, resumed, in two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import same_run
import worlds
from process_runs import agenttrain, same

from agenttrain.cli import main
from agenttrain.tracking.rollouts import read_step

TINY = [
    *("debug=tiny", "tracker=none", "eval.questions=0", "optimizer.schedule=constant"),
    # at each step some group has rewards that differ
    *("tasks_per_step=3", "algorithm.group_size=4", "rollout.max_turns=5", "seed=3"),
]
TURNS = [
    *("tools=[final_answer]", "+environment.shop._target_=worlds.Shop"),
    "reward=[exact_match,turn_rewards]",
]
SUMMARY = ["rollout.compaction=summary", "rollout.compact_at=70", "rollout.summary_tokens=24"]
DROP = ["rollout.compaction=drop_tool_results", "rollout.compact_at=140", "rollout.keep_turns=0"]
RUNS = {
    "turn_reward": [*TURNS, "algorithm/credit=turn_reward", "algorithm.credit.gamma=0.9"],
    "turn_baseline": [*TURNS, "algorithm/credit=turn_baseline", "algorithm.credit.gamma=0.9"],
    "gigpo": [*TURNS, "algorithm=gigpo"],
    "summary": SUMMARY,
    "drop": [*TURNS, *DROP],
    "gigpo and summary": [*TURNS, "algorithm=gigpo", *SUMMARY, "rollout.compact_at=120"],
}
IN_CI = ("gigpo and summary",)


def test_a_run_that_credits_turns_and_compacts(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "run"
    run = [*TINY, *RUNS["gigpo and summary"], "steps=1"]
    assert main([*run, f"hydra.run.dir={folder}"]) == 0
    (row,) = same_run.metrics(folder)
    assert row["trajectories/mean"] > 1
    assert row["credit/step_groups"] > 0
    assert row["grad_norm"] > 0
    records = list(read_step(folder, 1))
    trajectories = [one for record in records for one in record["trajectories"]]
    spans = [s for one in trajectories for s in one["spans"] if s["origin"] == "sampled"]
    assert row["train/tokens"] == sum(span["end"] - span["start"] for span in spans)
    assert {one["role"] for one in trajectories} == {"main", "summary"}
    by_turn = [{s["advantage"] for s in one["spans"]} - {None} for one in trajectories]
    assert max(map(len, by_turn)) > 1  # the turns of a trajectory differ
    assert main(["replay", str(folder)]) == 0
    assert "12 of 12 rollouts" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in RUNS]
)
def test_such_runs_go_on_to_the_bit_and_replay(name: str, tmp_path: Path) -> None:
    run = [*TINY, *RUNS[name]]
    assert main([*run, "steps=3", f"hydra.run.dir={tmp_path / 'whole'}"]) == 0
    assert main([*run, "steps=1", f"hydra.run.dir={tmp_path / 'part'}"]) == 0
    assert main([f"resume={tmp_path / 'part'}", "steps=3", "trust=true"]) == 0
    same_run.assert_same(tmp_path / "part", tmp_path / "whole")
    rows = same_run.metrics(tmp_path / "whole")
    compacts = any("rollout.compaction" in one for one in run)
    assert (max(row["trajectories/mean"] for row in rows) > 1) == compacts
    assert max(row["grad_norm"] for row in rows) > 0
    assert main(["replay", str(tmp_path / "whole"), "step=3"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("name", ["turn_reward", "gigpo and summary", "drop"])
def test_two_processes_make_the_run_of_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(worlds.__file__).parent), prepend=":")
    run = [*TINY, *RUNS[name], "steps=2"]
    agenttrain(*run, f"hydra.run.dir={tmp_path / 'one'}")
    two = ("distributed=ddp", "distributed.processes=2", f"hydra.run.dir={tmp_path / 'two'}")
    agenttrain(*run, *two)
    same(tmp_path / "two", tmp_path / "one", 2)
