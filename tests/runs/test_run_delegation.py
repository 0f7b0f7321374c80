"""Whole runs with sub-agents: what trains, what is recorded, how they go on and replay."""

from __future__ import annotations

from pathlib import Path

import pytest
import same_run

from agenttrain.cli import main
from agenttrain.tools.builtin.sql import Sql
from agenttrain.tracking.rollouts import read_step
from agenttrain.types import Rollout, ToolContext

HERE = __name__
RUN = [
    *("debug=tiny", "tracker=none", "optimizer.schedule=constant"),
    *("eval.questions=2", "eval.greedy=false"),
    *("tools=[final_answer]", f"+tools.sql._target_={HERE}.sql", "reward=[]"),
    *(f"+reward.answers._target_={HERE}.answers", "algorithm.group_size=4"),
]
DATABASE = Sql(connect="agenttrain.data.bundled.shop.connect")


async def sql(query: str, context: ToolContext) -> str:
    """Have a helper answer the question too, then run the query.

    Args:
        query: One SELECT statement.
    """
    helper = await context.delegate(
        context.task.messages, tools=["final_answer"], role="helper", max_turns=2
    )
    return f"{DATABASE(query, context)} {helper.stop_reason}"


def answers(rollout: Rollout) -> float:
    """Count the tokens that the helpers sampled, so that rollouts of a group differ."""
    return sum(one.sampled_length for one in rollout.trajectories[1:]) / 100


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main([*RUN, "steps=2", f"hydra.run.dir={folder}"]) == 0
    return folder


def test_sub_agents_are_recorded_and_each_token_is_trained_once(whole: Path) -> None:
    rows = same_run.metrics(whole)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        records = list(read_step(whole, row["step"]))
        trajectories = [one for record in records for one in record["trajectories"]]
        helpers = [one for one in trajectories if one["role"] == "helper"]
        assert helpers and all(one["parent"] is None for one in helpers)
        assert row["trajectories/mean"] == len(trajectories) / len(records)
        spans = [s for one in trajectories for s in one["spans"] if s["origin"] == "sampled"]
        assert all(span["advantage"] is not None for span in spans)
        assert row["train/tokens"] == sum(span["end"] - span["start"] for span in spans)
        assert row["grad_norm"] > 0


@pytest.mark.long
def test_such_a_run_goes_on_to_the_bit(whole: Path, tmp_path: Path, capsys) -> None:
    part = tmp_path / "part"
    assert main([*RUN, "steps=1", f"hydra.run.dir={part}"]) == 0
    capsys.readouterr()
    assert main([f"resume={part}", "steps=2", "trust=true"]) == 0
    same_run.assert_same(part, whole)
    assert "\nhelper" in capsys.readouterr().out  # the report at its end


def test_replay_rescore_and_view_know_sub_agents(whole: Path, tmp_path: Path, capsys) -> None:
    assert main(["replay", str(whole)]) == 0
    assert "8 of 8 rollouts of step 2 replay to identical ids" in capsys.readouterr().out
    rescored = ["rescore", str(whole), "reward=[exact_match]", "step=2"]
    assert main(rescored) == 0
    page = tmp_path / "page.html"
    assert main(["view", str(whole), "step=2", f"to={page}"]) == 0
    assert '"helper"' in page.read_text()
