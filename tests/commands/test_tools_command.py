"""`agenttrain tools` as a user types it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from agenttrain.cli import main
from agenttrain.utils.model_path import model_folder

ROOT = Path(__file__).parents[2]
PLAIN = Path(__file__).parents[1] / "kit" / "mcp_plain_server.py"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.slow
def test_tools_are_shown_and_tried_without_torch_and_without_a_folder(tmp_path: Path) -> None:
    script = (
        "import sys; from agenttrain.cli import main; code = main(sys.argv[1:]); "
        "print(code, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "tools"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == "0 False"
    assert "final_answer  stop tool" in done.stdout
    assert '"description": "One SELECT statement."' in done.stdout
    assert "timeout_s 10.0, concurrency 64" in done.stdout
    assert """try it: agenttrain tools --call sql '{"query": "…"}'""" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_calls_go_through_the_toolbox_on_the_first_row(capsys: pytest.CaptureFixture[str]) -> None:
    query = {"query": "SELECT COUNT(*) FROM orders"}
    assert main(["tools", "--call", "sql", json.dumps(query)]) == 0
    assert "  60\n" in capsys.readouterr().out
    calls = ["--call", "sql", json.dumps(query), "--call", "sql", '{"qery": 3}']
    assert main(["tools", "--json", *calls, "tools.sql.timeout_s=7"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [tool["name"] for tool in found["tools"]] == ["sql", "final_answer"]
    assert [tool["stop_tool"] for tool in found["tools"]] == [False, True]
    assert found["tools"][0]["limits"]["timeout_s"] == 7
    assert found["tools"][0]["schema"]["function"]["parameters"]["required"] == ["query"]
    assert [call["content"] for call in found["calls"][:1]] == ["60"]
    assert [call["error"] for call in found["calls"]] == [None, "invalid_arguments"]
    assert found["calls"][1]["arguments"] == {"qery": 3}


def test_long_replies_are_those_that_the_model_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_long.py").write_text(
        'def long(count: int) -> str:\n    """Count.\n\n'
        '    Args:\n        count: How far.\n    """\n'
        '    return "lamp " * count\n'
    )
    tool = [
        "tools=[]",
        "tools.long._target_=my_long.long",
        "stop_tools=[]",
        "reward=[tool_success]",
    ]
    call = ["--json", "--call", "long", '{"count": 400000}']
    assert main(["tools", *tool, "rollout.max_result_tokens=60", *call]) == 0
    (result,) = json.loads(capsys.readouterr().out)["calls"]
    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    assert result["content"].startswith("lamp lamp")
    assert 10 < len(tokenizer.encode(result["content"])) <= 60


def test_the_printed_calls_run(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "experiment=calculator",
        "tools=[multiply]",
        "stop_tools=[]",
        "reward=[tool_success]",
    ]
    assert main(["tools", *settings, "--row", "1"]) == 0
    (line,) = [text for text in capsys.readouterr().out.splitlines() if "try it: " in text]
    name, *words = shlex.split(line.partition("try it: ")[2])
    assert (name, main(words)) == ("agenttrain", 0)
    assert "multiply" in capsys.readouterr().out


@pytest.mark.slow
def test_the_tools_of_an_mcp_server(capsys: pytest.CaptureFixture[str]) -> None:
    server = ["tools=[mcp]", f"tools.mcp.command=[{sys.executable},{PLAIN}]", "tools.mcp.prefix=x_"]
    assert main(["tools", *server, "stop_tools=[x_echo]"]) == 0
    out = capsys.readouterr().out
    assert "x_echo  stop tool" in out
    assert main(["tools", *server, "stop_tools=[echo]"]) == 2
    assert "stop_tools: there is no tool 'echo' (did you mean 'x_echo'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--call", "sq", "{}"], "--call sq: there is no such tool (did you mean 'sql'?); the"),
        (["--call", "sql", "{a: 1}"], "--call sql {a: 1}: is not JSON: Expecting property name"),
        (["--call", "sql", "[1]"], "--call sql [1]: must be an object of arguments, e.g. {}"),
        (["--jsn"], "--jsn"),
        (["tools.sql._target_=nowhere.f"], "there is no module 'nowhere'; install the package"),
    ],
)
def test_what_cannot_be_tried(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tools", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_run_without_tools(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tools", "tools=[]", "stop_tools=[]"]) == 0
    assert "this run has no tools" in capsys.readouterr().out


