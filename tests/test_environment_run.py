"""The environment of the README, for real: the command as it stands there, on the bundled model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Environments")[2]


def block(language: str) -> str:
    """The section's first block of a language."""
    found = re.search(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    assert found is not None
    return found[1]


def agenttrain(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )


def test_the_environment_of_the_readme_runs(tmp_path: Path) -> None:
    (tmp_path / "my_world.py").write_text(block("python"))
    name, *command = shlex.split(block("bash"))
    assert name == "agenttrain"
    short = ("debug=tiny", "rollout.max_turn_tokens=48", "steps=1", "tracker=none")
    run = agenttrain(*command, *short, "hydra.run.dir=run", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").open()]
    assert all(set(record["rewards"]) == {"environment"} for record in records)
    for record in records:
        answers = [
            message["content"]
            for message in record["messages"]
            if message["role"] == "tool" and message["name"] == "final_answer"
        ]
        right = "right" in answers
        assert record["reward"] == (1 / len(answers) if right else 0.0)
        over = right or len(answers) == 2
        assert (record["stop_reason"] == "environment_done") == over
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert {"tools/sql/calls", "tools/final_answer/calls", "rewards/environment/mean"} <= set(
        metrics
    )


def test_a_reward_that_would_be_dropped_is_refused_before_weights_load(tmp_path: Path) -> None:
    (tmp_path / "my_world.py").write_text(
        block("python") + "\n\ndef other(rollout):\n    return 1.0\n"
    )
    _, *command = shlex.split(block("bash"))
    run = agenttrain(
        *command, "+reward.environment._target_=my_world.other", "hydra.run.dir=run", cwd=tmp_path
    )
    assert run.returncode == 1
    assert (
        "reward.environment._target_=my_world.other: hides the `reward` of environment.quiz; give "
        "yours another name" in run.stderr
    )
