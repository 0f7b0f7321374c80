"""Several processes make the update that one makes of the same rollouts: real ones, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from accelerate.state import AcceleratorState
from torchrun import torchrun
from two_processes import CASES, HOW, Case, run

from agenttrain.training.world import World

CHEAP = "recorded"
"""The case that every run of the tests tries."""
CONTEXT = {
    "ddp-context-2": [
        *("recorded, none left", "recorded, kl and minibatches", "recorded, recomputed layers"),
        *("synced reference", "adapters", "recurrent layers", "mixed precision", "sequences"),
        *("none left, every mask", "turns of branches", "every mask"),
    ],
    "fsdp2-context-2": [
        *("recorded, none left", "recurrent layers", "bf16", "mixed precision", "offload"),
        *("teacher, none left", "adapters"),
    ],
    "ddp-context-2-of-4": ["recorded, kl and minibatches", "minibatches"],
    "fsdp2-context-4-of-4": ["recorded, recomputed layers", "recurrent layers"],
}
"""Cases whose microbatches are computed by groups of processes, of 2 processes or of 4."""
PAIRS = [
    *((name, "ddp") for name in CASES),
    *((name, "fsdp2") for name in HOW),
    *((name, mode) for mode, names in CONTEXT.items() for name in names),
]


@pytest.fixture(scope="module")
def of_two() -> Callable[[str, str], dict]:
    """What several processes found in a case of a mode; all but the cheap ones run together."""
    found: dict[str, dict] = {}

    def result(name: str, mode: str) -> dict:
        if name not in found.get(mode, {}):
            names = [CHEAP] if name == CHEAP else [n for n, m in PAIRS if m == mode and n != CHEAP]
            way, _, processes = mode.partition("-of-")
            told = torchrun("two_processes.py", way, *names, processes=int(processes or 2))
            found.setdefault(mode, {}).update(told[0])
        return found[mode][name]

    return result


@pytest.fixture(scope="module")
def of_one() -> Iterator[dict[str, dict]]:
    """What one process found, by case, as far as it was asked."""
    yield {}
    AcceleratorState._reset_state()  # a case's mixed precision would be every later test's


@pytest.mark.long
@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_six_recorded_steps_are_the_same(mode: str, of_two: Callable, of_one: dict) -> None:
    of_one[CHEAP] = of_one.get(CHEAP) or run(CASES[CHEAP], "single", World())
    check(CASES[CHEAP], of_one[CHEAP], of_two(CHEAP, mode))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode"), [pair for pair in PAIRS if pair[0] != CHEAP])
def test_two_processes_are_one(name: str, mode: str, of_two: Callable, of_one: dict) -> None:
    of_one[name] = of_one.get(name) or run(CASES[name], "single", World())
    check(CASES[name], of_one[name], of_two(name, mode))


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
    first, *others = two["weights"]
    assert all(other == first for other in others)  # to the bit: they never drift apart
    assert first == pytest.approx(weights, rel=case.tolerance)
