"""Adapters of experts: which weights get them, their merge, checkpoints, what engines are sent."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from packing_families import FAMILIES, tiny_family
from peft import LoraConfig
from recurrent_families import LACKING, family_params, tiny_recurrent
from safetensors.torch import load_file, save_file
from training_cases import policy, rollout
from transformers import AutoModelForCausalLM, PreTrainedModel

from agenttrain.commands.export import export
from agenttrain.engines.config import Sampling
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.vllm.config import VllmSettings
from agenttrain.engines.vllm.setup import engine_arguments
from agenttrain.runs.loading import check_model
from agenttrain.runs.memory_plan import Sizes
from agenttrain.runs.sampling import adapters_are_sent, engine_inputs
from agenttrain.settings.async_checks import async_note
from agenttrain.settings.checks import validate
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.settings.engine_checks import sends_adapters
from agenttrain.settings.run_config import RunConfig
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.config import LoraSettings, ModelConfig, WeightSyncConfig
from agenttrain.training.lora import (
    adapted_weights,
    adapter_weights,
    add_lora,
    describe_adapters,
    load_saved_adapters,
    save_adapter_config,
    zero_matrix,
)
from agenttrain.training.merge_check import WrongMerge, check_merging
from agenttrain.training.sharding import Sharding
from agenttrain.training.sliced_weights import empty_model, load_whole
from agenttrain.training.weight_sync import (
    checkpoint_weights,
    named_weights,
    policy_logprobs,
    sync,
)
from agenttrain.types import ConfigError, Origin

EXPERTS = ["Qwen3Moe", "Qwen3_5Moe", "Lfm2Moe", "GptOss", "GraniteMoeHybrid"]
TEXT = [7, 8, 9, 20, 21, 22, 2, 30, 31, 12, 40, 41]


def build(family: str) -> PreTrainedModel:
    return tiny_family(family) if family in FAMILIES else tiny_recurrent(family)


def saved(folder: Path, family: str) -> Path:
    """A folder of a family's tiny model, as a user's."""
    build(family).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def adapted(
    folder: Path, dtype: torch.dtype = torch.float32, **settings: object
) -> PreTrainedModel:
    model = load_whole(folder, dtype).eval()
    torch.manual_seed(0)
    add_lora(model, LoraSettings(rank=4, alpha=8, **settings))
    return model


def draw(model: PreTrainedModel) -> None:
    """Adapters start as nothing: give each one an effect."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in adapted_weights(model).values():
            matrix = zero_matrix(layer)
            matrix.copy_(torch.randn(matrix.shape, generator=generator) * 0.1)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([TEXT]), use_cache=False).logits


