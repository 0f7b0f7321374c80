"""Two processes make the update that one makes of the same rollouts: real ones, over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from two_processes import CASES, run

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def of_two() -> dict:
    """What two processes found, by case."""
    paths = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*launch, str(HERE / "two_processes.py")],
        capture_output=True,
        text=True,
        timeout=300,
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one(name: str, of_two: dict) -> None:
    one, two = run(CASES[name], 0, 1), of_two[name]
    for step in range(2):
        # of fp32 sums in another order
        expected = pytest.approx(one["metrics"][step], rel=1e-4, abs=1e-5, nan_ok=True)
        assert two["metrics"][step] == expected
        advantages = two["advantages"][step]
        assert {k for k, v in advantages.items() if v is None} == {"g3-1"}
        assert advantages == pytest.approx(one["advantages"][step], abs=1e-5)
    assert one["metrics"][0]["grad_norm"] > 0
    (weights,) = one["weights"]
    assert len(two["weights"]) == 2
    for of_process in two["weights"]:
        assert of_process == pytest.approx(weights, rel=1e-5)
