"""`agenttrain check` of an outside agent: one conversation with a scripted model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agenttrain.cli import main

AGENT = """
import itertools, json, sys, urllib.request
given, count = json.loads(sys.stdin.readline()), itertools.count()
number = {"type": "integer", "minimum": 1}
add = {"type": "object", "properties": {"a": number, "b": number}, "required": ["a", "b"]}
tools = [{"type": "function", "function": {"name": "add", "parameters": add}}]
TOOLS

def ask(messages, **fields):
    body = json.dumps({"messages": messages, "tools": tools, **fields}).encode()
    headers = {"authorization": "Bearer " + given["api_key"]}
    request = urllib.request.Request(given["base_url"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]

def system():
    return {"role": "system", "content": SYSTEM}

history = [m for m in given["messages"] if m["role"] == "user"]
turn = ask([system(), *history])
(call,) = turn["tool_calls"]
values = json.loads(call["function"]["arguments"])
total = str(values["a"] + values["b"])
history += [turn, {"role": "tool", "tool_call_id": call["id"], "content": total}]
END
"""


ASK = "ask([system(), *history])"


def check(folder: Path, *words: str, system: str, end: str = ASK, tools: str = "") -> int:
    path = folder / "agent.py"
    path.write_text(AGENT.replace("SYSTEM", system).replace("END", end).replace("TOOLS", tools))
    settings = ["agent=endpoint", f"agent.command=[{sys.executable},{path}]"]
    return main(["check", "experiment=shop", "debug=tiny", *settings, *words])


def test_a_client_that_keeps_its_history_has_no_restarts(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert check(tmp_path, system="'Be brief.'") == 0
    assert "2 turns of a scripted model, completed: 0 restarts\n" in capsys.readouterr().out


def test_a_clock_in_the_system_prompt_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert check(tmp_path, system="f'It is 12:0{next(count)}.'") == 0
    assert (
        "2 turns of a scripted model, completed: 1 restart\n"
        "               system: message 0 (system), character 10: sent '1.', issued '0.'\n"
    ) in capsys.readouterr().out


def test_an_agent_that_fails_is_an_error_with_its_last_words(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert check(tmp_path, system="'Be brief.'", end="sys.exit(f'no such file: {total}')") == 2
    error = capsys.readouterr().err
    assert "agent.py]: failed in a conversation with a scripted model" in error
    assert "the agent ended with exit code 1; it printed: no such file: " in error


def test_an_agent_that_somebody_else_starts_is_not_waited_for(
    capsys: pytest.CaptureFixture,
) -> None:
    assert main(["check", "experiment=shop", "debug=tiny", "agent=endpoint"]) == 0
    assert "started by somebody else: no conversation to check" in capsys.readouterr().out


SUBMIT = """
tools.insert(0, {"type": "function", "function": {"name": "final_answer", "parameters": add}})
"""


@pytest.mark.parametrize(
    "words", [["stop_tools=[final_answer]"], ["stop_tools=[]", "tools.final_answer.stop=true"]]
)
def test_a_stop_tool_is_not_called_first(tmp_path: Path, words: list[str]) -> None:
    named = """assert call["function"]["name"] == "add"\n"""
    end = f"{named}ask([system(), *history])"
    assert check(tmp_path, *words, system="'Be brief.'", end=end, tools=SUBMIT) == 0


DEMANDS = """
point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
form = {"type": "json_schema", "json_schema": {"name": "point", "schema": point}}
again = ask([system(), *history], tool_choice="required")
(call,) = again["tool_calls"]
history += [again, {"role": "tool", "tool_call_id": call["id"], "content": "8"}]
written = ask([system(), *history], response_format=form)
assert type(json.loads(written["content"])["x"]) is int
"""


def test_calls_and_json_that_an_agent_demands_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert check(tmp_path, system="'Be brief.'", end=DEMANDS) == 2
    assert "tool_choice: demands a call, which needs a grammar" in capsys.readouterr().err
    structured = (
        *("engine=vllm", "rollout.structured_calls=true", "guards.logprob_gap.limit=null"),
        *("algorithm.correction.level=token", "algorithm.behaviour=recomputed"),
    )
    check(tmp_path, *structured, system="'Be brief.'", end=DEMANDS)  # 2 where vLLM is not installed
    assert "3 turns of a scripted model, completed: 0 restarts\n" in capsys.readouterr().out
