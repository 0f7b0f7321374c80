"""Weights that are loaded whole: MXFP4, as gpt-oss has them, and files that miss or damage some."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

from agenttrain.runs.sampling import load_model
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.training.sliced_weights import WrongWeights, load_whole

EXPERTS = "model.layers.0.mlp.experts."


def quantized(folder: Path) -> torch.Tensor:
    """Save a gpt-oss model of one layer with 2 experts in MXFP4; return the bytes of one matrix."""
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=1,
        num_local_experts=2,
        num_experts_per_tok=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["full_attention"],
    )
    config.save_pretrained(folder)
    file = folder / "config.json"
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "embed_tokens", "lm_head"]
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    described = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(described | {"architectures": ["GptOssForCausalLM"]}))
    state = {n: p.bfloat16() for n, p in GptOssForCausalLM(config).state_dict().items()}
    for name in ("gate_up_proj", "down_proj"):
        experts, rows, columns = state.pop(EXPERTS + name).shape
        blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8)
        state[f"{EXPERTS}{name}_blocks"] = blocks
        state[f"{EXPERTS}{name}_scales"] = torch.full(blocks.shape[:3], 126, dtype=torch.uint8)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "tokenizer.json").touch()
    return state[f"{EXPERTS}gate_up_proj_blocks"]


def test_mxfp4_weights_are_dequantized_and_trained(tmp_path: Path) -> None:
    blocks = quantized(tmp_path)
    with hydra_session(Source()):
        words = ["experiment=shop", f"model.path={tmp_path}"]
        config = compose_run(words, Source()).config
    model = load_model(config)
    weight = model.model.layers[0].mlp.experts.gate_up_proj
    # Two numbers a byte, the lower half first: a sign, and one of eight sizes; 126 scales by 1/2.
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.stack([blocks & 15, blocks >> 4], -1).long().flatten(2)
    values = sizes[numbers & 7] * torch.where(numbers >= 8, -0.5, 0.5)
    assert torch.equal(weight, values.transpose(1, 2))
    model(torch.arange(8)[None]).logits.sum().backward()
    assert weight.grad.abs().sum() > 0
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())


def test_a_model_whose_files_miss_weights_is_not_trained_with_random_ones(tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").touch()
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    for name in ("mlp.up_proj", "self_attn.q_proj"):
        del state[f"model.layers.1.{name}.weight"]
    save_file(state, file, metadata={"format": "pt"})
    with hydra_session(Source()):
        config = compose_run(["experiment=shop", f"model.path={tmp_path}"], Source()).config
    with pytest.raises(WrongWeights) as raised:
        load_model(config)
    assert str(raised.value) == (
        f"{tmp_path}: none of its files holds model.layers.1.mlp.up_proj.weight and 1 more, of "
        "Qwen3ForCausalLM. Is config.json that of these files? Copy the whole model again"
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda weight: weight[:-1].contiguous(), "q_proj.weight has shape [31, 32], and by"),
        (lambda weight: weight.to(torch.int8), "q_proj.weight has the format I8, and config.json"),
        (None, "model.safetensors: is cut before the end of model.norm.weight; copy it again"),
    ],
    ids=["shape", "format", "cut"],
)
def test_files_that_are_not_the_models_are_refused(
    tmp_path: Path, damage: Callable[[torch.Tensor], torch.Tensor] | None, message: str
) -> None:
    tiny.model().save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if damage is None:
        file.write_bytes(file.read_bytes()[:-4])
    else:
        state, name = load_file(file), "model.layers.1.self_attn.q_proj.weight"
        save_file({**state, name: damage(state[name])}, file, metadata={"format": "pt"})
    with pytest.raises(WrongWeights) as raised:
        load_whole(tmp_path, torch.float32)
    assert message in str(raised.value)
