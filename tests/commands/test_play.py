"""`agenttrain play`: lines of a pipe or a terminal are messages of the user."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from agenttrain.cli import main

GREEDY = ("eval.temperature=0", "tracker=none")


@pytest.fixture(scope="module")
def run(trained_run: Path) -> Path:
    """A run of two steps."""
    return trained_run


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def played(lines: list[str], *arguments: str) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
        capsys.readouterr()
        assert main(["play", *arguments]) == 0
        return capsys.readouterr().out

    return played


@pytest.mark.slow
def test_the_rows_question_gets_the_ids_of_a_greedy_evaluation(play, tmp_path) -> None:
    folder = tmp_path / "eval"
    arguments = ["eval.questions=1", "tracker=none", f"hydra.run.dir={folder}"]
    assert main(["eval", *arguments]) == 0
    records = [json.loads(line) for line in (folder / "rollouts" / "step-000000.jsonl").open("rb")]
    (greedy,) = [r for r in records if r["rollout_id"].startswith("eval-greedy")]
    from transformers import AutoTokenizer

    from agenttrain.utils.model_path import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder("bundled:shop"))
    (trajectory,) = greedy["trajectories"]
    printed = play(["/ask", "/tokens"], *GREEDY)
    assert tokenizer.decode(trajectory["token_ids"]) in printed
    counts = {
        origin: sum(s["end"] - s["start"] for s in trajectory["spans"] if s["origin"] == origin)
        for origin in ("prompt", "sampled", "template", "tool")
    }
    assert "  ".join(f"{origin} {count}" for origin, count in counts.items()) in printed


def test_calls_and_replies_are_shown_in_the_order_of_their_happening(play) -> None:
    printed = play(["How many lamps are there?"], *GREEDY)
    steps = ["you> How many lamps", '{"name": "sql"', "sql → ", "(stop_tool; the next message"]
    places = [printed.index(step) for step in steps]
    assert places == sorted(places)


@pytest.mark.slow
def test_the_model_before_training_answers_too(play, run) -> None:
    printed = play(["/ask"], f"run={run}", "--step", "0", *GREEDY)
    assert printed.index("── after training") < printed.index("── before training")
    assert printed.count("stop_tool") == 2


@pytest.mark.slow
def test_commands(play, run) -> None:
    lines = ["/row 3", "/tokens", "/reset", "/resett", "/help", "/quit", "How many?"]
    printed = play(lines, f"run={run}", "--step", "2", *GREEDY)
    assert "row    3: Quick question" in printed
    assert "nothing has been said yet" in printed
    assert "/resett: no such command (did you mean '/reset'?)" in printed
    assert "you> How many?" not in printed


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["run={run}", "step=9"], "--step 9: {run} has no such checkpoint; it has those of the "),
        (["run={run}", "step=bets"], "--step bets: expected a step's number or best"),
        (["run={run}/none"], "run={run}/none: is no run folder"),
        (["resume={run}"], "resume={run}: not with `agenttrain play`; did you mean run={run}?"),
        (["run={run}", "engine=vllm"], "engine=vllm: agenttrain play samples from the model in"),
        (["algorithm=rloo"], "algorithm=rloo: has no effect in agenttrain play; leave it out"),
    ],
)
def test_bad_words(arguments, problem, run, capsys) -> None:
    assert main(["play", *(text.format(run=run) for text in arguments)]) == 2
    assert problem.format(run=run) in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal(run) -> None:
    """A pty: the prompt is shown, tokens come, and Ctrl-D ends it."""
    inner, outer = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", "play", f"run={run}", *GREEDY],
        stdin=outer,
        stdout=outer,
        stderr=outer,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
        close_fds=True,
    )
    os.close(outer)
    text = ""

    def read_until(end: str, *, after: str = "") -> None:
        nonlocal text
        while end not in text[text.index(after) :]:
            text += os.read(inner, 4096).decode(errors="replace")

    try:
        read_until("you> ")
        os.write(inner, b"How many lamps are there?\n")
        read_until("tool_call")
        read_until("(stop_tool")
        # The end of input counts once the prompt is there: readline clears what came before.
        read_until("you> ", after="(stop_tool")
        os.write(inner, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(inner)
    assert "\x1b[32m" in text  # sampled text is green