def ends(model: PreTrainedModel) -> set[str]:
    """Names of what has adapters: packed weights as experts.NAME, modules without their place."""
    names = (name.removesuffix(".weight").split(".") for name in adapted_weights(model))
    return {".".join(name[-2:]) if name[-2] == "experts" else name[-1] for name in names}


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
PACKED = {"experts.gate_up_proj", "experts.down_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
DELTA = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
TAKEN = "peft takes it for a packed expert"
ROUTER = {"shared_expert_gate": "a router"}
REFUSED = {"out_proj": "peft refuses it beside Mamba"}
CHOICES: dict[str, tuple[set[str], dict[str, str]]] = {
    "Qwen3": (ATTENTION | MLP, {}),
    "Qwen3Moe": (ATTENTION | PACKED, {}),
    "Qwen3_5Moe": (ATTENTION | DELTA | MLP | PACKED, ROUTER),
    "Qwen3Next": (
        ATTENTION | {"in_proj_qkvz", "in_proj_ba", "out_proj"} | PACKED,
        {**ROUTER, **dict.fromkeys(MLP, TAKEN)},
    ),
    "Lfm2Moe": (
        {"q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"} | PACKED,
        {},
    ),
    "GptOss": (ATTENTION | PACKED, {}),
    "GraniteMoeHybrid": (
        ATTENTION | {"in_proj", "out_proj", "input_linear", "output_linear"} | PACKED,
        {},
    ),
    "NemotronH": (
        ATTENTION | {"in_proj", "up_proj", "down_proj", "experts.up_proj", "experts.down_proj"},
        REFUSED,
    ),
    "FalconH1": (ATTENTION | {"in_proj"} | MLP, REFUSED),
    "Glm4Moe": (ATTENTION | PACKED, dict.fromkeys(MLP, TAKEN)),
}
"""Family -> what `all-linear` adapts, and what it leaves out."""


@pytest.mark.parametrize("family", family_params(CHOICES))
def test_all_linear_means_what_works_in_the_family(family: str) -> None:
    model = build(family)
    targets = add_lora(model, LoraSettings(rank=4))
    expected, left_out = CHOICES[family]
    assert ends(model) == expected
    assert targets is not None and targets.left_out == left_out
    named, *none = describe_adapters(model, targets).split("; none: ")
    assert set(named.removeprefix("adapters of rank 4: ").split(", ")) == expected
    reasons = {f"{name} ({reason})" for name, reason in left_out.items()}
    assert {reason for text in none for reason in text.split(", ")} == reasons
    # One rank: a packed weight has a matrix of rank 4 for each of its 4 experts.
    ranks = {layer.lora_A["default"].weight.shape[0] for layer in adapted_weights(model).values()}
    assert ranks == ({4, 16} if any("experts" in name for name in expected) else {4})


def test_a_router_that_is_a_linear_layer_gets_no_adapters() -> None:
    torch.manual_seed(0)
    model = tiny_family("Qwen3Moe")
    block = model.model.layers[0].mlp
    block.router = torch.nn.Linear(32, 4)  # a score for each of 4 experts
    targets = add_lora(model, LoraSettings(rank=4))
    assert targets is not None and targets.left_out == {"router": "a router"}


def test_target_parameters_are_the_packed_weights_of_experts() -> None:
    for settings, expected in [
        ({"target_parameters": []}, ATTENTION),
        ({"target_parameters": ["experts.down_proj"]}, {*ATTENTION, "experts.down_proj"}),
        (
            {"targets": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
            {"q_proj", "experts.gate_up_proj"},
        ),
        ({"targets": [], "target_parameters": ["experts.down_proj"]}, {"experts.down_proj"}),
        ({"targets": ["q_proj"]}, {"q_proj"}),
    ]:
        model = tiny_family("Qwen3Moe")
        add_lora(model, LoraSettings(rank=2, **settings))
        assert ends(model) == expected


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        (
            "Qwen3Moe",
            {"target_parameters": ["experts.down_prj"]},
            r"target_parameters=\[experts.down_prj\]: .*did you mean 'experts.down_proj'",
        ),
        (
            "Qwen3Moe",
            {"target_parameters": ["gate.weight"]},
            r"target_parameters=\[gate.weight\]: .* it has experts.gate_up_proj",
        ),
        (
            "Qwen3",
            {"target_parameters": ["experts.down_proj"]},
            r"target_parameters=\[experts.down_proj\]: Qwen3ForCausalLM has no packed experts",
        ),
        ("Qwen3Next", {"targets": ["down_proj"]}, r"targets=\[down_proj\]: .*target_parameters"),
        (
            "Qwen3Moe",
            {"targets": ["q_proj", "gate_proj"]},
            r"without a module gate_proj.*target_parameters=\[experts.down_proj,experts.gate_up_",
        ),
        ("Qwen3Moe", {"targets": ["q_proj", "experts"]}, r"without a module experts.*parameters="),
        ("FalconH1", {"targets": ["out_proj"]}, r"targets=\[out_proj\]: .*[Ii]ncompatible"),
    ],
)
def test_targets_that_cannot_be_adapted_are_refused(
    family: str, settings: dict[str, Any], message: str
) -> None:
    if family in LACKING:
        pytest.skip("not in this transformers")
    with pytest.raises(ValueError, match=message):
        add_lora(build(family), LoraSettings(rank=2, **settings))


