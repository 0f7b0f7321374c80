"""The recorded rollouts of an outside agent: scored again, shown, and its policy evaluated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agenttrain.cli import main

pytestmark = pytest.mark.timeout(1200)  # whole runs

SHORT = ("debug=tiny", "tracker=none", "tools=[]", "stop_tools=[]")
AGENT = ("agent=endpoint", "agent._target_=shop_agents.with_httpx")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step of two groups of two."""
    folder = tmp_path_factory.mktemp("outside") / "run"
    words = [*SHORT, *AGENT, "steps=1", "eval.questions=0", "rollout.max_turns=6"]
    assert main([*words, f"hydra.run.dir={folder}"]) == 0
    return folder


def records(folder: Path, name: str) -> list[dict]:
    lines = (folder / "rollouts" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_another_reward_sees_the_calls_of_the_agent(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outside_rewards.py").write_text(
        "def calls(rollout): return float(len(rollout.tool_results))"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    scores = tmp_path / "scores.jsonl"
    reward = "reward.mine._target_=outside_rewards.calls"  # beside the recorded one
    assert main(["rescore", str(run), reward, f"to={scores}"]) == 0
    lines = [json.loads(line) for line in scores.read_text().splitlines()]
    rollouts = records(run, "step-000001.jsonl")
    assert [line["rollout_id"] for line in lines] == [one["rollout_id"] for one in rollouts]
    for line, rollout in zip(lines, rollouts, strict=True):
        exact = line["old"]["rewards"]["exact_match"]
        assert line["new"]["rewards"] == {"exact_match": exact, "mine": len(rollout["tool_calls"])}
    assert max(line["new"]["reward"] for line in lines) >= 2


def test_the_page_shows_calls_and_replies_of_the_agent(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert main(["view", str(run), "step=1", f"to={page}"]) == 0
    text = page.read_text()
    rollouts = records(run, "step-000001.jsonl")
    assert all(rollout["rollout_id"] in text for rollout in rollouts)
    calls = [call["name"] for rollout in rollouts for call in rollout["tool_calls"]]
    assert "sql" in calls and "final_answer" in calls


@pytest.mark.slow
def test_an_evaluation_starts_the_agent_again(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "eval"
    words = [f"run={run}", "eval.questions=2", "tracker=none", f"hydra.run.dir={folder}"]
    assert main(["eval", *words]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["eval"]["after"]["questions"] == 2
    evaluated = records(folder, "step-000000.jsonl")
    assert {rollout["task_id"] for rollout in evaluated} == {"shop/test/0/0", "shop/test/0/1"}
    assert all(rollout["stop_reason"] == "completed" for rollout in evaluated)
