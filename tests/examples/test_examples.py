"""The folders under examples/: the commands of their READMEs, and two steps of training of each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_kit import parse
from example_kit import (
    EXAMPLES,
    FOLDERS,
    call_of_readme,
    check_queries,
    commands,
    train,
    train_shop,
)
from sandbox_kit import usable
from served_kit import served

from agenttrain.commands.running import compose_all
from agenttrain.settings.compose import hydra_session


@pytest.mark.parametrize("name", FOLDERS)
def test_a_readmes_commands_are_composed(name: str, enter: Callable[..., Path]) -> None:
    folder = enter(name)
    assert f"]({name}/README.md)" in (EXAMPLES / "README.md").read_text(encoding="utf-8")
    trained = 0
    for program, *words in commands(name):
        if Path(program).name == "pip":
            assert Path(words[-1]).is_file() or words[-1].startswith("agenttrain[")
        elif program == "agenttrain" and words[0] != "tools":
            command = parse(words)
            with hydra_session(command.source):
                assert compose_all(command)
            trained += f"experiment={folder.name}" in words
        elif program == "python" and words[:2] == ["-m", "venv"]:
            place = folder / words[2] / "bin" / "python"
            place.parent.mkdir(parents=True)
            place.symlink_to(sys.executable)
        else:
            assert Path(program).name in ("agenttrain", "python"), program
    assert trained


@pytest.mark.slow
def test_the_shop_agent_bounds_the_queries_of_the_model() -> None:
    check_queries(EXAMPLES / "shop_openai" / "agent.py", sys.executable)


@pytest.mark.slow
def test_the_shop_agent_with_openais_client_is_trained(enter: Callable[..., Path]) -> None:
    train_shop(enter("shop_openai"))


@pytest.mark.slow
def test_the_retrieval_agent_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("retrieval_agent")
    assert "5 euros for students" in call_of_readme("retrieval_agent", capsys)
    assert len(train(folder)) == 2


@pytest.mark.slow
def test_the_code_agent_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    usable("required")
    folder = enter("code_agent")
    assert "1267650600228229401496703205376" in call_of_readme("code_agent", capsys)  # 2**100
    assert len(train(folder)) == 2


@pytest.mark.slow
def test_the_mcp_agent_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("mcp_agent")
    assert "The Salt Road; The Tin Violin" in call_of_readme("mcp_agent", capsys)
    assert len(train(folder)) == 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Overriding environment")  # a copy was imported before
def test_the_gymnasium_game_is_trained(
    enter: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = enter("gymnasium_game")
    assert "than 10" in call_of_readme("gymnasium_game", capsys)
    for rollout in train(folder):
        assert "I think of a number" in rollout["trajectories"][0]["messages"][0]["content"]
        assert rollout["rewards"].keys() == {"environment"}


@pytest.mark.slow
def test_the_agent_with_a_simulated_user_is_trained(enter: Callable[..., Path]) -> None:
    folder = enter("user_simulator")
    with served() as (_, client):
        rollouts = train(folder, f"user.url={client.base_url}", "user.model=agent")
    assert all(rollout["stop_reason"] != "error" for rollout in rollouts), rollouts
    messages = [m for r in rollouts for m in r["trajectories"][0]["messages"]]
    assert sum(message["role"] == "user" for message in messages) > 2  # the rows have one each
