"""Examples whose packages are in environments of their own; scripts/test-ecosystems makes those."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from example_kit import EXAMPLES, call_of_readme, check_queries, train, train_shop


def python_of(variable: str) -> object:
    """The marks of a test that needs packages besides those of the suite."""
    why = f"{variable} names no Python; scripts/test-ecosystems examples runs it"
    return pytest.mark.skipif(variable not in os.environ, reason=why)


@python_of("AGENTS_PYTHON")
@pytest.mark.parametrize("name", ["shop_anthropic", "shop_langgraph"])
def test_a_shop_agent_is_trained(name: str, enter: Callable[..., Path]) -> None:
    train_shop(enter(name, os.environ["AGENTS_PYTHON"]))


@python_of("AGENTS_PYTHON")
@pytest.mark.parametrize("name", ["shop_anthropic", "shop_langgraph"])
def test_a_shop_agent_bounds_the_queries_of_the_model(name: str) -> None:
    check_queries(EXAMPLES / name / "agent.py", os.environ["AGENTS_PYTHON"])


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


@python_of("VERIFIERS_PYTHON")
def test_the_verifiers_taskset_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("verifiers_countdown")
    (folder / "verifiers-env").symlink_to(Path(os.environ["VERIFIERS_PYTHON"]).parents[1])
    assert "27" in call_of_readme("verifiers_countdown", capsys)  # 3 * (2 + 7)
    for rollout in train(folder):
        assert "each used once" in rollout["trajectories"][0]["messages"][0]["content"]
        assert rollout["rewards"].keys() == {"environment"}


@python_of("OPENENV_PYTHON")
def test_the_openenv_game_is_trained(enter: Callable[..., Path]) -> None:
    folder = enter("openenv_game")
    with openenv_server(folder) as url:
        for rollout in train(folder, f"environment.openenv.url={url}"):
            assert "Walk to the lamp" in rollout["trajectories"][0]["messages"][0]["content"]
            assert rollout["rewards"].keys() == {"environment"}
