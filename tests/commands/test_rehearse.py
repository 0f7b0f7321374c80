"""`agenttrain rehearse`: failures, rewards and costs of a run, without a model."""

from __future__ import annotations

import copy
import json
import random
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agenttrain import cli
from agenttrain.chat.fixes import families
from agenttrain.commands.rehearse.command import nearest_rank
from agenttrain.commands.schema_examples import arguments_for, example
from agenttrain.commands.templates import original, small_tokenizer
from agenttrain.utils.model_path import model_folder

MODULE = '''
import signal


class World:
    """An environment with one method."""

    def look(self) -> str:
        """Look around."""
        return "a lamp"


def lookup(country: str, times: int = 1) -> str:
    """Look up a capital.

    Args:
        country: Its name.
        times: How often.
    """
    return {"Peru": "Lima"}[country]


def broken(query: str) -> str:
    """Search.

    Args:
        query: The words.
    """
    raise RuntimeError("the index is missing")


def picky(country: str) -> str:
    """Look up a country.

    Args:
        country: Its name.
    """
    raise KeyError(country)


def long(page: int) -> str:
    """Read a page.

    Args:
        page: Its number.
    """
    return "lamp " * 3000


def limited(rollout, answer, **columns):
    try:
        before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(5)
        try:
            return correct(rollout, answer)
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    except Exception:
        return -1.0


def correct(rollout, answer, **columns):
    return float(answer in rollout.trajectories[-1].messages[-1]["content"])


def constant(rollout):
    return 0.25


def raises(rollout):
    raise KeyError("answer")
'''
BASE = (
    *("experiment=none", "model=folder", "model.path=bundled:shop", "data=file", "tools=[]"),
    *(
        "data.train.path=rows.jsonl",
        "data.test.path=test.jsonl",
        "reward=[]",
        "algorithm.group_size=4",
    ),
)
CORRECT = "reward.correct._target_=my_rehearsed.correct"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tools, rewards and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_rehearsed.py").write_text(MODULE)
    row = {"prompt": "What is the capital of Peru?", "answer": "Lima"}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 10)
    (tmp_path / "test.jsonl").write_text(json.dumps({**row, "prompt": "Peru?"}) + "\n")
    return tmp_path


def report(words: Sequence[str], code: int) -> dict[str, Any]:
    """The JSON report of a rehearsal that ends with this exit code."""
    assert cli.main(["rehearse", "rollouts=16", "json=report.json", *BASE, *words]) == code
    return json.loads(Path("report.json").read_text())


def test_a_run_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tools.lookup._target_=my_rehearsed.lookup", CORRECT, "tokens_per_s=100"]
    result = report([*words, "tasks_per_step=8", "rollout.max_turn_tokens=64"], 0)
    assert result["rollouts"] == 16
    assert result["problems"] == []
    # 4 tasks x 4 samples: the kinds of the first turns are FIRST[task + sample].
    assert {"valid call", "wrong arguments", "unknown tool", "damaged call"} <= set(result["turns"])
    assert result["answers"]["unknown_tool"] == result["turns"]["unknown tool"]
    assert result["answers"]["invalid_arguments"] >= result["turns"]["wrong arguments"]
    (tool,) = result["tools"]
    assert tool["tool"] == "lookup" and 0 < tool["failures"] < tool["calls"]
    (reward,) = result["rewards"]
    assert (reward["rollouts"], reward["low"], reward["high"]) == (16, 0.0, 1.0)
    # 8 tasks x 4 samples; 8 turns x 64 tokens at most, at 100 tokens a second.
    assert (result["step_rollouts"], result["step_tokens_most"]) == (32, 32 * 512)
    assert result["step_s"][1] == 163.84
    printed = capsys.readouterr().out
    assert "at 100 tokens/s" in printed and "16 rollouts" in printed
    again = report(words, 0)
    assert (again["turns"], again["answers"]) == (result["turns"], result["answers"])


