"""The programs in the README, run as a user would: files beside each other in one folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(after: str) -> str:
    """The first Python block behind a text."""
    found = re.search(r"```python\n(.*?)```", README.partition(after)[2], re.DOTALL)
    assert found is not None, after
    return found.group(1)


def test_the_scripted_test_of_ones_own_tool_and_reward(tmp_path: Path) -> None:
    (tmp_path / "my_agent.py").write_text(block("Put both into `my_agent.py`"))
    (tmp_path / "test_my_agent.py").write_text(block("(`test_my_agent.py`, beside"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_agent.py"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_objective_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "my_objectives.py").write_text(block("Put it into `my_objectives.py`"))
    command = re.search(r"agenttrain (algorithm/objective=own .*)", README)
    assert command is not None
    done = subprocess.run(
        [sys.executable, "-m", "agenttrain.cli", "check", *command.group(1).split()],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "objective my_objectives.band(width=0.3)" in done.stdout
