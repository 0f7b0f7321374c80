"""The shop agent as five programs: the loop's ids, masks and weights, to the bit."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import shop_agents
from process_runs import agenttrain
from same_run import assert_same_weights, metrics
from shop_runs import SETTINGS, sampled

from agenttrain.cli import main

# The run whose agent is the loop is made once.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]

WORKER = f"agent.command=[{sys.executable},{shop_agents.__file__}]"
AGENTS = {
    "in process": ["agent._target_=shop_agents.in_process"],
    "httpx": ["agent._target_=shop_agents.with_httpx"],
    "openai, streaming": ["agent._target_=shop_agents.with_openai"],
    "anthropic's shape": ["agent._target_=shop_agents.in_anthropics_shape"],
    "a reused process": [WORKER, "agent.reuse=true", "agent.per_process=16"],
}
IN_CI = ("openai, streaming", "anthropic's shape", "a reused process")


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run whose agent is the loop."""
    folder = tmp_path_factory.mktemp("loop") / "run"
    assert main([*SETTINGS, f"hydra.run.dir={folder}"]) == 0
    return folder


@pytest.mark.parametrize(
    "agent",
    [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in AGENTS],
)
def test_every_program_trains_as_the_loop(agent: str, loop: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [*SETTINGS, "agent=endpoint", *AGENTS[agent], f"hydra.run.dir={run}"]
    assert main(words) == 0
    expected = sampled(loop)
    assert len(expected) == 80
    assert min(row["grad_norm"] for row in metrics(loop)) > 0  # there is something to learn
    assert sampled(run) == expected
    assert_same_weights(run, loop)


@pytest.mark.long
def test_two_processes_have_an_endpoint_each(tmp_path: Path, monkeypatch) -> None:
    """The rollouts and weights of two processes whose agent is the loop, to the bit."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    two = (*SETTINGS, "steps=2", "distributed=ddp", "distributed.processes=2")
    agenttrain(*two, f"hydra.run.dir={tmp_path / 'loop'}")
    agent = ("agent=endpoint", WORKER, "agent.reuse=true", "agent.per_process=16")
    agenttrain(*two, *agent, f"hydra.run.dir={tmp_path / 'run'}")
    assert sampled(tmp_path / "run", 2) == sampled(tmp_path / "loop", 2)
    assert_same_weights(tmp_path / "run", tmp_path / "loop")
