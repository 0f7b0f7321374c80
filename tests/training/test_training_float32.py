"""Decay rates, skips and step sizes of recurrent layers are computed with in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from recurrent_families import tiny_recurrent
from training_cases import policy, with_tool

from agenttrain.engines.mixers import stays_float32
from agenttrain.trainer import train_policy
from agenttrain.training.sharding import Sharding, full_tensor
from agenttrain.training.sliced_weights import SlicedWeights, empty_model


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left behind."""
    AcceleratorState._reset_state()
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state()


@pytest.mark.parametrize(
    ("name", "level", "sliced"),
    [
        ("Qwen3_5", "none", False),
        ("Qwen3_5", "none", True),
        ("GraniteMoeHybrid", "all", False),
        ("GraniteMoeHybrid", "blocks", False),
        ("FalconH1", "none", False),
    ],
)
def test_fsdp2_in_bf16_rounds_none_of_them(
    name: str, level: str, sliced: bool, tmp_path: Path, alone: None
) -> None:
    """Other weights are gathered in bf16. In bf16 a decay differs by up to 0.8 %."""
    model = tiny_recurrent(name)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if stays_float32(key):  # a number of 24 bits, as training makes them
                weight.add_(torch.rand(weight.shape, generator=generator) * 1e-3)
    expected = {key: w.detach().clone() for key, w in model.named_parameters()}
    processes: dict[str, Any] = {"sharding": Sharding()}
    if sliced:  # each process reads its part of the files
        model.save_pretrained(tmp_path)
        model = empty_model(tmp_path, torch.float32)
        processes["weights"] = SlicedWeights(model, tmp_path, 0)
    trained = policy(
        model,
        lr=1e-3,
        training={"mixed_precision": "bf16", "activation_checkpointing": level},
        processes=processes,
    )
    seen: dict[str, torch.Tensor] = {}

    def record(prefix: str, module: Any) -> None:
        for key, weight in module.named_parameters(prefix, recurse=False):
            seen[key] = weight.detach().clone()

    hooks = [
        module.register_forward_pre_hook(lambda module, _, prefix=prefix: record(prefix, module))
        for prefix, module in trained.model.named_modules()
    ]
    trained.probe_logprobs([7, 8, 9, 20, 21, 2])
    for hook in hooks:
        hook.remove()
    kept = {key for key in seen if stays_float32(key)}
    assert kept
    assert {key for key, weight in seen.items() if weight.dtype is torch.float32} == kept
    for key in kept:
        assert seen[key].equal(expected[key])

    train_policy(trained, [[with_tool(sample=n, reward=float(n)) for n in range(2)]])
    for key, weight in trained.model.named_parameters():
        if stays_float32(key):
            assert weight.dtype is torch.float32
            assert not full_tensor(weight.detach()).equal(expected[key]), key
