"""Two processes make the update that one makes of the same rollouts: real ones, over gloo."""

from __future__ import annotations

import json

import pytest
from torchrun import torchrun
from two_processes import HOW, WHAT, Case, run

from agenttrain.training.world import World

CASES = [*((name, "ddp") for name in (*WHAT, *HOW)), *((name, "fsdp2") for name in HOW)]


@pytest.fixture(scope="module")
def of_two() -> dict[str, dict]:
    """What two processes found, by mode and case."""
    return {mode: _result(torchrun("two_processes.py", mode)) for mode in ("ddp", "fsdp2")}


def _result(printed: str) -> dict:
    (line,) = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.fixture(scope="module")
def of_one() -> dict[str, dict]:
    """What one process found, by case, as far as it was asked."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), CASES)
def test_two_processes_are_one(name: str, mode: str, of_two: dict, of_one: dict) -> None:
    case = {**WHAT, **HOW}[name]
    if name not in of_one:
        of_one[name] = run(case, "single", World())
    check(case, of_one[name], of_two[mode][name])


def check(case: Case, one: dict, two: dict) -> None:
    """Metrics, advantages and weights of every step are those of one process."""
    for step in range(case.steps):
        # of fp32 sums in another order
        expected = pytest.approx(
            one["metrics"][step], rel=case.tolerance, abs=case.tolerance / 10, nan_ok=True
        )
        assert two["metrics"][step] == expected, step
        advantages = two["advantages"][step]
        assert {k for k, v in advantages.items() if v is None} == {"g3-1"}
        assert advantages == pytest.approx(one["advantages"][step], abs=1e-5)
    assert one["metrics"][0]["grad_norm"] > 0
    (weights,) = one["weights"]
    assert len(two["weights"]) == 2
    for of_process in two["weights"]:
        assert of_process == pytest.approx(weights, rel=case.tolerance)
