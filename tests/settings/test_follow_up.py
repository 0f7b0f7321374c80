"""The commands behind `agenttrain sft`: of the same agent, and runnable as they are printed."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from command_kit import parse

from agenttrain.cli import main
from agenttrain.settings.follow_up import after_sft
from agenttrain.settings.saved import tracker_project
from agenttrain.utils.model_path import model_folder

MINE = """# @package _global_
defaults:
  - override /tools: []
  - override /data: file
  - override /reward: [contains]
  - override /model: folder
tools:
  lookup: {_target_: my_follow_up.lookup}
stop_tools: []
data:
  train: {path: tasks.jsonl}
  test: {path: tasks.jsonl}
"""
TOOL = '''
def lookup(country: str) -> str:
    """Look up a capital.

    Args:
        country: Its name.
    """
    return "Lima"
'''
QUESTION = {"role": "user", "content": "What is the capital of Peru?"}
CALL = {"id": "a", "type": "function"}
CALL["function"] = {"name": "lookup", "arguments": {"country": "Peru"}}
DEMONSTRATION = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "Lima"},
    {"role": "assistant", "content": "Lima."},
]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tool, rows and the settings of an agent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_follow_up.py").write_text(TOOL)
    (tmp_path / "demos.jsonl").write_text((json.dumps({"messages": DEMONSTRATION}) + "\n") * 4)
    task = {"messages": [QUESTION], "answer": "Lima"}
    for name in ("tasks", "train", "test"):
        (tmp_path / f"{name}.jsonl").write_text((json.dumps(task) + "\n") * 4)
    for name, text in (
        ("mine", MINE),
        ("bare", MINE.partition("data:\n")[0].replace("  - override /data: file\n", "")),
        ("more", "# @package _global_\ndefaults:\n  - mine\nsteps: 3\n"),
    ):
        file = tmp_path / "my conf" / "experiment" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


HERE = ["--config-dir", "my conf"]
DEMOS = ["data=file", "data.train.path=demos.jsonl", "data.test.path=demos.jsonl"]
TASKS = ["data=file", "data.train.path=train.jsonl", "data.test.path=test.jsonl"]
TYPED = ["model=folder", "model.path=m", "tools=[]", "tools.lookup._target_=my_follow_up.lookup"]


@pytest.mark.parametrize(
    ("words", "followed"),
    [
        # The experiment has tasks: the demonstrations that were typed take no part.
        ([*HERE, "experiment=mine", *DEMOS], [*HERE, "experiment=mine"]),
        ([*HERE, "experiment=more", *DEMOS], [*HERE, "experiment=more"]),
        (["-cd=my conf", "experiment=mine", *DEMOS], [*HERE, "experiment=mine"]),
        # It has none, or they are the demonstrations.
        ([*HERE, "experiment=bare", *DEMOS], [*HERE, "experiment=bare", *TASKS]),
        ([*HERE, "experiment=mine", "steps=3"], [*HERE, "experiment=mine", *TASKS]),
        (
            ["experiment=none", *TYPED, *DEMOS, "optimizer.lr=1e-5", "seed=3"],
            ["experiment=none", "model=folder", *TYPED[2:], "seed=3", *TASKS],
        ),
        (["tools=[sql]", *DEMOS], ["tools=[sql]", *TASKS]),
        # The bundled agents have tasks.
        (["data=rollouts", "data.path=[r.jsonl]", "data.min_reward=1"], []),
        (["experiment=calculator_warmstart", "model.init=random"], ["experiment=calculator"]),
        (["experiment=code", *DEMOS], ["experiment=code"]),
    ],
)
def test_the_agent_of_the_run_is_evaluated_and_trained(
    words: list[str], followed: list[str]
) -> None:
    result = after_sft([*words, "sft.batch_size=2", "hydra.run.dir=o"], "a/latest")
    assert shlex.split(result.evaluate) == ["agenttrain", "eval", *followed, "model.path=a/latest"]
    assert shlex.split(result.train) == ["agenttrain", *followed, "model.path=a/latest"]
    assert result.tasks_missing == (followed[-3:] == TASKS)


@pytest.mark.slow
def test_the_printed_commands_run(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"model.path={model_folder('bundled:shop')}"
    words = [*HERE, "experiment=mine", "debug=tiny", "tracker=none", *DEMOS, model]
    assert main(["sft", *words, "steps=1", "hydra.run.dir=out/sft"]) == 0
    printed = capsys.readouterr().out
    commands = printed[printed.index("next ") + 5 :].strip().splitlines()
    for number, command in enumerate(commands):
        name, *arguments = shlex.split(command)
        assert name == "agenttrain"
        assert main([*arguments, f"hydra.run.dir=out/{number}"]) == 0
        settings = yaml.safe_load((place / "out" / str(number) / "config.yaml").read_text())
        assert list(settings["tools"]) == ["lookup"]
        assert list(settings["reward"]) == ["contains"]
        assert settings["data"]["train"]["path"] == "tasks.jsonl"
        assert "out/sft/checkpoints/latest" in settings["model"]["path"]
        summary = json.loads((place / "out" / str(number) / "summary.json").read_text())
        assert summary["project"] == "mine"
    assert number == 1


@pytest.mark.parametrize(
    ("words", "project"),
    [
        (["experiment=calculator"], None),  # its folder is outputs/calculator/<time>
        (["hydra.run.dir=o/x"], "shop"),
        (["experiment=calculator", "hydra.run.dir=o/x"], "calculator"),
        (["sft", "experiment=none", "model.path=m", "hydra.run.dir=o/x"], "run"),
        (["--config-dir", "my conf", "hydra.run.dir=o/x", "experiment=mine"], "mine"),
        (["--config-dir", "my conf", "--config-name", "all", "hydra.run.dir=o/x"], "all"),
        (["hydra.run.dir=o/x", "hydra.job.name=tries"], "tries"),
    ],
)
def test_the_trackers_project_is_the_experiment(words: list[str], project: str | None) -> None:
    assert tracker_project(parse(words)) == project


def test_a_run_that_goes_on_keeps_its_project(place: Path) -> None:
    for folder, summary in (("o/new", {"project": "calculator"}), ("o/old", {})):
        (place / folder / "checkpoints" / "step-000001").mkdir(parents=True)
        (place / folder / "config.yaml").write_text("seed: 0\n")
        (place / folder / "summary.json").write_text(json.dumps(summary))
    assert tracker_project(parse(["resume=o/new"])) == "calculator"
    assert tracker_project(parse(["eval", "run=o/new"])) == "calculator"
    assert tracker_project(parse(["eval", "run=o/new/checkpoints/step-000001"])) == "calculator"
    assert tracker_project(parse(["resume=o/old"])) is None