def test_the_command_for_a_tool_that_fails_runs(capsys: pytest.CaptureFixture[str]) -> None:
    result = report(["tools.picky._target_=my_rehearsed.picky", CORRECT], 0)
    (text,) = [text for text in result["warnings"] if text.startswith("tools.picky: all ")]
    name, *words = shlex.split(text.partition("some that do: ")[2])
    capsys.readouterr()
    assert (name, cli.main([*words, "--json"])) == ("agenttrain", 1)  # its call has an error
    (called,) = json.loads(capsys.readouterr().out)["calls"]
    assert called["error"] == "exception"


STOPS = "tools.lookup.stop=true"


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["stop_tools=[lookup]"], {}),
        (["stop_tools=[]", STOPS], {}),
        # A tool of the row, run by the stop tool under another name.
        (["stop_tools=[]", STOPS], {"tools": [{"name": "capital", "executor": "lookup"}]}),
    ],
)
def test_stop_tools_end_rollouts(place: Path, words: list[str], row: dict[str, Any]) -> None:
    for tool in row.get("tools", ()):
        country = {"country": {"type": "string"}}
        tool["parameters"] = {"type": "object", "properties": country, "required": ["country"]}
        tool["description"] = "Look up a capital."
    rows = json.loads((place / "rows.jsonl").read_text().splitlines()[0]) | row
    (place / "rows.jsonl").write_text((json.dumps(rows) + "\n") * 10)
    tools = ["tools.lookup._target_=my_rehearsed.lookup", "rollout.max_turns=2"]
    result = report([*tools, *words, CORRECT], 0)
    # The only tool is a stop tool: wherever the stub calls one, the rollout ends.
    assert result["turns"]["stop tool"] > 0
    assert "valid call" not in result["turns"]
    assert result["stop_reasons"]["stop_tool"] >= result["turns"]["stop tool"]


def test_a_reward_that_sets_alarms(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tools.lookup._target_=my_rehearsed.lookup", "reward.r._target_=my_rehearsed.limited"]
    with pytest.warns(RuntimeWarning, match=r"reward\.r: "):
        result = report(words, 0)
    (reward,) = result["rewards"]
    assert reward["low"] == 0.0  # -1 is what it returns where it cannot set one
    (text,) = [text for text in result["warnings"] if "alarm" in text]
    assert text.startswith("reward.r: ") and "reward=[math_verify]" in text
    capsys.readouterr()
    assert cli.main(["check", *BASE, *words]) == 0
    assert "found in the code of my_rehearsed.limited" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "problem", "warning"),
    [
        (
            ["tools.broken._target_=my_rehearsed.broken", CORRECT],
            1,
            "tools.broken: all",
            "",
        ),
        (
            ["tools.lookup._target_=my_rehearsed.lookup", "reward.r._target_=my_rehearsed.raises"],
            1,
            "the run would stop: reward 'r' on rollout 'rehearse-0-0' of task '",
            "",
        ),
        (
            [
                "tools.lookup._target_=my_rehearsed.lookup",
                "reward.c._target_=my_rehearsed.constant",
            ],
            0,
            "",
            "reward.c: is 0.25 for all 16 rollouts",
        ),
        (
            ["tools.long._target_=my_rehearsed.long", CORRECT, "tools.long.max_result_tokens=50"],
            0,
            "",
            "raise tools.long.max_result_tokens",
        ),
        ([CORRECT, "stop_tools=[]"], 0, "", ""),
        (["+environment.world._target_=my_rehearsed.World", CORRECT], 0, "", ""),
    ],
    ids=["broken tool", "broken reward", "constant reward", "long replies", "no tools", "methods"],
)
def test_faults(words: list[str], code: int, problem: str, warning: str) -> None:
    result = report(words, code)
    assert bool(result["problems"]) == bool(problem)
    assert problem in "\n".join(result["problems"])
    assert warning in "\n".join(result["warnings"])


