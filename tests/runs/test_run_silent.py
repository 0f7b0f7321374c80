"""Runs that would end well and have learnt nothing: they stop, or name what fails."""

from __future__ import annotations

import json
import re

import pytest

from agenttrain.cli import main
from agenttrain.tracking.run_folder import read_summary

pytestmark = pytest.mark.timeout(1200)  # whole runs

CODE = '''
def never(rollout) -> None:
    """Apply to nothing."""


def steps(rollout) -> float:
    return len(rollout.trajectories[0].token_ids) % 3 / 2


def sql(query: str) -> str:
    """Query the shop.

    Args:
        query: The query.
    """
    raise RuntimeError("the database is locked")
'''


@pytest.fixture
def start(tmp_path, monkeypatch):
    (tmp_path / "silent_code.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"

    def start(*overrides: str) -> int:
        settings = ["debug=tiny", "steps=1", "tracker=none", f"hydra.run.dir={run}"]
        return main([*settings, *overrides])

    start.run = run
    return start


def test_a_run_whose_rewards_never_apply_stops_at_its_first_step(start, capsys):
    reward = ["reward=[]", "reward.it._target_=silent_code.never"]
    assert start(*reward) == 1
    told = capsys.readouterr().err
    assert "note: sampled evaluation: not one of 4 rollouts has a reward; the first: " in told
    assert re.search(
        r"NoRewards: step 1: not one rollout has a reward, so that there is nothing to learn; the "
        r"first: rollout 'train-1-0-0' of task '.*' ended as .*, and every reward function "
        r"\(it\) gave None",
        told,
    )
    assert read_summary(start.run)["status"] == "failed"
    assert (start.run / "metrics.jsonl").read_text() == ""


@pytest.mark.slow
def test_an_evaluation_without_one_reward_fails(start, capsys):
    reward = ["model.path=bundled:shop", "reward=[]", "reward.it._target_=silent_code.never"]
    run = [f"hydra.run.dir={start.run}", "eval.questions=2", "eval.greedy=false", "tracker=none"]
    assert main(["eval", *run, "rollout.max_turn_tokens=32", *reward]) == 1
    assert "NoRewards: not one of 2 rollouts has a reward: rollout" in capsys.readouterr().err
    assert read_summary(start.run)["status"] == "failed"
    assert len((start.run / "rollouts" / "step-000000.jsonl").read_text().splitlines()) == 2


def test_a_tool_whose_every_call_fails_is_named_here_and_in_the_summary(start, capsys):
    tool = ["tools=[final_answer]", "tools.sql._target_=silent_code.sql"]
    reward = ["reward=[]", "reward.it._target_=silent_code.steps"]
    settings = ["guards.tool_failures.calls=2", "tracker.console=false", "stop_tools=[]"]
    assert start(*tool, *reward, *settings, "rollout.max_turns=3") == 0
    (warning,) = read_summary(start.run)["warnings"]
    assert warning in capsys.readouterr().out
    assert re.match(r"guard: (before/|after/|step ).*: (\d+) of \2 calls of the tool sql", warning)
    assert "exception: Error: RuntimeError: the database is locked" in warning
    (row,) = map(json.loads, (start.run / "metrics.jsonl").open())
    assert row["tools/sql/failures"] == row["tools/sql/calls"] > 0
