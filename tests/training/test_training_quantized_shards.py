"""FSDP2 over a base in 4 bits: two real processes, over gloo, do what one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from process_quantized import IDS, SIZES, model, told
from torchrun import torchrun
from transformers import AutoModelForCausalLM

from agenttrain.commands.export import export
from agenttrain.runs.memory_plan import Sizes
from agenttrain.training.config import LoraSettings, ModelConfig
from agenttrain.training.footprint import weight_bytes
from agenttrain.training.quantization import numbers_of, scale_bytes
from agenttrain.training.sharding import layers
from agenttrain.training.weight_sync import policy_logprobs
from agenttrain.training.world import World
from agenttrain.utils.model_path import BASE_QUANTIZATION

pytest.importorskip("bitsandbytes", reason="pip install 'agenttrain[4bit]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WAYS = ["slices", "whole", "32-bit scales"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models."""
    path = tmp_path_factory.mktemp("quantized")
    for name in SIZES:
        model(name).save_pretrained(path / name)
        tiny.tokenizer().save_pretrained(path / name)
    return path


@pytest.fixture(scope="module")
def of_two(folder: Path) -> dict:
    """What the first of two processes tells."""
    return torchrun("process_quantized.py", str(folder))[0]


@pytest.fixture(scope="module")
def of_one(folder: Path) -> dict:
    """What one process finds, by whether its scales are in 8 bits."""
    return {double: told(folder, World(), "one", double=double) for double in (True, False)}


def sizes(folder: Path, name: str, *, double: bool = True) -> Sizes:
    """The plan's sizes of a model."""
    settings = {"quantization": "nf4", "double_quantization": double, "lora": LoraSettings(rank=4)}
    return Sizes(ModelConfig(path=str(folder / name), **settings))


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_are_one(folder: Path, of_two: dict, of_one: dict, way: str) -> None:
    double = way != "32-bit scales"
    two, one = of_two[way], of_one[double]
    # Each process has its rows of the bytes: 65 and 64 of 129. Indices and scales are one's.
    assert two["rows"] == [[0, 65], [65, 129]]
    assert two["base"] == one["base"]
    for step in range(2):
        assert two["metrics"][step]["loss"] == pytest.approx(one["metrics"][step]["loss"], rel=1e-5)
        ((first,), (second,)) = two["gradients"][step], one["gradients"][step]
        for name, gradient in second.items():
            difference = torch.tensor(first[name]) - torch.tensor(gradient)
            assert difference.norm() <= 1e-5 * torch.tensor(gradient).norm(), name
    # What an engine samples from in the process, and what others are sent, merged.
    assert two["sampled"] == one["sampled"]
    assert two["sent"].keys() == one["sent"].keys()
    for name, weight in one["sent"].items():
        assert two["sent"][name] == pytest.approx(weight, rel=1e-5, abs=1e-6), name
    assert two["probe"] == pytest.approx(one["probe"], abs=1e-5)
    assert two["resumed"] and one["resumed"]


@pytest.mark.parametrize("way", WAYS)
def test_a_process_holds_its_part_and_all_scales(folder: Path, of_two: dict, way: str) -> None:
    double = way != "32-bit scales"
    planned = sizes(folder, "model", double=double)
    # In each of 2 layers q and o have 128 x 128 numbers, k and v 64 x 128, gate and up 129 x 128.
    numbers = 2 * [*2 * [128 * 128], *2 * [64 * 128], *2 * [129 * 128]]
    assert sorted(planned.in_4_bits) == sorted(numbers)
    scales = sum(scale_bytes(count, double=double) for count in numbers)
    assert of_two[way]["beside"] == [scales, scales] == 2 * [planned.scales]
    held = of_two[way]["held"]
    assert sum(held) == planned.held - scales
    assert held == 2 * [pytest.approx((planned.held - scales) / 2, rel=0.02)]


def test_at_most_one_weight_is_dequantised(folder: Path, of_two: dict) -> None:
    """Beside weights that are gathered: those outside layers, and two layers in 4 bits."""
    stored = sizes(folder, "wide").stored
    largest = max(numbers_of(stored).values()) * 4
    assert largest == 256 * 1024 * 4
    layer = max(map(weight_bytes, layers(stored)))
    outside = weight_bytes(stored) - 4 * layer
    # A layer is gathered into a buffer of all processes, and copied out of it.
    assert largest <= max(of_two["peak"]) <= outside + 3 * layer + 1.5 * largest


def test_an_export_of_two_processes_computes_what_they_trained(
    folder: Path, of_two: dict, tmp_path: Path
) -> None:
    checkpoint = folder / "slices-True" / "latest"
    export(checkpoint, tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    probe = policy_logprobs(exported, IDS)
    assert probe == pytest.approx(of_two["slices"]["probe"], abs=1e-5)
    export(checkpoint, tmp_path / "adapters", form="adapter")
    saved = json.loads((tmp_path / "adapters" / BASE_QUANTIZATION).read_text())
    assert saved == {"quantization": "nf4", "double_quantization": True}


def test_a_copy_whose_scales_differ_is_refused(folder: Path, of_two: dict) -> None:
    assert (
        of_two["refused"]
        .removeprefix("rank 0: WrongWeights: ")
        .startswith(
            f"rank 1: {folder}/copied/model.safetensors: its copy of "
            "model.layers.1.self_attn.q_proj.weight differs from that of rank 0"
        )
    )
