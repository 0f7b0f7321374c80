"""Optimizers: what each weight is updated by, float32 copies, exact states, schedules."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from training_cases import policy, random_groups, weights
from transformers import Qwen3_5ForCausalLM

from agenttrain.engines.mixers import keep_float32
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.checkpoint_files import CheckpointError
from agenttrain.training.config import OptimizerConfig, Schedule, optimizer_settings
from agenttrain.training.optimizers import MasterWeights, Together, build_optimizer, learning_rate
from agenttrain.utils.model_path import model_folder


def scheduled(**settings: Any) -> OptimizerConfig:
    return optimizer_settings({"name": "adamw", **settings})


def with_gradients(model: torch.nn.Module) -> torch.nn.Module:
    """Every weight gets a gradient of its own, the same for the same name and shape."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(index)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


def test_muon_updates_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    settings = {"lr": 0.01, "weight_decay": 0.1}
    model = with_gradients(tiny.model())
    optimizer = build_optimizer(model, optimizer_settings({"name": "muon", **settings}))
    assert isinstance(optimizer, Together)
    optimizer.step()

    other = with_gradients(tiny.model())
    named = dict(other.named_parameters())
    inner = [n for n in named if n.startswith("model.layers.") and named[n].ndim == 2]
    assert len(inner) == 2 * 7  # q k v o, gate up down
    torch.optim.Muon(
        [named[n] for n in inner], **settings, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    ).step()
    rest = [p for n, p in named.items() if n not in inner]
    torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.99),
    ).step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, named[name]), name


def test_a_learning_rate_set_in_the_groups_reaches_every_part() -> None:
    model = with_gradients(tiny.model())
    optimizer = build_optimizer(model, optimizer_settings({"name": "muon", "lr": 1.0}))
    optimizer.load_state_dict(optimizer.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_small_updates_of_bfloat16_weights_add_up_in_their_float32_copies() -> None:
    model = tiny.model().to(torch.bfloat16)
    weight = model.model.layers[0].mlp.gate_proj.weight
    with torch.no_grad():
        weight.fill_(1.0)
    optimizer = build_optimizer(model, optimizer_settings({"name": "adamw", "lr": 0.0005}))
    assert isinstance(optimizer, MasterWeights)
    seen = []
    for _ in range(16):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None
        seen.append(weight[0, 0].item())
    # Equal gradients: AdamW moves by lr each time, 16 x 0.0005 = 0.008. Just below 1 bfloat16's
    # numbers are 1/256 = 0.0039 apart: 0.992 is nearest to 1 - 2/256 = 0.9921875.
    assert seen[0] == 1.0, "one update alone is lost in rounding"
    assert seen[-1] == 0.9921875


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    model = tiny.model().to(torch.bfloat16)
    weight = model.model.layers[0].mlp.gate_proj.weight
    with torch.no_grad():
        weight.zero_()
    optimizer = build_optimizer(model, optimizer_settings({"name": "sgd", "lr": 1.0}))
    assert isinstance(optimizer, MasterWeights)
    for value in (256.0, 1.0, 1.0, 1.0):
        # From 256 on bfloat16's numbers are 2 apart: 256 + 1 would be 256 each time.
        weight.grad = torch.full_like(weight, value)
        optimizer.fold()
        assert weight.grad is None
    optimizer.step()
    (copy,) = [copy for mine, copy in optimizer.pairs if mine is weight]
    assert copy[0, 0].item() == -259.0
    assert weight[0, 0].item() == -260.0, "rounded to even"
    assert copy.grad is None


def test_an_update_of_bfloat16_weights_takes_the_exact_sum_of_its_microbatches() -> None:
    trained = policy(
        tiny.model().to(torch.bfloat16),
        training={"token_budget": 1},
        name="sgd",
        lr=0.5,
        max_grad_norm=1e9,
    )
    weight = trained.model.model.layers[1].mlp.down_proj.weight
    seen: list[torch.Tensor] = []
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.float()))
    optimizer = trained.optimizer.optimizer
    (copy,) = [copy for mine, copy in optimizer.pairs if mine is weight]
    before = copy.detach().clone()
    train_policy(trained, random_groups(3))
    assert len(seen) > 4, "each rollout with an advantage is a microbatch"
    total = sum(seen[1:], seen[0])
    assert torch.equal(copy.detach(), before - 0.5 * total)
    in_bfloat16 = sum((g.bfloat16() for g in seen[1:]), seen[0].bfloat16()).float()
    assert not torch.equal(in_bfloat16, total)


def test_a_run_with_other_weights_in_bfloat16_is_not_resumed() -> None:
    """A hybrid's decays are float32 on one process, and bfloat16 under FSDP2."""
    hybrid = Qwen3_5ForCausalLM.from_pretrained(
        model_folder("bundled:shop_hybrid"), dtype=torch.bfloat16
    )
    saved = policy(deepcopy(hybrid)).state_dict()
    keep_float32(hybrid)
    with pytest.raises(CheckpointError, match=r"distributed\.name"):
        policy(hybrid).load_state_dict(saved)


