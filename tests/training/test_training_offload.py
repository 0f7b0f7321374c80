"""The optimizer's state in host memory between updates: the same numbers, the same objects."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from training_cases import policy, random_groups, weights

from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints

OFFLOAD = {"token_budget": 100, "offload_during_rollouts": True}


def places(trained) -> dict[int, int]:
    """Where each tensor of the optimizer's state lies, by its id."""
    states = trained.optimizer.optimizer.parts[0].state.values()
    return {id(t): t.data_ptr() for values in states for t in values.values() if t.ndim}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_that_moves_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    def made(training: dict):
        model = tiny.model().bfloat16()  # with float32 copies
        return policy(model, training=training, name=name, lr=1e-3)

    plain, moved = made({"token_budget": 100}), made(OFFLOAD)
    for step in range(3):
        expected = train_policy(plain, random_groups(step))
        with moved.optimizer_on_device():
            assert repr(train_policy(moved, random_groups(step))) == repr(expected)
    saver = Checkpoints(tmp_path, tokenizer=tiny.tokenizer(), keep=1)
    saver.save(moved, step=3)
    resumed = made(OFFLOAD)
    saver.load_latest(resumed)
    expected = train_policy(plain, random_groups(3))
    for one in (moved, resumed):
        with one.optimizer_on_device():
            assert repr(train_policy(one, random_groups(3))) == repr(expected)
        assert all(torch.equal(t, weights(plain)[n]) for n, t in weights(one).items())


def test_it_is_elsewhere_between_updates_and_the_same_objects_come_back() -> None:
    trained = policy(tiny.model().bfloat16(), training=OFFLOAD, lr=1e-3)
    with trained.optimizer_on_device():
        train_policy(trained, random_groups(0))
        on_device = places(trained)
    host = places(trained)
    with trained.optimizer_on_device():
        assert places(trained).keys() == on_device.keys() == host.keys()
        assert set(places(trained).values()).isdisjoint(host.values())
    assert places(trained) == host  # the host's memory is used again
