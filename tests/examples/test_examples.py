"""The folders under examples/: the commands of their READMEs, and a step of training of each."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from code_blocks import ROOT, blocks
from sandbox_kit import usable
from served_kit import served

from agenttrain import cli
from agenttrain.settings.command_line import parse
from agenttrain.settings.compose import hydra_session
from agenttrain.utils.model_path import model_folder

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.name for path in EXAMPLES.iterdir() if path.is_dir())
SMALL = ("debug=tiny", "steps=1", "tasks_per_step=1", "eval.questions=0", "tracker=none")


def python_of(variable: str) -> object:
    """The marks of a test that needs packages besides those of the suite."""
    why = f"{variable} names no Python; scripts/test-ecosystems examples runs it"
    return pytest.mark.skipif(variable not in os.environ, reason=why)


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Go into a copy of an example's folder, with a `python` for its programs."""
    modules = set(sys.modules)

    def go(name: str, python: str = sys.executable) -> Path:
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "my_model").symlink_to(model_folder("bundled:shop"))
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("PATH", f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))  # the shop's agents import its database
        return folder

    yield go
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def train(folder: Path, *overrides: str) -> list[dict]:
    """Train for a step; return its rollouts."""
    words = ["--config-dir", "conf", f"experiment={folder.name}", *SMALL, *overrides]
    assert cli.main([*words, "hydra.run.dir=run"]) == 0
    assert json.loads((folder / "run" / "summary.json").read_text())["steps"] == 1
    lines = (folder / "run" / "rollouts" / "step-000001.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def commands(name: str) -> list[list[str]]:
    """The words of the commands in an example's README."""
    fences = [b for b in blocks(EXAMPLES / name / "README.md") if b.language == "bash"]
    return [shlex.split(command) for block in fences for command in block.commands()]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_readmes_commands_are_composed(
    name: str, enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter(name)
    assert f"]({name}/README.md)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    trained = 0
    for program, *words in commands(name):
        if Path(program).name == "pip":
            assert Path(words[-1]).is_file() or words[-1].startswith("agenttrain[")
        elif program == "agenttrain" and words[0] != "tools":
            command = parse(words)
            with hydra_session(command.source):
                assert cli.compose_all(command)
            trained += f"experiment={folder.name}" in words
        else:
            assert Path(program).name in ("agenttrain", "python"), program
    assert trained


def call_of_readme(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the README's `agenttrain tools … --call` prints."""
    (words,) = (words[1:] for words in commands(name) if words[:2] == ["agenttrain", "tools"])
    assert cli.main(words) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("shop_openai", None),
        pytest.param("shop_anthropic", "AGENTS_PYTHON", marks=python_of("AGENTS_PYTHON")),
        pytest.param("shop_langgraph", "AGENTS_PYTHON", marks=python_of("AGENTS_PYTHON")),
    ],
)
def test_a_shop_agent_is_trained(
    name: str, variable: str | None, enter: Callable[..., Path]
) -> None:
    folder = enter(name, os.environ[variable] if variable else sys.executable)
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


def test_the_retrieval_agent_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("retrieval_agent")
    assert "5 euros for students" in call_of_readme("retrieval_agent", capsys)
    assert len(train(folder)) == 2


def test_the_code_agent_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    usable("required")
    folder = enter("code_agent")
    assert "1267650600228229401496703205376" in call_of_readme("code_agent", capsys)  # 2**100
    assert len(train(folder)) == 2


def test_the_mcp_agent_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("mcp_agent")
    assert "The Salt Road; The Tin Violin" in call_of_readme("mcp_agent", capsys)
    assert len(train(folder)) == 2


@pytest.mark.filterwarnings("ignore:.*Overriding environment")  # a copy was imported before
def test_the_gymnasium_game_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("gymnasium_game")
    assert "than 10" in call_of_readme("gymnasium_game", capsys)
    for rollout in train(folder):
        assert "I think of a number" in rollout["trajectories"][0]["messages"][0]["content"]
        assert rollout["rewards"].keys() == {"environment"}


@contextmanager
def openenv_server(folder: Path) -> Iterator[str]:
    """The URL of the example's server, which runs meanwhile."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["OPENENV_PYTHON"], "server.py", str(port)]
    server = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": ""})
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                httpx.get(f"{url}/health", timeout=5)
                break
            except httpx.TransportError:
                assert server.poll() is None
                time.sleep(0.1)
        yield url
    finally:
        server.kill()
        server.wait()


@python_of("OPENENV_PYTHON")
def test_the_openenv_game_is_trained(enter: Callable[..., Path]) -> None:
    folder = enter("openenv_game")
    with openenv_server(folder) as url:
        for rollout in train(folder, f"environment.openenv.url={url}"):
            assert "Walk to the lamp" in rollout["trajectories"][0]["messages"][0]["content"]
            assert rollout["rewards"].keys() == {"environment"}


@pytest.mark.slow
def test_the_agent_with_a_simulated_user_is_trained(enter: Callable[..., Path]) -> None:
    folder = enter("user_simulator")
    with served() as (_, client):
        rollouts = train(folder, f"user.url={client.base_url}", "user.model=agent")
    assert all(rollout["stop_reason"] != "error" for rollout in rollouts), rollouts
    messages = [m for r in rollouts for m in r["trajectories"][0]["messages"]]
    assert sum(message["role"] == "user" for message in messages) > 2  # the rows have one each
