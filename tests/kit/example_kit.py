"""Training the examples, for their tests."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from code_blocks import ROOT, blocks

from agenttrain import cli

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
SMALL = ("debug=tiny", "steps=2", "tasks_per_step=1", "eval.questions=0", "tracker=none")


def train(folder: Path, *overrides: str) -> list[dict]:
    """Train for two steps; return the rollouts of the first."""
    words = ["--config-dir", "conf", f"experiment={folder.name}", *SMALL, *overrides]
    assert cli.main([*words, "hydra.run.dir=run"]) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 2
    lines = (folder / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def commands(name: str) -> list[list[str]]:
    """The words of the commands in an example's README."""
    fences = [b for b in blocks(EXAMPLES / name / "README.md") if b.language == "bash"]
    return [shlex.split(command) for block in fences for command in block.commands()]


def call_of_readme(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the README's `agenttrain tools … --call` prints."""
    (words,) = (words[1:] for words in commands(name) if words[:2] == ["agenttrain", "tools"])
    assert cli.main(words) == 0
    return capsys.readouterr().out


def train_shop(folder: Path) -> None:
    """Train a shop agent; its rollouts are conversations that end with the answer it prints."""
    rollouts = train(folder, "rollout.max_turns=6")
    assert len(rollouts) == 2
    for rollout in rollouts:
        assert rollout["stop_reason"] == "completed", rollout
        assert rollout["tool_calls"][-1]["name"] == "final_answer"
        (conversation,) = rollout["trajectories"]  # all turns continue it
        queries = [m for m in conversation["messages"] if m["role"] == "tool"]
        assert len(queries) == len(rollout["tool_calls"]) - 1
        output = folder / "run" / "agents" / f"{rollout['rollout_id']}.stdout"
        assert output.read_text().strip() == rollout["tool_calls"][-1]["arguments"]["answer"]
