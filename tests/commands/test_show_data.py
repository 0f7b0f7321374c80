"""`agenttrain data`: what a user reads before a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from agenttrain import cli


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with rows, and the interpreter's state as it was afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows = [{"question": f"What is {n} + {n}?", "solution": f"#### {2 * n}"} for n in range(1, 31)]
    rows[3]["hint"] = True
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


OURS = ["data=file", "data.path=rows.jsonl", "data.test_fraction=0.2", "eval.group_by=null"]
MAPPED = [*OURS, "data.shuffle=false", "data.map.prompt=question"]


def test_rows_prompts_and_lengths(capsys, elsewhere):
    answer = "data.map.answer=\"split(solution, '#### ')[-1]\""
    assert cli.main(["data", "--rows", "1", *MAPPED, answer, "data.system=Be brief."]) == 0
    told = capsys.readouterr().out
    assert "of 30 rows are held out for evaluation" in told
    assert "columns  question (text), solution (text), " in told
    assert "hint (true/false in 1 of 20)" in told
    assert "reward.exact_match  column answer found" in told
    assert told.count("── task ") == 1
    prompt = told[told.index("<|im_start|>") :]
    assert prompt.startswith("<|im_start|>system\nBe brief.\nTools:\nsql(query)\n")
    assert "<|im_start|>user\nWhat is " in prompt
    assert prompt.rstrip().endswith("<|im_start|>assistant")
    assert list(elsewhere.iterdir()) == [elsewhere / "rows.jsonl"]


def test_a_column_that_a_reward_misses(capsys):
    assert cli.main(["data", "--rows", "0", *MAPPED]) == 1
    told = capsys.readouterr().out
    assert "reward.exact_match  column answer in data.train and data.test: MISSING" in told
    assert "── task" not in told


def test_the_same_column_stops_the_run(capsys):
    assert cli.main([*MAPPED, "debug=tiny", "hydra.run.dir=run"]) == 2
    told = capsys.readouterr().err
    assert "reward.exact_match: needs the column 'answer', and the rows of data.train have" in told
    assert "make it of another: data.map.answer=…" in told


def test_prompts_that_do_not_fit(capsys):
    arguments = [*MAPPED, "data.map.answer=solution", "engine.max_context=30"]
    assert cli.main(["data", "--rows=0", *arguments, "rollout.max_turn_tokens=8"]) == 0
    told = capsys.readouterr().out
    assert "fill the context of 30 and are left" in told


@pytest.mark.slow
def test_rows_without_end(capsys):
    assert cli.main(["data", "--rows", "2", "data.train.split=tune"]) == 0
    told = capsys.readouterr().out
    assert "data.train  rows without end, agenttrain.data.bundled.shop.row" in told
    assert "of the first 500 rows" in told
    assert told.count("── task shop/tune/0/") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (OURS, "data.train: 30 of 30 rows cannot be used; data.map.…=… and data.prompt=… make"),
        ([*OURS[:2], OURS[3]], "data.test: has the same rows as data.train; hold some out with"),
        ([*OURS, "data.map.prompt=qestion"], "30 of 30 rows cannot be used"),
        ([*OURS, "data.prompt=x", "data.map.prompt=question"], "makes the question already; drop"),
        ([*OURS, 'data.prompt="{{ a"'], "data.prompt: is no template: unexpected end"),
        ([*OURS, "data.prompt={question}"], "data.prompt"),
        (["reward.exact_match.on_unavailable=dorp"], "(did you mean 'drop'?)"),
        (["reward=[jmespath]", 'reward.jmespath.expression="a["'], "(position 2, at its end)"),
        (["tools=[sql]", "stop_tools=[]"], "tool=final_answer: is not a tool of this run, so the"),
        (["reward=[stop_tool_called]", "stop_tools=[]"], "would always be 0 with stop_tools=[]"),
    ],
    ids=str,
)
def test_what_cannot_be_shown(arguments, said, capsys):
    assert cli.main(["data", *arguments]) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""


WORLD = """
class Maze:
    def __init__(self, start: int = 7):
        self.start = start

    def reset(self, row, seed):
        if row.get("broken"):
            raise OSError("no map")
        return f"You stand in cell {self.start}; find {row['answer']}."

    def step(self, to: str) -> str:
        \"\"\"Go one step.

        Args:
            to: Where to.
        \"\"\"
        return to
"""


def test_prompts_are_those_that_the_environments_reset_makes(capsys, elsewhere):
    (elsewhere / "maze_world.py").write_text(WORLD)
    rows = [{"answer": "the exit"}, {"answer": "the key", "prompt": "Be quick."}]
    (elsewhere / "mazes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["data=file", "data.path=mazes.jsonl", "data.test_fraction=0.5", "tools=[]"]
    settings += ["stop_tools=[]", "+environment.maze._target_=maze_world.Maze"]
    settings += ["data.shuffle=false", "eval.group_by=null", "reward.exact_match.tool=null"]
    assert cli.main(["data", "--rows", "1", *settings]) == 0
    told = capsys.readouterr().out
    assert "reset" in told.partition("── task")[0]
    assert "<|im_start|>user\nYou stand in cell 7; find the " in told
    broken = [{"answer": f"cell {number}", "broken": True} for number in range(8)]
    (elsewhere / "mazes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in broken))
    assert cli.main(["data", *settings]) == 2
    assert "environment 'maze': its reset failed with OSError: no map" in capsys.readouterr().err