WORLD = """
class Quiz:
    def reset(self, row):
        self.tries, self.done = 0, False

    def final_answer(self, answer: str) -> str:
        \"\"\"Give the answer.

        Args:
            answer: The answer.
        \"\"\"
        self.tries += 1
        self.done = self.tries == 2
        return f"try {self.tries}"


def find(name: str, arguments: dict) -> str:
    \"\"\"Answer for a row's own tools.

    Args:
        name: The tool.
        arguments: Its arguments.
    \"\"\"
    return f"{name} {arguments}"
"""


def test_the_methods_of_environments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quiz_world.py").write_text(WORLD)
    world = ["+environment.quiz._target_=quiz_world.Quiz", "tools=[sql]", "stop_tools=[]"]
    assert main(["tools", *world, "stop_tools=[final_answer]"]) == 0
    out = capsys.readouterr().out
    assert out.index("sql\n") < out.index("environment quiz") < out.index("final_answer  stop tool")
    answer = ["--call", "final_answer", '{"answer": "x"}']
    assert main(["tools", "--json", *world, *answer, *answer, *answer]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [(tool["name"], tool["environment"]) for tool in found["tools"]] == [
        ("sql", None),
        ("final_answer", "quiz"),
    ]
    over = "Error: the episode is over; this call was not run"
    assert [call["content"] for call in found["calls"]] == ["try 1", "try 2", over]


def test_the_tools_of_the_first_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "row_finder.py").write_text(WORLD)
    own = {"name": "city", "description": "Find a city.", "executor": "find"}
    own["parameters"] = {"type": "object", "properties": {"of": {"type": "string"}}}
    row = {"prompt": "Where?", "answer": "Oslo", "tools": ["final_answer", own]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    settings = ["data=file", "data.path=rows.jsonl", "tools=[final_answer]"]
    settings += ["tools.find._target_=row_finder.find", "eval.questions=0"]
    assert main(["tools", *settings, "--call", "city", '{"of": "Norway"}']) == 0
    assert "city {'of': 'Norway'}" in capsys.readouterr().out
    assert main(["tools", *settings, "--call", "find", "{}"]) == 2
    assert "the tools of the first row are: final_answer, city" in capsys.readouterr().err


@pytest.mark.slow
def test_the_tools_of_a_row_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows_finder.py").write_text(WORLD)
    own = {"name": "city", "description": "Find a city.", "executor": "find"}
    own["parameters"] = {"type": "object", "properties": {"of": {"type": "string"}}}
    rows = [
        {"prompt": "Where?", "task_id": "a", "answer": "1", "tools": ["final_answer"]},
        {"prompt": "Where?", "task_id": "b", "answer": "2", "tools": ["final_answer", own]},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ["data=file", "data.path=rows.jsonl", "tools=[final_answer]", "data.shuffle=true"]
    settings += ["tools.find._target_=rows_finder.find", "eval.questions=0"]

    def tools(*options: str) -> list[str]:
        assert main(["tools", "--json", *options, *settings]) == 0
        return [tool["name"] for tool in json.loads(capsys.readouterr().out)["tools"]]

    assert tools() == ["final_answer", "find"]
    assert tools("--row", "0") == tools("--task", "a") == ["final_answer"]
    assert tools("--row", "1") == tools("--task", "b") == ["final_answer", "city"]
    assert main(["tools", *settings, "--task", "b", "--call", "city", '{"of": "Norway"}']) == 0
    assert "city {'of': 'Norway'}" in capsys.readouterr().out
    for options, message in (
        (["--task", "a", "--call", "city", "{}"], "the tools of row a are: final_answer"),
        (["--row", "2"], "--row 2: data.train has 2 rows, from 0 on"),
        (["--row", "-1"], "--row -1: expected a whole number, 0 or more"),
        (["--task", "bb"], "--task bb: no row of data.train has this task_id (did you mean 'b'?)"),
        (["--row", "0", "--task", "a"], "--task: not allowed with argument --row"),
    ):
        assert main(["tools", *settings, *options]) == 2
        assert message in capsys.readouterr().err
