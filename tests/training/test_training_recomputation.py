"""Activation checkpointing: equal gradients at every level, and levels that memory chooses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from packing_families import tiny_family
from recurrent_families import tiny_recurrent
from torch import nn
from training_cases import policy, random_groups

from agenttrain.trainer import train_policy
from agenttrain.training.config import LEVELS, ActivationCheckpointing, TrainingConfig
from agenttrain.training.footprint import RESERVE, lacks_reserve
from agenttrain.training.logprobs import Scorer, packed_hidden
from agenttrain.training.recomputation import (
    feed_forward_blocks,
    possible_levels,
    recomputed_modules,
    recomputing,
)
from agenttrain.training.segments import Segment
from agenttrain.types import ConfigError

NONE, BLOCKS, ALL = LEVELS
MODELS: dict[str, Callable[[], Any]] = {
    "dense": tiny.model,
    "experts": lambda: tiny_family("Qwen3Moe"),
    "a dense layer, then experts": lambda: tiny_family("DeepseekV3"),
    "hybrid": lambda: tiny_recurrent("Qwen3_5"),
    "hybrid with experts": lambda: tiny_recurrent("GraniteMoeHybrid"),
}
PROMPT = Segment(9, 6)
TREE = (Segment(0, 9), PROMPT, Segment(15, 5, PROMPT), Segment(20, 3, PROMPT))
"""A sequence of its own, and two that share the six tokens of their prompt."""


def gradients(model: Any, level: ActivationCheckpointing) -> dict[str, torch.Tensor]:
    """Gradients of a packed pass over `TREE`."""
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, level=level)
    assert scorer.packed
    model.zero_grad()
    with scorer.ready():
        hidden = packed_hidden(model, torch.arange(23) * 7 % 60, TREE)
        weights = torch.linspace(-1, 1, hidden.shape[1])
        (hidden * weights).sum().backward()
    return {name: w.grad.clone() for name, w in model.named_parameters() if w.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_packed_trees_are_equal_at_every_level(name: str) -> None:
    model = MODELS[name]()
    expected = gradients(model, NONE)
    assert sum(gradient.any() for gradient in expected.values()) > 10
    for level in (BLOCKS, ALL):
        found = gradients(model, level)
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            torch.testing.assert_close(found[key], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("dense", ["0.mlp", "1.mlp"]),
        ("experts", ["0.mlp", "1.mlp"]),
        ("hybrid", ["0.mlp", "1.mlp"]),
        # A shared MLP beside the experts of each layer.
        (
            "hybrid with experts",
            ["0.block_sparse_moe", "0.shared_mlp", "1.block_sparse_moe", "1.shared_mlp"],
        ),
    ],
)
def test_feed_forward_blocks_are_found_and_mixers_are_not(name: str, blocks: list[str]) -> None:
    model = MODELS[name]()
    names = {module: key for key, module in model.named_modules()}
    found = [names[block].removeprefix("model.layers.") for block in feed_forward_blocks(model)]
    assert sorted(found) == blocks


def test_a_model_samples_as_before_once_its_backward_pass_is_done() -> None:
    model = tiny.model()
    for level in LEVELS:
        with recomputing(recomputed_modules(model, level)):
            pass
    assert not any("forward" in vars(module) for module in model.modules())


class NoBlock(nn.Module):
    """A layer whose matrices are its own."""

    def forward(self, hidden_states: torch.Tensor, attention_mask: None = None) -> torch.Tensor:
        return hidden_states


def test_a_model_without_blocks_names_the_values_that_it_can_have() -> None:
    model = tiny.model()
    for layer in model.model.layers:
        layer.mlp = NoBlock()
    assert possible_levels(model, compiled=False) == [NONE, ALL]
    with pytest.raises(ConfigError, match=r"activation_checkpointing=blocks: .*=all or none"):
        recomputed_modules(model, BLOCKS)
    model.supports_gradient_checkpointing = False
    assert possible_levels(model, compiled=False) == [NONE]
    with pytest.raises(ConfigError, match=r"activation_checkpointing=all: .*=none"):
        recomputed_modules(model, ALL)


def test_blocks_of_compiled_layers_are_refused() -> None:
    assert possible_levels(tiny.model(), compiled=True) == [NONE, ALL]
    with pytest.raises(ValueError, match=r"training\.activation_checkpointing=blocks"):
        TrainingConfig(compile=True, activation_checkpointing="blocks")


def exhausting(model: Any, fits: ActivationCheckpointing) -> None:
    """Let the model's first norm run out of memory until activations of `fits` are recomputed."""
    needed = recomputed_modules(model, fits)

    def check(module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and "forward" not in vars(needed[0]):
            raise torch.OutOfMemoryError("CUDA out of memory")

    # In the second layer: the first one has run by then.
    model.model.layers[1].input_layernorm.register_forward_pre_hook(check)


@pytest.mark.parametrize(("fits", "levels"), [(BLOCKS, [BLOCKS]), (ALL, [BLOCKS, ALL])])
def test_a_first_microbatch_that_does_not_fit_is_repeated_at_the_next_level(
    fits: ActivationCheckpointing, levels: list[ActivationCheckpointing]
) -> None:
    """The update is that of a policy that had this level from the start."""
    chosen: list[ActivationCheckpointing] = []
    budget = {"token_budget": 100}  # several microbatches
    expected = policy(training={**budget, "activation_checkpointing": fits})
    trained = policy(training=budget)
    trained.on_level = chosen.append
    exhausting(trained.model, fits)
    for seed in range(2):
        metrics = train_policy(expected, random_groups(seed))
        assert train_policy(trained, random_groups(seed)) == pytest.approx(metrics, nan_ok=True)
    assert chosen == levels and trained.level is fits
    for key, weight in expected.model.state_dict().items():
        assert torch.equal(weight, trained.model.state_dict()[key]), key
    assert trained.take_work() == expected.take_work()  # the tries that did not fit do not count


def test_a_level_that_was_given_stays_and_the_error_names_the_next_one() -> None:
    trained = policy(training={"activation_checkpointing": "none"})
    exhausting(trained.model, BLOCKS)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train_policy(trained, random_groups(0))
    assert "training.activation_checkpointing=blocks" in "".join(raised.value.__notes__)
    assert trained.level is NONE


def test_memory_that_runs_out_after_the_first_step_changes_nothing() -> None:
    chosen: list[ActivationCheckpointing] = []
    trained = policy()
    trained.on_level = chosen.append
    train_policy(trained, random_groups(0))
    exhausting(trained.model, BLOCKS)
    with pytest.raises(torch.OutOfMemoryError):
        train_policy(trained, random_groups(1))
    assert not chosen


def test_a_gpu_keeps_a_reserve_beside_the_peak() -> None:
    gib = 2**30
    assert 1.5 * gib == RESERVE
    assert not lacks_reserve(8 * gib, gib, int(9.5 * gib))
    assert lacks_reserve(8 * gib + 1, gib, int(9.5 * gib))
    assert lacks_reserve(8 * gib, 2 * gib, int(9.5 * gib))  # another process has 2 GiB
