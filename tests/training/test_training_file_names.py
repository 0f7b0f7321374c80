"""Weights for engines: their names in the files of the model, and adapters of packed experts."""

from __future__ import annotations

import asyncio
import json
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import packing_families
import pytest
import tiny
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from encoder_families import ENCODERS, tiny_with_encoders
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from training_cases import policy, rollout
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import GroupWeightRename, revert_weight_conversion

from agenttrain.runs.loading import check_model
from agenttrain.runs.sampling import engine_inputs
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.settings.run_config import RunConfig
from agenttrain.trainer import train_policy
from agenttrain.training import file_names, weight_sync
from agenttrain.training.checkpoint_files import auto_class
from agenttrain.training.config import LoraSettings, WeightSyncConfig
from agenttrain.training.lora import (
    adapter_weights,
    add_lora,
    load_adapter,
    load_saved_adapters,
    merged,
    save_adapter_config,
)
from agenttrain.training.quantization import quantize
from agenttrain.training.sharding import Sharding
from agenttrain.training.weight_sync import (
    PolicyWeights,
    checkpoint_adapters,
    checkpoint_weights,
    named_weights,
    policy_logprobs,
    sync,
)
from agenttrain.types import ConfigError, Origin
from agenttrain.utils.model_path import MODELS

SIZES = {
    **{"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
DELTA_NET = {
    **{"head_dim": 8, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8},
    **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "shared_expert_intermediate_size": 16,
}
MAMBA = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1},
    **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16},
}
HYBRIDS = {
    "Qwen3_5Text": {**DELTA_NET},
    "Qwen3_5MoeText": {**DELTA_NET, **EXPERTS},
    "Qwen3Next": {**DELTA_NET, **EXPERTS},
    "OlmoHybrid": {name: value for name, value in DELTA_NET.items() if name != "head_dim"},
    "Lfm2": {"conv_L_cache": 3, "layer_types": ["conv", "full_attention"]},
    "Lfm2Moe": {
        **{"conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        "use_expert_bias": True,
    },
    "GraniteMoeHybrid": {
        **MAMBA,
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "NemotronH": {
        **{"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2},
        **{"conv_kernel": 4, "chunk_size": 16, "head_dim": 8, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
        **{"moe_shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "moe"]},
        "num_hidden_layers": None,
    },
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64},
}
"""transformers' configuration classes of families that the packing tests lack."""
VISION = {
    **{"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32},
    "out_hidden_size": 32,
}


def build(family: str) -> PreTrainedModel:
    """A random model of a family; with "-vision" one that has encoders of images too."""
    name = family.removesuffix("-vision")
    if name != family and name in ENCODERS:
        return tiny_with_encoders(name)
    if family in packing_families.FAMILIES:
        return packing_families.tiny_family(family)
    torch.manual_seed(0)
    settings = {**SIZES, **HYBRIDS[f"{name}Text" if name != family else name]}
    settings = {key: value for key, value in settings.items() if value is not None}
    if name != family:
        config = getattr(transformers, f"{name}Config")(text_config=settings, vision_config=VISION)
        return getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    config = getattr(transformers, f"{family}Config")(**settings)
    return AutoModelForCausalLM.from_config(config).float().eval()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("model*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


SEEING = (*(f"{name}-vision" for name in ENCODERS), "Qwen3_5Moe-vision")
FAMILIES = [*packing_families.FAMILIES, *HYBRIDS, *SEEING]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_names_that_are_sent_are_those_of_the_files(family: str, tmp_path: Path) -> None:
    build(family).save_pretrained(tmp_path)
    stored = tensors_in(tmp_path)
    model = auto_class(tmp_path).from_pretrained(tmp_path)
    sent = dict(checkpoint_weights(model))
    # A tied head is not in the files, and is sent all the same.
    assert stored.keys() <= sent.keys() <= {*stored, "lm_head.weight"}
    for name, tensor in stored.items():
        assert torch.equal(sent[name], tensor), name
    forms = PolicyWeights(model, torch.bfloat16).forms()
    cast = list(PolicyWeights(model, torch.bfloat16))
    assert [tuple(form) for form in forms] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in cast
    ]


def test_forms_hold_one_cast_copy_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    own_parts = weight_sync._own_parts

    def watched(*arguments: Any, **keywords: Any) -> Iterator[tuple[str, torch.Tensor]]:
        copies: list[weakref.ref[torch.Tensor]] = []
        for name, part in own_parts(*arguments, **keywords):
            copies.append(weakref.ref(part))
            yield name, part
            del part
            assert sum(copy() is not None for copy in copies) <= 1

    monkeypatch.setattr(weight_sync, "_own_parts", watched)
    forms = PolicyWeights(build("Qwen3"), torch.bfloat16).forms()
    assert len(forms) > 10 and {form.dtype for form in forms} == {torch.bfloat16}


def test_a_model_that_was_built_without_files_has_the_names_of_its_family(tmp_path: Path) -> None:
    model = build("Lfm2Moe")
    model.save_pretrained(tmp_path)
    names = {name for name, _ in checkpoint_weights(model)}
    assert names == {*tensors_in(tmp_path), "lm_head.weight"}
    assert "model.layers.1.feed_forward.experts.3.w2.weight" in names


def with_lora(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters that change its weights."""
    add_lora(model, LoraSettings(rank=2, targets=["q_proj"]))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(weight, 0.1)
    return model


def in_4_bits(model: PreTrainedModel) -> PreTrainedModel:
    """The model with adapters over a quantised base."""
    quantize(model, double=True)
    return with_lora(model)


def assert_sent_as_transformers_saves(model: PreTrainedModel) -> None:
    """Two syncs, of which the second finds its names in the table, send what transformers saves."""
    expected = revert_weight_conversion(model, dict(named_weights(model)))
    for _ in range(2):
        sent = list(checkpoint_weights(model))
        assert len(sent) == len(expected)
        for name, tensor in sent:
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("change", [lambda model: model, with_lora, in_4_bits])
@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "Lfm2Moe", "Qwen3_5-vision"])
@pytest.mark.parametrize("stored", [False, True])
def test_later_syncs_send_the_same_names(family: str, change, stored: bool, tmp_path: Path) -> None:
    model = build(family)
    if stored:
        model.save_pretrained(tmp_path)
        model = auto_class(tmp_path).from_pretrained(tmp_path)
    assert_sent_as_transformers_saves(change(model))


def test_names_follow_the_record_and_adapters_that_come_after_a_sync(tmp_path: Path) -> None:
    build("Qwen3_5-vision").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)  # the language model alone
    q_proj = "layers.1.self_attn.q_proj.weight"
    assert f"model.language_model.{q_proj}" in dict(checkpoint_weights(model))
    assert_sent_as_transformers_saves(with_lora(model))
    assert len(list(checkpoint_adapters(model))) == len(dict(checkpoint_adapters(model))) == 2
    model._weight_conversions = None  # as `add_lora` may set it
    assert f"model.{q_proj}" in dict(checkpoint_weights(model))
    assert_sent_as_transformers_saves(model)


def test_weights_whose_names_depend_on_others_are_converted_together() -> None:
    model = build("Qwen3")
    # transformers renames the second norm only where it has seen the first.
    files = [rf"layers.(\d+).norm{number}" for number in (0, 1)]
    norms = ("input_layernorm", "post_attention_layernorm")
    model._weight_conversions = [GroupWeightRename(files, [rf"layers.\1.{norm}" for norm in norms])]
    sent = dict(checkpoint_weights(model))
    assert {"model.layers.0.norm0.weight", "model.layers.1.norm1.weight"} <= sent.keys()
    assert_sent_as_transformers_saves(model)


def test_a_second_sync_searches_no_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("Qwen3Moe")
    list(checkpoint_weights(model))
    converted: list[str] = []

    def revert(model: PreTrainedModel, weights: dict) -> dict:
        converted.extend(weights)
        return revert_weight_conversion(model, weights)

    monkeypatch.setattr(file_names, "revert_weight_conversion", revert)
    list(checkpoint_weights(model))
    # Only weights that are converted: the experts of two layers.
    assert sorted(converted) == [
        f"model.layers.{layer}.mlp.experts.{kind}"
        for layer in range(2)
        for kind in ("down_proj", "gate_up_proj")
    ]


def packed(folder: Path, family: str) -> Path:
    """A folder of adapters of attention and of packed experts, over a base of the family."""
    base = folder / "base"
    build(family).save_pretrained(base)
    tiny.tokenizer().save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    names = [name for name, _ in model.named_parameters()]
    kinds = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "q_a_proj", "in_proj"],
        target_parameters=[kind for kind in kinds if any(name.endswith(kind) for name in names)],
        task_type="CAUSAL_LM",
    )
    model.add_adapter(config, "default")
    generator = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    adapters = folder / "adapters"
    save_adapter_config(model, adapters)
    save_file(adapter_weights(model), adapters / "adapter_model.safetensors")
    return adapters


def continued(adapters: Path) -> PreTrainedModel:
    """The model with the adapters of a folder, as a run loads it."""
    model = AutoModelForCausalLM.from_pretrained(adapters.parent / "base").eval()
    load_saved_adapters(model, adapters)
    add_lora(model, LoraSettings(rank=4, alpha=8))
    return model


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 40)[None], use_cache=False).logits


@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "Lfm2Moe", "NemotronH", "Qwen3_5MoeText"])
def test_adapters_of_packed_experts_are_merged_and_named(family: str, tmp_path: Path) -> None:
    adapters = packed(tmp_path, family)
    model, base = continued(adapters), adapters.parent / "base"
    expected = logits(model)
    scale = expected.abs().max()
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    assert (logits(plain) - expected).abs().max() / scale > 0.01
    # An engine of transformers, by the names in memory.
    plain.load_state_dict(dict(named_weights(model)))
    assert (logits(plain) - expected).abs().max() / scale < 1e-5
    # An engine that reads files.
    stored, sent = tensors_in(base), dict(checkpoint_weights(model))
    assert stored.keys() <= sent.keys() <= {*stored, "lm_head.weight"}
    (base / "model.safetensors").unlink()
    kept = {name: sent[name].contiguous().clone() for name in stored}
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    read = AutoModelForCausalLM.from_pretrained(base).eval()
    assert (logits(read) - expected).abs().max() / scale < 1e-5


def test_adapters_of_packed_experts_are_restored_and_exported(tmp_path: Path) -> None:
    adapters = packed(tmp_path, "Qwen3Moe")
    model = continued(adapters)
    expected = logits(model)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data.zero_()
    load_adapter(model, adapters)
    assert torch.equal(logits(model), expected)
    model, _ = merged(adapters, "auto")
    model.save_pretrained(tmp_path / "out")
    assert tensors_in(tmp_path / "out").keys() == tensors_in(tmp_path / "base").keys()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(exported), expected, rtol=1e-4, atol=1e-5)


def test_adapters_that_transformers_loaded_leave_the_names_of_the_family(tmp_path: Path) -> None:
    adapters = packed(tmp_path, "Qwen3Moe")
    model = AutoModelForCausalLM.from_pretrained(adapters)
    add_lora(model, LoraSettings(rank=4, alpha=8))
    assert dict(checkpoint_weights(model)).keys() == tensors_in(tmp_path / "base").keys()


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left behind."""
    AcceleratorState._reset_state()
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state()


def test_sharded_adapters_of_packed_experts_are_merged(tmp_path: Path, alone: None) -> None:
    adapters = packed(tmp_path, "Qwen3Moe")
    expected = dict(checkpoint_weights(continued(adapters)))
    trained = policy(continued(adapters), lr=1e-3, processes={"sharding": Sharding()})
    sent = dict(checkpoint_weights(trained.model))
    assert sent.keys() == expected.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
    pair = [
        rollout([(Origin.prompt, [7, 8, 9]), (Origin.sampled, [20 + n, 2])], sample=n, reward=n)
        for n in range(2)
    ]
    train_policy(trained, [pair])
    learned = dict(checkpoint_weights(trained.model))
    changed = {name for name, tensor in learned.items() if not torch.equal(tensor, sent[name])}
    assert any(".experts.0.down_proj." in name for name in changed)
    assert any(".experts.0.gate_proj." in name for name in changed)


def test_adapters_have_the_names_of_the_files_modules(tmp_path: Path) -> None:
    build("Qwen3_5-vision").save_pretrained(tmp_path)
    # The language model alone: its modules have other names in memory.
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    add_lora(model, LoraSettings(rank=2, targets=["q_proj"]))
    assert [name for name, _ in checkpoint_adapters(model)] == [
        f"base_model.model.model.language_model.layers.1.self_attn.q_proj.lora_{kind}.weight"
        for kind in "AB"
    ]
    # A checkpoint has the names that transformers and peft load.
    assert sorted(adapter_weights(model)) == [
        f"base_model.model.model.layers.1.self_attn.q_proj.lora_{kind}.weight" for kind in "AB"
    ]


class Receiver:
    """An engine with weights of its own, which keeps what it is sent."""

    max_context, takes_adapters, dtype = 64, False, torch.float32

    def __init__(self, model: PreTrainedModel, **more: bool) -> None:
        self.model = model
        self.received: dict[str, torch.Tensor] = {}
        vars(self).update(more)

    async def update(self, weights: object, version: int) -> None:
        self.received = dict(weights)

    async def score(self, token_ids: list[int]) -> list[float]:
        return policy_logprobs(self.model, token_ids)

    async def sleep(self) -> None:
        pass


def test_an_engine_gets_the_names_of_the_files_unless_it_wants_those_in_memory() -> None:
    model = build("Qwen3Moe")
    experts = "model.layers.0.mlp.experts"
    for more, some in {
        (): f"{experts}.0.up_proj.weight",
        ("model_names",): f"{experts}.down_proj",
    }.items():
        engine = Receiver(model, **dict.fromkeys(more, True))
        asyncio.run(sync(SimpleNamespace(model=model), engine, 1, WeightSyncConfig()))
        assert some in engine.received


def described(folder: Path, **keys: object) -> Path:
    """A folder of adapters of the bundled agent that has these keys in its description."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 32, "target_modules": ["q_proj"], **keys}
    config["base_model_name_or_path"] = str(MODELS / "shop")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file({"base_model.model.a": torch.zeros(1)}, folder / "adapter_model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODELS / "shop" / name, folder)
    return folder


def settings(folder: Path, *words: str) -> RunConfig:
    with hydra_session(Source()):
        model = (f"model.path={folder}", "model.lora.rank=4", "engine=vllm_server")
        return compose_run([*model, *words], Source()).config


@pytest.mark.parametrize(
    ("keys", "sent"),
    [
        ({}, True),
        ({"target_parameters": ["mlp.experts.down_proj"]}, False),
        ({"use_rslora": True}, False),
        ({"rank_pattern": {"q_proj": 2}}, False),
    ],
)
def test_adapters_that_vllm_would_read_otherwise_are_sent_merged(
    keys: dict, sent: bool, tmp_path: Path
) -> None:
    config = settings(described(tmp_path, **keys))
    inputs = engine_inputs(config, None, tmp_path, on_gpu=False, rank=0, verb="train")
    assert (inputs.adapters is not None) is sent
    check_model(config, "train")
    forced = settings(tmp_path, "weight_sync.transport=lora")
    if sent:
        check_model(forced, "train")
    else:
        key = next(iter(keys))
        with pytest.raises(ConfigError, match=rf"weight_sync\.transport=lora: .*\({key}="):
            check_model(forced, "train")


@pytest.mark.parametrize("keys", [{"use_dora": True}, {"modules_to_save": ["lm_head"]}])
def test_adapters_that_cannot_be_merged_are_refused_before_the_start(
    keys: dict, tmp_path: Path
) -> None:
    config = settings(described(tmp_path, **keys))
    with pytest.raises(
        ConfigError, match=rf"model\.path={tmp_path}: its adapters have {next(iter(keys))}="
    ):
        check_model(config, "train")
