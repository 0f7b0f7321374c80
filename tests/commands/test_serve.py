"""`agenttrain serve`: a process that is asked as any server of OpenAI's API."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from agenttrain.cli import main
from agenttrain.runs.setup import Components
from agenttrain.settings.compose import Source, compose_run, hydra_session

MODEL = "experiment=shop"


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The main trajectories of a greedy evaluation's rollouts."""
    folder = tmp_path_factory.mktemp("eval") / "run"
    arguments = [MODEL, "eval.questions=6", "tracker=none", f"hydra.run.dir={folder}"]
    assert main(["eval", *arguments]) == 0
    records = map(json.loads, (folder / "rollouts" / "step-000000.jsonl").open("rb"))
    return [r["trajectories"][0] for r in records if r["rollout_id"].startswith("eval-greedy")]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "agenttrain.cli", "serve", MODEL, "port=0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    url = ""
    for line in process.stdout:
        if line.startswith("serving agent at "):
            url = line.split()[-1]
            break
    yield process, openai.OpenAI(base_url=url, api_key="none", timeout=60)
    process.kill()
    process.wait()


def test_a_client_gets_the_ids_of_a_greedy_evaluation(greedy, served) -> None:
    _, client = served
    with hydra_session(Source()):
        tools: Any = Components(compose_run([MODEL], Source()).config).toolbox.schemas()
    turns = 0
    for trajectory in greedy:
        recorded = [message for message in trajectory["messages"] if message["role"] == "tool"]
        messages: list[Any] = [trajectory["messages"][0]]
        ids = trajectory["token_ids"]
        for span in (span for span in trajectory["spans"] if span["origin"] == "sampled"):
            answer = client.chat.completions.create(
                model="agent",
                messages=messages,
                tools=tools,
                temperature=0,
                max_tokens=48,
                extra_body={"return_token_ids": True},
            )
            assert answer.prompt_token_ids == ids[: span["start"]]
            (choice,) = answer.choices
            assert choice.token_ids == ids[span["start"] : span["end"]]
            turns += 1
            messages.append(choice.message)
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": recorded.pop(0)["content"]}
                for call in choice.message.tool_calls or ()
            ]
    assert turns > len(greedy)


def test_sigterm_lets_answers_end(served) -> None:
    """Runs last: it ends the process."""
    process, client = served
    prompt = [{"role": "user", "content": "How many lamps are there?"}]
    with client.chat.completions.create(
        model="agent", messages=prompt, temperature=0, stream=True
    ) as stream:
        next(stream)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "stop"
    assert process.wait(40) == 0


def test_bad_words(capsys, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases = {
            f"port={port}": f"port={port}: cannot be bound: Address already in use; name another",
            "port=http": "port=http: give a number up to 65535; 0 takes a free one",
            "step=3": "step=3: is a step of a run; add run=<run folder>",
            f"run={tmp_path}": f"run={tmp_path}: is no run folder",
            "data=calculator": "data=calculator: has no effect in agenttrain serve; leave it out",
        }
        for word, problem in cases.items():
            assert main(["serve", word]) == 2
            assert problem in capsys.readouterr().err