def test_a_resumed_bfloat16_run_goes_on_from_the_copies(tmp_path: Path) -> None:
    def fresh():
        return policy(tiny.model().to(torch.bfloat16), lr=2e-5)

    whole = fresh()
    for seed in range(4):
        train_policy(whole, random_groups(seed))
    first = fresh()
    for seed in range(2):
        train_policy(first, random_groups(seed))
    Checkpoints(tmp_path, tokenizer=tiny.tokenizer(), keep=1).save(first, step=2)
    resumed = fresh()
    Checkpoints(tmp_path, tokenizer=tiny.tokenizer(), keep=1).load_latest(resumed)
    for seed in range(2, 4):
        train_policy(resumed, random_groups(seed))
    copies = resumed.optimizer.state_dict()["masters"]
    for expected, copy in zip(whole.optimizer.state_dict()["masters"], copies, strict=True):
        assert torch.equal(expected, copy)
    assert any(not torch.equal(c, c.bfloat16().float()) for c in copies), "finer than the weights"
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


def test_activation_checkpointing_changes_memory_and_nothing_else() -> None:
    levels = ("none", "blocks", "all")
    plain, *others = (policy(training={"activation_checkpointing": level}) for level in levels)
    kept = [saved_bytes(trained) for trained in (plain, *others)]
    assert kept[2] < kept[0] / 2 and kept[2] < kept[1] < 0.9 * kept[0]
    for seed in range(2):
        expected = train_policy(plain, random_groups(seed))
        for trained in others:
            found = train_policy(trained, random_groups(seed))
            assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


def saved_bytes(trained) -> int:
    """Bytes that a forward pass keeps for the backward pass."""
    total = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        train_policy(trained, random_groups(9))
    return total


@pytest.mark.parametrize(
    ("schedule", "options", "expected"),
    [
        (Schedule.constant, {}, [0.5, 1, 1, 1, 1, 1]),
        (Schedule.linear, {}, [0.5, 1, 0.8, 0.6, 0.4, 0.2]),
        # (1 + cos(pi k / 5)) / 2 for k = 0 … 4
        (Schedule.cosine, {}, [0.5, 1, 0.904508, 0.654508, 0.345492, 0.095492]),
        # (1 - k / 5)^2 (1 - 1e-7) + 1e-7, which rounds away
        (Schedule.polynomial, {"power": 2.0, "lr_end": 0.0}, [0.5, 1, 0.64, 0.36, 0.16, 0.04]),
        (Schedule.cosine_with_min_lr, {"min_lr": 1.0}, [0.5, 1, 1, 1, 1, 1]),
        # 2 of 7 at the end: 1 until step 5, then (1 + cos(pi / 2)) / 2
        (Schedule.warmup_stable_decay, {"num_decay_steps": 2}, [0.5, 1, 1, 1, 1, 0.5]),
    ],
)
def test_schedules(schedule: Schedule, options: dict, expected: list[float]) -> None:
    config = scheduled(lr=1.0, warmup_steps=2, schedule=schedule, schedule_options=options)
    rates = [learning_rate(config, step, 6) for step in range(1, 7)]
    assert rates == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("schedule", "options", "problem"),
    [
        (
            Schedule.cosine_with_min_lr,
            {"min_lr": 0.02},
            "min_lr=0.02: must be at most optimizer.lr",
        ),
        (Schedule.cosine_with_min_lr, {"min_lr_rate": 1.5}, "min_lr_rate=1.5: must be at most 1"),
        (
            Schedule.warmup_stable_decay,
            {"num_decay_steps": 2, "min_lr_ratio": 2},
            "min_lr_ratio=2: must be at most 1",
        ),
        (Schedule.polynomial, {"lr_end": 0.01}, "lr_end=0.01: must be below optimizer.lr=0.01"),
        (Schedule.inverse_sqrt, {"timescale": 0}, "timescale=0: must be more than 0"),
        (Schedule.cosine_with_min_lr, {"min_lr": 0.01}, None),
        (Schedule.polynomial, {}, None),
        (Schedule.inverse_sqrt, {"timescale": 0.5}, None),
    ],
)
def test_schedules_that_would_not_fall_are_refused(
    schedule: Schedule, options: dict, problem: str | None
) -> None:
    section = {"lr": 0.01, "schedule": schedule, "schedule_options": options}
    if problem is not None:
        with pytest.raises(ValueError, match=re.escape(f"optimizer.schedule_options.{problem}")):
            scheduled(**section)
        return
    config = scheduled(**section)
    rates = [learning_rate(config, step, 6) for step in range(1, 7)]
    assert rates[0] <= 0.01 and rates == sorted(rates, reverse=True)


def test_the_end_of_a_polynomial_schedule_has_a_default_that_a_rate_may_be_below() -> None:
    message = "optimizer.schedule_options.lr_end=1e-07: must be below optimizer.lr=1e"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        scheduled(lr=1e-7, schedule=Schedule.polynomial)
