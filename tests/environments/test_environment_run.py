"""The environment of the guide, for real: the command as it stands there, on the bundled model."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agenttrain.runs.setup import Components, prepare
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/environments.md").read_text(encoding="utf-8")


SAID = ("right", "wrong, look again")


def block(language: str) -> str:
    """The page's first block of a language."""
    found = re.search(rf"```{language}.*?\n(.*?)```", PAGE, re.DOTALL)
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


@pytest.mark.slow
def test_the_environment_of_the_guide_runs(tmp_path: Path) -> None:
    (tmp_path / "my_world.py").write_text(block("python"))
    name, *command = shlex.split(block("bash").replace("\\\n", ""))
    assert name == "agenttrain"
    short = ("debug=tiny", "rollout.max_turn_tokens=48", "steps=1", "eval.questions=0")
    run = agenttrain(*command, *short, "hydra.run.dir=run", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    records = [json.loads(line) for line in (tmp_path / "run/rollouts/step-000001.jsonl").open()]
    assert all(set(record["rewards"]) == {"environment"} for record in records)
    for record in records:
        answers = [
            message["content"]
            for message in record["trajectories"][0]["messages"]
            if message["role"] == "tool" and message["content"] in SAID
        ]
        right = "right" in answers
        assert record["reward"] == (1 / len(answers) if right else 0.0)
        over = right or len(answers) == 2
        assert (record["stop_reason"] == "environment_done") == over
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])
    assert {"tools/sql/calls", "tools/final_answer/calls", "rewards/environment/mean"} <= set(
        metrics
    )


def prepared(*overrides: str) -> Components:
    """What the overrides make, without weights."""
    source = Source()
    with hydra_session(source):
        config = compose_run(
            ["reward=[]", "tools=[sql]", "stop_tools=[]", *overrides], source
        ).config
    validate(config)
    return prepare(config)


def test_the_reward_of_an_environment_is_there_unasked_with_a_weight() -> None:
    maze = "+environment.maze._target_=worlds.Maze"
    assert prepared(maze).rubric.weights == {"environment": 1.0}
    weighed = prepared(maze, "+reward.environment.weight=0.5")
    assert weighed.rubric.weights == {"environment": 0.5}
    assert weighed.environments.rewards == ("maze",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["+environment.maze._target_=worlds.Maze", "+reward.environment._target_=worlds.flat"],
            r"reward\.environment\._target_=worlds\.flat: hides the `reward` of environment\.maze",
        ),
        (
            ["+environment.life._target_=worlds.Life", "+reward.environment.weight=2"],
            r"none of the environments has a method `reward\(self, rollout\)`; add one",
        ),
        (["+environment.life._target_=worlds.Life"], r"reward=\{\}: there is no reward function"),
        (
            ["+environment.maze._target_=worlds.Maze", "stop_tools=[jump]"],
            r"stop_tools=\[jump\]: is not a tool of this run; its tools are: sql, move, look",
        ),
        (
            ["+environment.maze._target_=worlds.Maze", "+tools.move._target_=worlds.move"],
            r"environment\.maze: its method 'move' has the name of a tool of the run \(tools\.move",
        ),
        (
            [
                "+environment.maze._target_=worlds.Maze",
                "+environment.guess._target_=worlds.Guesser",
            ],
            r"data\.train: row 1: it has no column 'environment', and the run has several",
        ),
    ],
)
def test_what_is_refused_before_weights_load(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(*overrides)
