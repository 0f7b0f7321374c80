"""Checkpoints between numbers of processes, what they send, and whom they blame: real processes."""

from __future__ import annotations

import json
from pathlib import Path

import process_states
import pytest
import torch
from process_states import CASES, IDS
from torchrun import torchrun
from training_cases import random_groups
from transformers import AutoModelForCausalLM

from agenttrain.health.crash import read_batch
from agenttrain.training.sharding import assign, read_state
from agenttrain.training.weight_sync import policy_logprobs
from agenttrain.training.world import World

MODES = (pytest.param("ddp", marks=pytest.mark.long), "fsdp2")
WORLD = World()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all checkpoints."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def of_one(folder: Path) -> dict[str, dict]:
    """What one process saves, by case."""
    return {
        name: process_states.saved(case, "single", WORLD, folder / "one" / name)
        for name, case in CASES.items()
    }


@pytest.fixture(scope="module")
def of_two(folder: Path, of_one: dict) -> dict[str, dict]:
    """What two processes make of it and save themselves, by mode: computed when asked for."""

    class ByMode(dict[str, dict]):
        def __missing__(self, mode: str) -> dict:
            self[mode] = torchrun("process_states.py", mode, str(folder))[0]
            return self[mode]

    return ByMode()


def close(found: dict, expected: dict, name: str) -> None:
    """The same weights, to the bit, and the same next update."""
    assert found["before"] == expected["before"]
    tolerance = 2e-2 if name == "masters" else 1e-3  # bfloat16 has 8 bits
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=tolerance, nan_ok=True)
    assert found["after"] == pytest.approx(expected["after"], rel=tolerance, abs=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_go_on_from_what_one_saved(
    name: str, mode: str, of_one: dict, of_two: dict
) -> None:
    close(of_two[mode][name]["loaded"], of_one[name], name)
    first, second = of_two[mode][name]["loaded"]["drawn"]
    assert first != second  # the new process has random states of its own


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_one_process_goes_on_from_what_two_saved(
    name: str, mode: str, folder: Path, of_two: dict
) -> None:
    found = process_states.loaded(CASES[name], "single", WORLD, folder / mode / name)
    close(found, of_two[mode][name]["saved"], name)


def test_parts_are_put_together_where_they_are_used(tmp_path: Path) -> None:
    for rank, part in enumerate(([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])):
        state = {"step": 3, "moment": {"part": torch.tensor(part), "shape": [3, 2]}}
        torch.save(state, tmp_path / f"policy-{rank}.pt")
    found = read_state(tmp_path)
    assert found["step"] == 3
    # Of 8 processes each would hold all of the optimizer's state, which they share.
    assert not isinstance(found["moment"], torch.Tensor)
    whole = torch.zeros(3, 2)
    assign(whole, found["moment"])
    assert whole.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_what_two_processes_save_is_a_model_of_transformers(
    mode: str, folder: Path, of_two: dict
) -> None:
    saved = folder / mode / "adamw" / "latest"
    plain = AutoModelForCausalLM.from_pretrained(saved)
    assert plain.lm_head.weight is plain.model.embed_tokens.weight
    own = process_states.make(CASES["adamw"], "single", WORLD)
    process_states.Checkpoints(folder / mode / "adamw", tokenizer=None, keep=1).load_latest(own)
    gap = torch.tensor(policy_logprobs(plain, IDS)) - torch.tensor(own.probe_logprobs(IDS))
    assert gap.abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_engines_get_the_weights_that_are_trained(name: str, mode: str, of_two: dict) -> None:
    tolerance = 0.1 if name == "masters" else 1e-4
    assert max(of_two[mode][name]["sent"].values()) < tolerance


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_all_processes_blame_the_rollout_of_one_and_leave_one_bundle(
    mode: str, folder: Path, of_two: dict
) -> None:
    first, second = of_two[mode]["blamed"]["errors"]
    assert first == second
    assert first[1:] == ["g1-2"]
    assert "rollout g1-2: the engine's logprob of token" in first[0]
    bundle = folder / f"{mode}-crash" / "crash" / "step-000001"
    assert first[0].endswith(f"To see it again: agenttrain replay {bundle}")
    assert json.loads((bundle / "crash.json").read_text())["culprits"] == ["g1-2"]
    assert len((bundle / "rollouts" / "step-000001.jsonl").read_text().splitlines()) == 12
    made = [rollout for group in random_groups(0, groups=3) for rollout in group]
    rows = read_batch(bundle, made)
    assert sorted(row.rollout.rollout_id for row in rows) == sorted(r.rollout_id for r in made)
    own = process_states.make(CASES["adamw"], "single", WORLD)
    beside = process_states.Checkpoints(bundle / "checkpoints", tokenizer=None, keep=1)
    assert beside.load_latest(own)["step"] == 0