@pytest.mark.parametrize("name", ["llama3.1", "gpt-oss", "deepseek-r1", "qwen3.5"])
def test_chat_templates_of_other_families(name: str) -> None:
    """One call a turn, channels, a prompt that opens the reasoning, calls in XML."""
    family = families()[name]
    tokenizer = copy.copy(small_tokenizer(family))
    tokenizer.chat_template = original(family.originals[0])
    tokenizer.save_pretrained("model")
    for file in ("config.json", "model.safetensors"):
        shutil.copy(model_folder("bundled:shop") / file, "model")
    words = ["tools.lookup._target_=my_rehearsed.lookup", CORRECT, "model.path=model"]
    result = report([*words, "engine.max_context=4096"], 0)
    assert result["rollouts"] == 16
    assert result["turns"]["valid call"] <= result["tools"][0]["calls"]
    assert result["answers"]["unknown_tool"] == result["turns"]["unknown tool"]
    assert result["rewards"][0]["high"] == 1.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rollouts=0"], "--rollouts 0: expected a whole number"),
        (["--tokens-per-s", "fast"], "--tokens-per-s fast: expected a number"),
        (["tols=[]"], "tols"),
    ],
)
def test_words_that_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rehearse", *words]) == 2
    assert message in capsys.readouterr().err


SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "integer", "minimum": 3, "maximum": 5},
    {"type": "integer", "maximum": -2},
    {"type": "number", "exclusiveMaximum": 0.5},
    {"type": "array", "maxItems": 0},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"type": "string", "minLength": 9, "maxLength": 12},
    {"enum": ["a", "b"]},
    {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    {"type": ["null", "integer"]},
    {"type": "array", "minItems": 2, "maxItems": 3, "items": {"const": 1}},
    {"allOf": [{"$ref": "#/$defs/I"}, {"maximum": 5}], "$defs": {"I": {"type": "integer"}}},
    {
        "type": "object",
        "required": ["point"],
        "properties": {"point": {"$ref": "#/$defs/P"}, "note": {"type": "string"}},
        "$defs": {"P": {"type": "object", "properties": {"x": {"type": "number"}}}},
    },
    {
        "type": "object",
        "required": ["tree"],
        "properties": {"tree": {"$ref": "#/$defs/N"}, "any": True},
        "$defs": {
            "N": {
                "type": "object",
                "required": ["left", "right"],
                "properties": {
                    "left": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "number"}]},
                    "right": {"anyOf": [{"$ref": "#/$defs/N"}, {"type": "number"}]},
                    "more": {"type": "array", "items": {"$ref": "#/$defs/N"}},
                },
            }
        },
    },
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_drawn_arguments_fit_their_schema(schema: dict[str, Any]) -> None:
    for seed in range(20):
        jsonschema.validate(example(schema, ["lamp", "Lima"], random.Random(seed)), schema)
    jsonschema.validate(example(schema, ["lamp", "Lima"], None), schema)


def test_a_tool_without_parameters_is_called_without_arguments() -> None:
    for tool in ({"name": "now"}, {"name": "now", "parameters": None}):
        assert arguments_for(tool, ["lamp"], random.Random(0)) == {}


@pytest.mark.parametrize(
    ("seconds", "p50", "p95"),
    [([2.0], 2.0, 2.0), ([1.0, 2.0], 1.0, 2.0), ([3.0, 1.0, 2.0], 2.0, 3.0)],
)
def test_half_of_the_calls_are_no_slower_than_p50(
    seconds: list[float], p50: float, p95: float
) -> None:
    assert (nearest_rank(seconds, 50), nearest_rank(seconds, 95)) == (p50, p95)
    twenty = [float(number) for number in range(1, 21)]
    assert (nearest_rank(twenty, 50), nearest_rank(twenty, 95)) == (10.0, 19.0)
