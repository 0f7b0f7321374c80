"""Bases in 4 bits: what is stored, what is multiplied, the update, engines, checkpoints, export."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from allocated import peak_bytes
from packing_families import tiny_family
from recurrent_families import tiny_recurrent
from safetensors.torch import save_file
from training_cases import policy, random_groups, rollout
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from agenttrain.commands.export import export
from agenttrain.engines.config import Sampling
from agenttrain.engines.mixers import stays_float32
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.runs.memory_plan import Sizes
from agenttrain.settings.checks import base_problems, validate
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.trainer import train_policy
from agenttrain.training.checkpoint import Checkpoints
from agenttrain.training.config import (
    ActivationCheckpointing,
    AdamWSettings,
    LoraSettings,
    ModelConfig,
)
from agenttrain.training.lora import (
    WEIGHTS_FILE,
    adapted_weights,
    adapter_parameters,
    adapter_weights,
    add_lora,
    merged,
    save_adapter_config,
)
from agenttrain.training.merge_check import WrongMerge, check_merging
from agenttrain.training.operations import count_operations
from agenttrain.training.optimizers import build_optimizer
from agenttrain.training.quantization import (
    check_quantizable,
    dequantize,
    describe_quantization,
    is_quantized,
    layers_to_quantize,
    nf4_bytes,
    quantize,
    quantized_layers,
    scales,
)
from agenttrain.training.recomputation import recomputed_modules, recomputing
from agenttrain.training.sliced_weights import load_whole
from agenttrain.training.weight_sync import named_weights, policy_logprobs
from agenttrain.types import ConfigError, Origin

pytest.importorskip("bitsandbytes", reason="pip install 'agenttrain[4bit]'")

TEXT = [7, 8, 9, 20, 21, 22, 2]
BLOCKS = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
"""Sizes of layers whose rows are whole blocks of 64 numbers."""
WIDE = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}


def plain() -> Qwen3ForCausalLM:
    """The tiny model, without adapters, whose layers can all be stored in 4 bits."""
    return tiny.model(**BLOCKS)


def in_4_bits(model: torch.nn.Module | None = None, *, double: bool = True, rank: int = 4):
    """The tiny model with adapters on a base in 4 bits."""
    model = plain() if model is None else model
    quantize(model, double=double)
    torch.manual_seed(0)
    add_lora(model, LoraSettings(rank=rank))
    return model


def as_linear():
    """The same adapters on linear layers of the numbers that the 4 bits stand for."""
    model = plain()
    quantize(model, double=True)
    dequantize(model)
    torch.manual_seed(0)
    add_lora(model, LoraSettings(rank=4))
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([TEXT])).logits


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of distinct storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def test_the_size_of_a_weight() -> None:
    # 4 x 64 numbers: 128 bytes, 4 scales, a table of 16 values.
    assert nf4_bytes(256, double=False) == 128 + 4 * 4 + 16 * 4
    # The scales in 8 bits, with one scale of their own, a mean, and a table of 256 values.
    assert nf4_bytes(256, double=True) == 128 + 4 + 4 + 4 + 256 * 4 + 16 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("double", [False, True])
def test_the_memory_is_that_of_the_plan(tmp_path: Path, dtype, double: bool) -> None:
    model = tiny.model(**WIDE).to(dtype)
    model.save_pretrained(tmp_path)
    in_4_bits(model, double=double)
    held = storage_bytes([*model.parameters(), *scales(model)])
    settings = ModelConfig(
        path=str(tmp_path),
        dtype=str(dtype).removeprefix("torch."),
        quantization="nf4",
        double_quantization=double,
        lora=LoraSettings(rank=4),
    )
    sizes = Sizes(settings)
    assert sizes.held == pytest.approx(held, rel=0.02)
    assert sizes.held < sizes.weights
    # 2 layers: q and o 128 x 128, k and v 64 x 128, three of 128 x 384
    assert sorted(sizes.in_4_bits) == sorted(2 * [*2 * [128**2], *2 * [64 * 128], *3 * [128 * 384]])


@pytest.mark.parametrize(
    ("make", "lora"),
    [
        (partial(tiny.model, **BLOCKS), LoraSettings(rank=4, targets=["q_proj", "lm_head"])),
        (partial(tiny_recurrent, "Jamba", **BLOCKS), LoraSettings(rank=4)),
    ],
    ids=["head", "Mamba"],
)
def test_the_plan_counts_the_layers_that_are_quantised(tmp_path: Path, make, lora) -> None:
    """Adapters of the head, and of a mixer's weights that a kernel reads, change nothing."""
    model = make(tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    quantize(model, double=True)
    stored = sorted(m.in_features * m.out_features for _, m in quantized_layers(model))
    sizes = Sizes(ModelConfig(path=str(tmp_path), quantization="nf4", lora=lora))
    assert sorted(sizes.in_4_bits) == stored


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_computes_what_its_dequantised_weight_does(dtype) -> None:
    model = plain().to(dtype)
    original = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    quantize(model, double=True)
    layer = model.model.layers[0].mlp.up_proj
    assert is_quantized(layer)
    inputs = torch.randn(5, layer.in_features, dtype=dtype, requires_grad=True)
    outputs = layer(inputs)
    gradient = torch.randn_like(outputs)
    (of_inputs,) = torch.autograd.grad(outputs, inputs, gradient)
    dequantize(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype is dtype
    assert torch.equal(outputs, inputs @ weight.T)
    assert torch.equal(of_inputs, gradient @ weight)
    # Half the widest step of the table, from -1 to -0.6962 of a scale, is 0.152 of the scale. The
    # scale in 8 bits is off by a few hundredths of itself.
    error = (weight - original).abs().max() / original.abs().max()
    assert 0 < error < 0.18


def test_layers_whose_rows_end_within_a_block_stay() -> None:
    """On a CPU with AVX512 bitsandbytes 0.50 would multiply them by wrong scales."""
    model = tiny.model(hidden_size=96, intermediate_size=128, head_dim=16)
    assert {name.rpartition(".")[2] for name in layers_to_quantize(model)} == {
        "down_proj",  # of 128 inputs
        "o_proj",  # of 4 heads of 16; the others have 96 inputs
    }


@pytest.mark.parametrize("level", ["none", "blocks", "all"])
def test_an_update_is_that_of_the_dequantised_model(level: str) -> None:
    training = {"activation_checkpointing": level}
    moved = []
    for model in (in_4_bits(), as_linear()):
        trained = policy(model, lr=1e-2, training=training)
        before = {n: t.detach().clone() for n, t in adapter_parameters(model).items()}
        for seed in (0, 1):  # in the first update only B has a gradient
            train_policy(trained, random_groups(seed))
        moved.append({n: t.detach() - before[n] for n, t in adapter_parameters(model).items()})
    stored, reference = moved
    for name, step in reference.items():
        assert (stored[name] - step).norm() <= 1e-5 * step.norm()
        assert step.any()


def test_the_base_stays_and_the_reference_is_the_base() -> None:
    model = in_4_bits()
    base = {n: layer.weight.data.clone() for n, layer in quantized_layers(model)}
    without = policy_logprobs(as_linear(), TEXT)  # new adapters change nothing
    trained = policy(model, algorithm={"kl": {"beta": 0.1}}, lr=1e-2)
    assert train_policy(trained, random_groups(0))["kl"] == pytest.approx(0, abs=1e-7)
    assert train_policy(trained, random_groups(1))["kl"] > 1e-6
    for name, layer in quantized_layers(model):
        assert torch.equal(layer.weight.data, base[name])
    one = rollout([(Origin.prompt, TEXT[:1]), (Origin.sampled, TEXT[1:])])
    ((sequence,),) = trained.score([[one]])
    assert sequence.ref_logprobs_S.tolist() == pytest.approx(without, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_have_the_format_of_the_model(dtype) -> None:
    model = in_4_bits(plain().to(dtype))
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {dtype}


def test_at_most_one_layer_is_dequantised() -> None:
    """Whatever the number of layers: forward, computed again, and backward."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    model = in_4_bits(tiny.model(**sizes))
    ids = torch.tensor([TEXT])
    with recomputing(recomputed_modules(model, ActivationCheckpointing.all)):
        model(ids, use_cache=False).logits.sum().backward()  # gradients are allocated, and kept
        with torch.profiler.profile(profile_memory=True) as profile:
            model(ids, use_cache=False).logits.sum().backward()
    largest = 256 * 1024 * 4  # bytes of up_proj in float32
    assert largest <= peak_bytes(profile) < 2 * largest


def test_the_peak_of_a_step_is_far_below_that_of_a_base_in_16_bits() -> None:
    """`scripts/bench/quantization.py` measures it at Qwen3-0.6B's shape: at most 0.65 there."""
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "head_dim": 64}

    def peak(model: torch.nn.Module) -> int:
        add_lora(model, LoraSettings(rank=4))
        optimizer = build_optimizer(model, AdamWSettings())

        def step() -> None:
            with recomputing(recomputed_modules(model, ActivationCheckpointing.all)):
                hidden = model.model(torch.tensor([TEXT]), use_cache=False).last_hidden_state
                hidden.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()  # makes the optimizer's state
        states = [t for part in optimizer.parts for s in part.state.values() for t in s.values()]
        copies = [copy for _, copy in optimizer.pairs]
        with torch.profiler.profile(profile_memory=True) as profile:
            step()
        held = storage_bytes([*model.parameters(), *scales(model), *states, *copies])
        return held + peak_bytes(profile)

    plain, stored = (tiny.model(**sizes).bfloat16() for _ in range(2))
    quantize(stored, double=True)
    assert peak(stored) <= 0.65 * peak(plain)


def test_sampling_has_the_scores_of_the_trainer() -> None:
    model = in_4_bits()
    trained = policy(model, lr=1e-2)
    train_policy(trained, random_groups(0))
    train_policy(trained, random_groups(1))

    async def sample() -> tuple[tuple[int, ...], tuple[float, ...]]:
        engine = TransformersEngine(trained.sampler, TransformersSettings(max_context=64))
        completion = await engine.generate([7, 8, 9], Sampling(max_tokens=12, seed=3), session="a")
        await engine.aclose()
        return completion.token_ids, completion.logprobs

    ids, sampled = asyncio.run(sample())
    scored = policy_logprobs(trained.model, [7, 8, 9, *ids])[2:]
    assert scored == pytest.approx(list(sampled), abs=1e-5)


def test_an_engine_with_its_own_weights_gets_the_policys_merged() -> None:
    trained = policy(in_4_bits(), lr=1e-1)
    train_policy(trained, random_groups(0))
    train_policy(trained, random_groups(1))
    sent = dict(named_weights(trained.model))
    copy = plain()
    assert sent.keys() == copy.state_dict().keys()
    copy.load_state_dict(sent)
    torch.testing.assert_close(logits(copy), logits(trained.model), rtol=1e-4, atol=1e-5)
    assert (logits(plain()) - logits(copy)).abs().max() > 1e-2


def test_the_merge_is_checked_and_the_policy_is_as_before() -> None:
    model = in_4_bits()
    before = logits(model)
    check_merging(model, lambda: policy_logprobs(model, TEXT))
    assert torch.equal(logits(model), before)
    layer = adapted_weights(model)["model.layers.0.mlp.up_proj.weight"]
    layer.get_delta_weight = lambda name: torch.zeros(layer.out_features, layer.in_features)
    with pytest.raises(WrongMerge, match="up_proj"):
        check_merging(model, lambda: policy_logprobs(model, TEXT))


def test_the_line_of_a_run_counts_each_weight_once() -> None:
    # Both layers have q and o of 64 x 64, k and v of 32 x 64, three of 64 x 128: 36,864 numbers.
    # The embedding has 64 numbers for each entry; norms have fewer than half a percent.
    model = in_4_bits()
    share = 2 * 36_864 / (2 * 36_864 + 64 * model.config.vocab_size)
    assert f"{100 * share:.0f} %" in describe_quantization(model)
    assert len(list(quantized_layers(model))) == 14


def test_operations_count_numbers_and_not_bytes() -> None:
    assert count_operations(in_4_bits()) == count_operations(as_linear())


def saved(folder: Path, run: Path) -> Path:
    """A trained checkpoint of adapters on the model in `folder`, within a run folder."""
    plain().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    trained = policy(in_4_bits(model), lr=1e-1)
    train_policy(trained, random_groups(0))
    train_policy(trained, random_groups(1))
    checkpoints = Checkpoints(run / "checkpoints", tokenizer=tiny.tokenizer(), keep=1)
    path = checkpoints.save(trained, step=2)
    torch.save(logits(trained.model), run / "logits.pt")
    return path


def test_a_checkpoint_has_adapters_alone_and_resumes_to_the_bit(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", tmp_path / "run")
    assert not (path / "model.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    resumed = policy(in_4_bits(model, rank=4), lr=1e-1)
    folder = tmp_path / "run" / "checkpoints"
    Checkpoints(folder, tokenizer=tiny.tokenizer(), keep=1).load_latest(resumed)
    assert torch.equal(logits(resumed.model), torch.load(tmp_path / "run" / "logits.pt"))


def test_an_export_computes_what_was_trained(tmp_path: Path, capsys) -> None:
    path = saved(tmp_path / "m", tmp_path / "run")
    expected = torch.load(tmp_path / "run" / "logits.pt")
    export(path, tmp_path / "merged")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(logits(exported), expected, rtol=1e-4, atol=1e-5)
    assert "%" not in capsys.readouterr().out  # float32 rounds nothing away
    export(path, tmp_path / "short", dtype="bfloat16")
    assert "% of what the adapters change" in capsys.readouterr().out
    # On the weights of the base's files they are another model.
    export(path, tmp_path / "adapters", form="adapter")
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "adapters").eval()
    assert (logits(other) - expected).abs().max() > 1e-2
    with pytest.raises(ConfigError, match=r"^model\.quantization=null: "), hydra_session(Source()):
        adapters = [f"model.path={tmp_path / 'adapters'}", "model.lora.rank=4"]
        validate(compose_run(["experiment=none", *adapters], Source()).config)


def test_an_export_rounds_no_decay_of_a_hybrid(tmp_path: Path) -> None:
    """Adapters in bfloat16 on a base whose files are float32."""
    base = tiny_recurrent("Qwen3_5", **BLOCKS)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if stays_float32(name):  # a number of 24 bits, as training makes them
                weight.add_(torch.rand(weight.shape, generator=generator) * 1e-3)
    base.save_pretrained(tmp_path / "base")
    tiny.tokenizer().save_pretrained(tmp_path / "base")
    expected = {n: w.detach() for n, w in base.named_parameters() if stays_float32(n)}
    model = in_4_bits(load_whole(tmp_path / "base", torch.bfloat16))
    adapters = tmp_path / "adapters"
    save_adapter_config(model, adapters)
    save_file(adapter_weights(model), adapters / WEIGHTS_FILE)
    exported, _ = merged(adapters, "auto", double=True)
    assert exported.dtype is torch.bfloat16
    found = {n: w for n, w in exported.named_parameters() if stays_float32(n)}
    assert expected and found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_experts_routers_and_kernels_weights_stay() -> None:
    moe = tiny_family("Qwen3Moe", **BLOCKS)
    names = {name.rpartition(".")[2] for name in layers_to_quantize(moe)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    quantize(moe, double=True)
    assert "down_proj" in describe_quantization(moe)
    mamba = tiny_recurrent("Zamba2", **BLOCKS)
    assert "out_proj" not in {
        name.rpartition(".")[2] for name in layers_to_quantize(mamba) if "mamba." in name
    }


@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3Moe"])
def test_hybrids_and_experts_train_on_a_base_in_4_bits(name: str) -> None:
    make = partial(tiny_recurrent if name == "Qwen3_5" else tiny_family, name, **BLOCKS)
    model = in_4_bits(make(vocab_size=320))
    assert any(True for _ in quantized_layers(model))
    trained = policy(model, lr=1e-2)
    first = train_policy(trained, random_groups(0))
    assert first["grad_norm"] > 0
    sent = dict(named_weights(trained.model))
    copy = make(vocab_size=320)
    copy.load_state_dict(sent)
    torch.testing.assert_close(logits(copy), logits(trained.model), rtol=1e-3, atol=1e-4)


def test_a_model_that_is_quantised_already_is_refused() -> None:
    model = plain()
    model.config.quantization_config = {"quant_method": "awq"}
    settings = ModelConfig(path="m", quantization="nf4", lora=LoraSettings(rank=4))
    with pytest.raises(ValueError, match=r"model\.quantization=nf4"):
        check_quantizable(model, settings)


@pytest.mark.parametrize("double", [True, False])
def test_a_cast_leaves_the_scales_as_they_are(double: bool) -> None:
    made = tiny.model(**BLOCKS)
    quantize(made, double=double)
    ids = torch.tensor([list(range(3, 40))])
    with torch.no_grad():
        before = made(ids).logits
        formats = [tensor.dtype for tensor in scales(made)]
        made.to(torch.bfloat16)
        after = made(ids).logits.float()
    assert [tensor.dtype for tensor in scales(made)] == formats
    assert (after - before).abs().max() < 0.02 * before.abs().max()


def test_adapters_that_read_the_base_s_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "use_dora": true}')
    lora = LoraSettings(rank=4, alpha=8)
    in_nf4 = ModelConfig(path=str(tmp_path), quantization="nf4", lora=lora)
    (problem,) = base_problems(in_nf4, tmp_path)
    assert problem.startswith(f"model.quantization=nf4: model.path={tmp_path}")
    assert list(base_problems(ModelConfig(path=str(tmp_path), lora=lora), tmp_path)) == []
