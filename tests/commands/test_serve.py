"""`agenttrain serve`: a process that is asked as any server of OpenAI's API."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest
from served_kit import ask_again, greedy, served, tools_of

from agenttrain.cli import main
from agenttrain.commands.verbs import DECLARED

MODEL = "experiment=shop"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[subprocess.Popen[str], openai.OpenAI]]:
    with served(MODEL) as process_and_client:
        yield process_and_client


def test_a_client_gets_the_ids_of_a_greedy_evaluation(server, tmp_path: Path) -> None:
    _, client = server
    trajectories = greedy(tmp_path / "eval", MODEL)
    assert ask_again(client, trajectories, tools_of(MODEL)) > len(trajectories)


def test_only_its_own_names_and_small_heads_are_answered(server) -> None:
    _, client = server
    url = f"{client.base_url}models"
    statuses = {"localhost": 200, "evil.example": 400}
    assert {host: httpx.get(url, headers={"host": host}).status_code for host in statuses} == (
        statuses
    )
    with suppress(httpx.TransportError):  # it closes the connection
        assert httpx.get(url, headers={"a": "x" * 2**20}).status_code == 400


def test_names_of_a_proxy() -> None:
    options, _ = DECLARED["serve"].parse(["--hosts", "[a.example,b.example]", "host=0.0.0.0"])
    assert (options.host, options.hosts) == ("0.0.0.0", ("a.example", "b.example"))


@pytest.mark.slow
def test_sigterm_lets_answers_end(server) -> None:
    """Runs last: it ends the process."""
    process, client = server
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
            f"port={port}": f"--port {port}: cannot be bound: Address already in use; name another",
            f"run={tmp_path}": f"run={tmp_path}: is no run folder",
            "data=calculator": "data=calculator: has no effect in agenttrain serve; leave it out",
        }
        for word, problem in cases.items():
            assert main(["serve", word]) == 2
            assert problem in capsys.readouterr().err