@pytest.mark.parametrize("family", EXPERTS)
def test_new_adapters_are_merged_under_the_names_of_the_files(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", family)
    model = adapted(folder)
    draw(model)
    expected = logits(model)
    scale = expected.abs().max()
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (logits(plain) - expected).abs().max() / scale > 0.01
    stored, sent = load_file(folder / "model.safetensors"), dict(checkpoint_weights(model))
    assert stored.keys() <= sent.keys() <= {*stored, "lm_head.weight"}
    kept = {name: sent[name].contiguous().clone() for name in stored}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    merged = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (logits(merged) - expected).abs().max() / scale < 1e-4


def groups(seed: int) -> list[list[Any]]:
    """A group of two rollouts of ids below the tiny models' 64."""
    ids = [[20 + seed, 2], [30 + seed, 2]]
    spans = [[(Origin.prompt, [7, 8, 9]), (Origin.sampled, sampled)] for sampled in ids]
    return [[rollout(s, sample=n, reward=float(n)) for n, s in enumerate(spans)]]


@pytest.mark.parametrize("family", EXPERTS)
def test_checkpoints_resume_to_the_bit_and_are_exported(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", family)

    def saver() -> Checkpoints:
        return Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1)

    trained = policy(adapted(folder), lr=1e-2)
    for seed in range(2):
        train_policy(trained, groups(seed))
    path = saver().save(trained, step=1)
    resumed = policy(adapted(folder), lr=1e-2)
    saver().load_latest(resumed)
    for each in (trained, resumed):
        train_policy(each, groups(2))
    state = resumed.model.state_dict()
    assert all(torch.equal(t, state[name]) for name, t in trained.model.state_dict().items())

    expected = logits(policy_at(path, folder))
    assert not torch.equal(expected, logits(AutoModelForCausalLM.from_pretrained(folder).eval()))
    export(path, tmp_path / "merged", form="merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    export(path, tmp_path / "adapter", form="adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    assert torch.equal(logits(loaded), expected)


def policy_at(checkpoint: Path, base: Path) -> PreTrainedModel:
    """The model of a checkpoint, as a run continues it."""
    model = load_whole(base, torch.float32).eval()
    load_saved_adapters(model, checkpoint)
    add_lora(model, LoraSettings(rank=4, alpha=8))
    return model


def test_loaded_adapters_of_other_experts_than_asked_for_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "Qwen3Moe")
    model = adapted(folder, targets=["q_proj"], target_parameters=["experts.down_proj"])
    write(model, tmp_path / "a")
    for asked in (None, ["experts.down_proj"]):
        base = load_whole(folder, torch.float32)
        load_saved_adapters(base, tmp_path / "a")
        add_lora(base, LoraSettings(rank=4, alpha=8, target_parameters=asked))
    base = load_whole(folder, torch.float32)
    load_saved_adapters(base, tmp_path / "a")
    with pytest.raises(ValueError, match=r"target_parameters=\[experts.gate_up_proj\]: model.path"):
        add_lora(base, LoraSettings(rank=4, alpha=8, target_parameters=["experts.gate_up_proj"]))


def write(model: PreTrainedModel, folder: Path) -> None:
    save_adapter_config(model, folder)
    save_file(adapter_weights(model), folder / "adapter_model.safetensors")


def test_ranks_of_packed_experts_are_loaded_without_a_warning(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "Qwen3Moe")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # peft's own "all-linear" gives the joined projections of an expert twice the rank.
        model.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"), "default")
    assert model.peft_config["default"].rank_pattern
    draw(model)
    write(model, tmp_path / "a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        continued = policy_at(tmp_path / "a", folder)
    assert torch.equal(logits(continued), logits(model.eval()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*EXPERTS, "Qwen3"])
def test_the_check_of_the_merge_leaves_the_policy_as_it_was(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = adapted(saved(tmp_path / "m", family), dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    check_merging(model, lambda: policy_logprobs(model, TEXT))
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_merged_adapters_of_embedding_and_head_pass_the_check(tmp_path: Path) -> None:
    targets = ["embed_tokens", "lm_head", "v_proj"]
    model = adapted(saved(tmp_path / "m", "Qwen3"), targets=targets)
    assert len(adapted_weights(model)) == 4
    check_merging(model, lambda: policy_logprobs(model, TEXT))


def test_an_adapter_without_effect_is_refused(tmp_path: Path) -> None:
    model = adapted(saved(tmp_path / "m", "Qwen3Moe"))
    # As a kernel does that reads the weight, without calling the module.
    for layer in model.model.layers:
        layer.self_attn.o_proj.forward = layer.self_attn.o_proj.base_layer.forward
    with pytest.raises(WrongMerge, match=r"layers.0.self_attn.o_proj.weight do not change"):
        check_merging(model, lambda: policy_logprobs(model, TEXT))


def test_an_adapter_that_is_more_than_a_product_is_refused(tmp_path: Path) -> None:
    model = load_whole(saved(tmp_path / "m", "Qwen3"), torch.float32).eval()
    # DoRA also scales each column, which the merge does not know.
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), "default")
    with pytest.raises(WrongMerge, match=r"q_proj.weight merged into the weights differ"):
        check_merging(model, lambda: policy_logprobs(model, TEXT))


class Copy:
    """An engine with a copy of the model."""

    max_context, takes_adapters, model_names, dtype = 64, False, True, torch.float32

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    async def update(self, weights: Any, version: int) -> None:
        self.model.load_state_dict(dict(weights))

    async def score(self, token_ids: list[int]) -> list[float]:
        return policy_logprobs(self.model, token_ids)

    async def sleep(self) -> None:
        pass


def test_the_first_sync_checks_the_merge_and_later_ones_do_not(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "Qwen3Moe")
    model = adapted(folder)
    engine = Copy(load_whole(folder, torch.float32).eval())
    trained = SimpleNamespace(model=model)
    probe = asyncio.run(sync(trained, engine, 1, WeightSyncConfig()))
    assert probe is not None and probe.gap.max < 1e-5
    draw(model)
    later = asyncio.run(sync(trained, engine, 2, WeightSyncConfig(), probe))
    assert later is not None and later.gap.max < 1e-3
    assert (later.engine_T - probe.engine_T).abs().max() > 0.01
    for layer in model.model.layers:
        layer.self_attn.o_proj.forward = layer.self_attn.o_proj.base_layer.forward
    with pytest.raises(WrongMerge):
        asyncio.run(sync(trained, engine, 1, WeightSyncConfig()))


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left behind."""
    AcceleratorState._reset_state()
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state()


def test_sharded_adapters_of_experts_pass_the_check_beside_float32_weights(
    tmp_path: Path, alone: None
) -> None:
    folder = saved(tmp_path / "m", "Qwen3_5Moe")
    model = adapted(folder, torch.bfloat16)
    trained = policy(model, lr=1e-3, processes={"sharding": Sharding()})
    before = dict(checkpoint_weights(trained.model))
    check_merging(trained.model, lambda: trained.probe_logprobs(TEXT))
    after = dict(checkpoint_weights(trained.model))
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert {t.dtype for n, t in after.items() if n.endswith("A_log")} == {torch.float32}
    train_policy(trained, groups(0))
    learned = dict(checkpoint_weights(trained.model))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in learned.items())


IN_FLOAT32 = re.compile(r"\.(A_log|D|dt_bias)$")


@pytest.mark.parametrize("family", ["Qwen3_5", "Qwen3_5Moe", "GraniteMoeHybrid"])
def test_decay_rates_skips_and_step_sizes_stay_in_float32(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", family)
    stored = load_file(folder / "model.safetensors")
    kept = {name for name in stored if IN_FLOAT32.search(name)}
    assert kept
    model = load_whole(folder, torch.bfloat16)
    assert model.dtype is torch.bfloat16
    empty = empty_model(folder, torch.bfloat16)
    for loaded in (model, empty):
        formats = {n: p.dtype for n, p in loaded.named_parameters()}
        assert {n for n, dtype in formats.items() if dtype is torch.float32} == kept
    uniform = load_whole(folder, torch.bfloat16, uniform=True)
    assert {p.dtype for p in uniform.parameters()} == {torch.bfloat16}
    # As they are in the file, also from a policy in float32 to an engine in bfloat16.
    for sender in (model, load_whole(folder, torch.float32)):
        sent = dict(named_weights(sender, torch.bfloat16))
        assert {n for n, t in sent.items() if t.dtype is torch.float32} == kept
        assert all(torch.equal(sent[name], stored[name]) for name in kept)
    assert (logits(model.eval()).float() - logits(build(family))).abs().mean() < 0.5


@pytest.mark.parametrize("family", ["Qwen3_5", "GraniteMoeHybrid"])
def test_a_model_in_two_formats_is_sampled_trained_and_resumed(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", family)

    def saver() -> Checkpoints:
        return Checkpoints(tmp_path / "c", tokenizer=tiny.tokenizer(), keep=1)

    async def sample(model: PreTrainedModel) -> None:
        engine = TransformersEngine(model, TransformersSettings(max_context=48, max_rows=2))
        completion = await engine.generate(TEXT, Sampling(max_tokens=4, seed=0), session="s")
        await engine.aclose()
        assert len(completion.token_ids) >= 1

    trained = policy(load_whole(folder, torch.bfloat16).eval(), lr=1e-2)
    asyncio.run(sample(trained.model))
    train_policy(trained, groups(0))
    saver().save(trained, step=1)
    resumed = policy(load_whole(folder, torch.bfloat16).eval(), lr=1e-2)
    saver().load_latest(resumed)
    for each in (trained, resumed):
        train_policy(each, groups(2))
    state = resumed.model.state_dict()
    stored = load_file(folder / "model.safetensors")
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, state[name])
        if IN_FLOAT32.search(name):
            assert tensor.dtype is torch.float32 and not torch.equal(tensor, stored[name])


def test_exports_keep_them_in_float32(tmp_path: Path) -> None:
    folder = saved(tmp_path / "m", "Qwen3_5Moe")
    for rank in (0, 4):
        model = load_whole(folder, torch.bfloat16)
        if rank:
            add_lora(model, LoraSettings(rank=rank))
        saver = Checkpoints(tmp_path / f"c{rank}", tokenizer=tiny.tokenizer(), keep=1)
        path = saver.save(policy(model), step=1)
        export(path, tmp_path / f"out{rank}", dtype="bfloat16")
        tensors = load_file(tmp_path / f"out{rank}" / "model.safetensors")
        for name, tensor in tensors.items():
            assert tensor.dtype is (torch.float32 if IN_FLOAT32.search(name) else torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "expected"),
    [("Qwen3_5", "float32"), ("GraniteMoeHybrid", "float32"), ("Lfm2", None), ("Qwen3", None)],
)
def test_vllm_keeps_recurrent_states_in_float32(
    family: str, expected: str | None, tmp_path: Path
) -> None:
    build(family).config.save_pretrained(tmp_path)
    arguments = engine_arguments(tmp_path, VllmSettings(), "bfloat16", 0, None, 0)
    assert arguments.get("mamba_ssm_cache_dtype") == expected


def composed(folder: Path, *words: str) -> RunConfig:
    with hydra_session(Source()):
        model = (f"model.path={folder}", "model.lora.rank=4", "engine=vllm_server")
        return compose_run([*model, *words], Source()).config


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ((), False),
        (("model.lora.targets=[q_proj]",), True),
        (("model.lora.target_parameters=[]",), True),
        (
            ("model.lora.targets=[q_proj]", "model.lora.target_parameters=[experts.down_proj]"),
            False,
        ),
    ],
)
def test_adapters_of_experts_are_sent_merged(
    words: tuple[str, ...], sent: bool, tmp_path: Path
) -> None:
    folder = saved(tmp_path, "Qwen3Moe")
    config = composed(folder, *words)
    inputs = engine_inputs(config, None, tmp_path, on_gpu=False, rank=0, verb="train")
    assert (inputs.adapters is not None) is sent
    assert sends_adapters(config, is_merged=Sizes(config.model).merges_adapters) is sent
    # Servers pause for merged weights alone, which the note on asynchronous training is about.
    ahead = composed(folder, *words, "async_training.max_staleness=1")
    assert (async_note(ahead, adapters_are_sent) is None) is sent
    forced = composed(folder, *words, "weight_sync.transport=lora")
    if sent:
        check_model(forced, "train")
    else:
        with pytest.raises(ConfigError, match=r"weight_sync\.transport=lora: .*target_parameters"):
            check_model(forced, "train")


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("weight_sync.mode=in_flight", "weight_sync.mode"),
        ("weight_sync.transport=nccl", "weight_sync.transport"),
        ("model.lora.rank=513", "model.lora.rank"),
    ],
)
def test_what_is_sent_decides_which_settings_have_an_effect(
    setting: str, key: str, tmp_path: Path
) -> None:
    """Merged weights pause servers and have any rank; adapters that are sent alone do not."""
    folder = saved(tmp_path, "Qwen3Moe")
    merged = composed(folder, setting)  # adapters on all linear layers and experts
    alone = composed(folder, setting, "model.lora.targets=[q_proj]")
    named = composed(folder, setting, "model.lora.target_parameters=[experts.down_proj]")
    # The settings alone do not tell for the first two: the architecture does.
    for config in (merged, alone, named):
        validate(config)
    check_model(merged, "train")
    check_model(named, "train")
    with pytest.raises(ConfigError) as refused:
        check_model(alone, "train")
    assert str(refused.value).startswith(f"{key}=")
    # For a model without experts they do.
    dense = composed(saved(tmp_path / "dense", "Qwen3"), setting)
    with pytest.raises(ConfigError) as refused:
        validate(dense)
    assert str(refused.value).startswith(f"{key}=")


def test_adapters_are_sent_merged_through_files(tmp_path: Path) -> None:
    config = composed(saved(tmp_path, "Qwen3"), "weight_sync.transport=files")
    assert (
        engine_inputs(config, None, tmp_path, on_gpu=False, rank=0, verb="train").adapters is None
    )
    assert not sends_adapters(config, is_merged=Sizes(config.model).merges_adapters)


def test_the_settings_name_what_has_no_effect() -> None:
    with pytest.raises(ValueError, match=r"target_parameters=\[experts.down_proj\]: has no"):
        ModelConfig(path="m", lora={"target_parameters": ["experts.down_proj"]})


@pytest.mark.parametrize("family", ["Qwen3Moe", "Qwen3_5Moe"])
def test_recomputed_layers_give_the_same_gradients(family: str, tmp_path: Path) -> None:
    folder = saved(tmp_path, family)
    learned = []
    for level in ("none", "blocks", "all"):
        training = {"activation_checkpointing": level}
        trained = policy(adapted(folder), lr=1e-2, training=training)
        for seed in range(2):
            train_policy(trained, groups(seed))
        learned.append({n: t.clone() for n, t in trained.model.state_dict().items()})
    assert any("experts" in name and "lora_B" in name and t.any() for name, t in learned[0].items())
    for name, tensor in learned[0].items():
        for recomputed in learned[1:]:
            torch.testing.assert_close(recomputed[name], tensor, rtol=1e-4, atol=1e-6)


def test_the_reference_is_the_model_without_adapters_of_experts(tmp_path: Path) -> None:
    model = adapted(saved(tmp_path, "Qwen3Moe"))
    trained = policy(model, algorithm={"kl": {"beta": 0.1}}, lr=1e-2)
    assert train_policy(trained, groups(0))["kl"] == pytest.approx(0, abs=1e-6)
    assert train_policy(trained, groups(1))["kl"] > 1e-6
