"""The shop agent with Anthropic's own client, streaming: the loop's ids and weights, to the bit.

Its package is in an environment of its own, which scripts/test-ecosystems examples makes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import shop_agents
from same_run import assert_same_weights
from shop_runs import SETTINGS, sampled

from agenttrain.cli import main

WHY = "AGENTS_PYTHON names no Python; scripts/test-ecosystems examples runs it"


@pytest.mark.skipif("AGENTS_PYTHON" not in os.environ, reason=WHY)
def test_anthropics_client_trains_as_the_loop(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    loop, run = tmp_path / "loop", tmp_path / "run"
    assert main([*SETTINGS, f"hydra.run.dir={loop}"]) == 0
    command = f"agent.command=[{os.environ['AGENTS_PYTHON']},{shop_agents.__file__},anthropic]"
    agent = ["agent=endpoint", command, "agent.reuse=true", "agent.per_process=16"]
    assert main([*SETTINGS, *agent, "agent.timeout_s=60", f"hydra.run.dir={run}"]) == 0
    assert len(sampled(loop)) == 80
    assert sampled(run) == sampled(loop)
    assert_same_weights(run, loop)
