"""Sizes that are told before a run, against those that are measured in one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from allocated import Allocated
from packing_families import tiny_family
from recurrent_families import tiny_recurrent
from torch.autograd.graph import saved_tensors_hooks
from training_cases import random_groups
from transformers import Lfm2Config, Qwen3_5TextConfig

from agenttrain.engines.config import Sampling
from agenttrain.engines.memory import EngineLoad
from agenttrain.engines.transformers.cache import final_capacity
from agenttrain.engines.transformers.config import TransformersSettings
from agenttrain.engines.transformers.engine import TransformersEngine
from agenttrain.engines.transformers.spec import SPEC
from agenttrain.runs.memory_plan import Sizes
from agenttrain.training import equal_layers, recurrent, sharding
from agenttrain.training.batch import make_sequences
from agenttrain.training.config import (
    LEVELS,
    OPTIMIZERS,
    ActivationCheckpointing,
    LoraSettings,
    ModelConfig,
)
from agenttrain.training.footprint import (
    LAYER_GRADIENTS,
    Activations,
    CachedLayer,
    SavedActivations,
    cached_layers,
    empty_model,
    head_bytes,
    updating,
    weight_bytes,
)
from agenttrain.training.logprobs import Scorer, packed_hidden
from agenttrain.training.lora import add_lora
from agenttrain.training.optimizers import MasterWeights, build_optimizer
from agenttrain.training.segments import one_after_the_other

CPU = torch.device("cpu")
FORMATS = (torch.float32, torch.bfloat16)


def empty(model: torch.nn.Module, lora: LoraSettings | None = None) -> torch.nn.Module:
    return empty_model(model.config, model.dtype, lora or LoraSettings())


def storage_bytes(tensors: list[torch.Tensor]) -> int:
    """Of distinct storages."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    parts = getattr(optimizer, "parts", [])
    own = [t for state in optimizer.state.values() for t in state.values()]
    return [t for part in parts for t in state_tensors(part)] + own


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("rank", [0, 4])
def test_an_empty_model_has_the_weights_of_a_real_one(dtype, rank):
    real = tiny.model().to(dtype)
    lora = LoraSettings(rank=rank)
    if rank:
        add_lora(real, lora)
    found = empty(real, lora)
    assert all(p.is_meta for p in found.parameters())
    assert weight_bytes(found) == storage_bytes(list(real.parameters()))
    assert len(sharding.layers(found)) == 2


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("rank", [0, 4])
def test_an_optimizer_holds_what_was_told(dtype, name, rank):
    real = tiny.model().to(dtype)
    lora, settings = LoraSettings(rank=rank), OPTIMIZERS[name]()
    if rank:
        add_lora(real, lora)
    optimizer = build_optimizer(real, settings)
    trained = [p for p in real.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    told = updating(empty(real, lora), settings)
    assert told.moments == storage_bytes(state_tensors(optimizer))
    copies = [m for _, m in optimizer.pairs] if isinstance(optimizer, MasterWeights) else []
    assert told.masters == storage_bytes(copies)
    # 4 bytes of a number; in bfloat16 2, and 4 of the sum over microbatches
    size = 4 if dtype is torch.float32 else 2 + 4
    assert told.gradients == size * sum(p.numel() for p in trained)


@pytest.mark.parametrize("first, longest", [(10, 40), (40, 200)])
@pytest.mark.parametrize("name", ["tiny", "Qwen3_5", "Zamba2", "Gemma3"])
def test_an_engines_cache_is_as_large_as_was_told(tmp_path, name, first, longest):
    """Of full attention, a delta rule, Mamba2 beside attention, and windows of 8 tokens."""
    kinds = {"tiny": tiny.model, "Gemma3": partial(tiny_family, name)}
    model, limit = kinds.get(name, partial(tiny_recurrent, name))(), 256
    settings = TransformersSettings(max_context=limit, max_rows=3)

    async def rollouts() -> TransformersEngine:
        engine = TransformersEngine(model, settings)
        await asyncio.gather(
            *(
                engine.generate(
                    [7 + i] * first, Sampling(max_tokens=longest - first, seed=i), session=str(i)
                )
                for i in range(3)
            )
        )
        await engine.aclose()
        return engine

    cache = asyncio.run(rollouts())._worker.decoder.cache
    held = storage_bytes([tensor for layer in cache.layers for tensor in layer.by_row(longest)])
    model.config.save_pretrained(tmp_path)
    sizes = Sizes(ModelConfig(path=str(tmp_path), dtype="float32"))
    load = EngineLoad(
        rows=3, prompt=first, sampled=longest, limit=limit, on_gpu=False, memory=None, taken=0,
        sharded=False, adapters=False,
    )  # fmt: skip
    items = {item.name: item.bytes for item in SPEC.memory(settings, load, sizes).items}
    assert sum(items.values()) == held
    if name == "tiny":
        # 2 layers x (keys + values) x 2 heads of 8 numbers x 4 bytes
        assert sizes.token_cache == 2 * 2 * 2 * 8 * 4
        assert items == {"keys and values": (3 * final_capacity(first, longest, limit) + 1) * 256}
    if name == "Qwen3_5":
        # one layer: 4 inputs of 64 channels, and 4 heads of 8 x 8 numbers
        assert items["recurrent states"] == 3 * (4 * 64 + 4 * 8 * 8) * 4


def test_convolutions_hold_their_last_inputs_and_no_keys():
    config = Lfm2Config(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=256,
        layer_types=["conv", "conv", "full_attention", "conv"],
    )
    convolution = CachedLayer(convolution=64 * 3)  # 3 inputs of 64 channels
    attention = CachedLayer(token=2 * 2 * 16)  # keys and values of 2 heads of 16 numbers
    layers = cached_layers(empty_model(config, torch.float32, LoraSettings()))
    assert layers == [convolution, convolution, attention, convolution]


@pytest.mark.parametrize(
    "first, longest, limit, capacity",
    [
        (10, 60, 1024, 64),
        (10, 65, 1024, 128),
        (100, 300, 1024, 512),  # 128, 256, 512
        (100, 300, 300, 320),  # 128, 256, then the limit, rounded up to 64
    ],
)
def test_rows_grow_by_doubling_up_to_the_context(first, longest, limit, capacity):
    assert final_capacity(first, longest, limit) == capacity


def microbatch(scorer: Scorer):
    """320 tokens or so in 8 rows."""
    sequences = [make_sequences(one)[0] for group in random_groups(0, longest=60) for one in group]
    (batch,) = scorer.pack(sequences, 10_000, CPU)
    return batch


def model_to_trace(name):
    """A model of the family, with layers wide enough that constants are of no account."""
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 320}
    if name == "tiny":
        return real_model()
    if name == "Qwen3Moe":
        return tiny_family(name, **sizes, moe_intermediate_size=64)
    return tiny_recurrent(name, **sizes)


def real_model(**sizes):
    return tiny.model(hidden_size=64, intermediate_size=192, num_hidden_layers=3, **sizes)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    "name", ["tiny", "Qwen3Moe", pytest.param("Qwen3_5", marks=pytest.mark.slow)]
)
def test_what_a_forward_pass_keeps(name, dtype):
    """At every level: of a dense model, of experts, and of recurrent layers."""
    model = model_to_trace(name).to(dtype)
    kept_bytes = []
    for level in LEVELS:
        kept = bytes_kept(model, level, tokens=200)
        told = SavedActivations(empty(model), None)(200, level)
        assert told.kept == pytest.approx(kept, rel=0.1), level
        kept_bytes.append(kept)
    assert kept_bytes == sorted(kept_bytes, reverse=True) and len({*kept_bytes}) == len(LEVELS)


def bytes_kept(model: torch.nn.Module, level: ActivationCheckpointing, tokens: int) -> int:
    """Bytes that autograd saves in a forward pass over a rollout, without weights."""
    scorer = Scorer(model, temperature=1.0, logits_budget_mb=1, level=level)
    saved: list[torch.Tensor] = []
    hooks = saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with scorer.ready(), hooks:
        packed_hidden(model, torch.arange(tokens) % 300, one_after_the_other([tokens]))
    weights = {w.untyped_storage()._cdata for w in model.parameters()}
    return storage_bytes([t for t in saved if t.untyped_storage()._cdata not in weights])


def test_what_is_kept_grows_by_the_token():
    saved = SavedActivations(empty(real_model()), None)
    for level in LEVELS:
        kept = {n: saved(n, level).kept for n in (128, 256, 512, 768, 1000, 1001, 1024)}
        assert kept[1024] - kept[768] == kept[512] - kept[256] > 0
        assert kept[256] - kept[128] == 128 * (kept[1001] - kept[1000])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("vocabulary, budget_mb", [(320, 1024), (8000, 1024), (8000, 1)])
def test_the_largest_moment_of_a_backward_pass(level, vocabulary, budget_mb):
    model = real_model(vocab_size=vocabulary)
    scorer = Scorer(
        model, temperature=1.0, logits_budget_mb=budget_mb, share_prefix="never", level=level
    )
    batch = microbatch(scorer)

    def step() -> None:
        with scorer.ready():
            logprobs_S, _ = scorer(batch)
            logprobs_S.sum().backward()

    step()  # the gradients are there, as they are from the second microbatch on
    with Allocated() as seen:
        step()
    hollow, tokens = empty(model), batch.token_ids_T.numel()
    saved = SavedActivations(hollow, None)(tokens, level)
    sampled = batch.targets_S.numel()
    head = head_bytes(hollow, sampled, budget_mb=budget_mb, autocast=False, device="cpu")
    if level is ActivationCheckpointing.all:
        # 64 numbers of 4 bytes per token: inputs of 3 layers, and 2 tensors of the last norm
        assert saved.kept == pytest.approx((3 + 2) * tokens * 64 * 4, rel=0.1)
    told = saved.kept + head
    if level is not ActivationCheckpointing.none:
        told = saved.kept + max(head, saved.recomputed * LAYER_GRADIENTS)
    assert 0.9 < told / seen.peak < 1.4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("budget_mb, tokens", [(1024, 600), (1, 600)])
def test_the_head_takes_what_was_told(dtype, budget_mb, tokens):
    from agenttrain.training.head import LogitTransform
    from agenttrain.training.logprobs import head_logprobs

    model = tiny.model(hidden_size=64, vocab_size=20_000).to(dtype)
    head = model.get_output_embeddings()
    hidden_SH = torch.randn(tokens, 64, dtype=dtype, requires_grad=True)
    labels_S = torch.arange(tokens)
    with Allocated() as seen:
        logprobs_S, _ = head_logprobs(
            hidden_SH, head, labels_S, transform=LogitTransform(), logits_budget_mb=budget_mb
        )
        logprobs_S.sum().backward()
    told = head_bytes(empty(model), tokens, budget_mb=budget_mb, autocast=False, device="cpu")
    assert 0.95 < told / seen.peak < 1.35


HYBRID = {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 64,
}


@pytest.mark.slow
def test_equal_layers_are_traced_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrent layer takes a second to trace, and a large model has 36 of one kind."""
    layers = [*["linear_attention"] * 3, "full_attention"] * 3
    config = Qwen3_5TextConfig(
        **HYBRID, head_dim=16, num_hidden_layers=12, layer_types=layers, linear_num_key_heads=1,
        linear_num_value_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    model = empty_model(config, torch.bfloat16, LoraSettings(rank=4))
    mixer = type(sharding.layers(model)[0].linear_attn)
    runs, forward = [0], mixer.forward

    def counted(*args, **kwargs):
        runs[0] += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(mixer, "forward", counted)

    def sizes(limit: int) -> tuple[Activations, list[CachedLayer], int]:
        monkeypatch.setattr(equal_layers, "RUNS", limit)
        runs[0] = 0
        return SavedActivations(model, torch.bfloat16)(100), cached_layers(model), runs[0]

    # Two of nine recurrent layers, in each of two traces; keys in every fourth layer.
    assert sizes(equal_layers.RUNS)[2] == 2 * 2
    short, full = sizes(2), sizes(12)
    assert short[:2] == full[:2] and full[2] == 2 * 9
    assert [layer.token for layer in full[1]] == [0, 0, 0, 32] * 3


def test_a_recurrent_layer_keeps_the_inputs_of_its_scan_alone(monkeypatch) -> None:
    """transformers' torch code keeps 7.8 KiB more per token and value head of 128."""
    config = Qwen3_5TextConfig(
        **HYBRID, head_dim=16, num_hidden_layers=1, layer_types=["linear_attention"],
        linear_num_key_heads=1, linear_num_value_heads=2,
    )  # fmt: skip
    model = empty_model(config, torch.bfloat16, LoraSettings())
    recomputed = SavedActivations(model, None)(128).kept
    monkeypatch.setattr(recurrent, "is_kernel", lambda function: True)
    kept = SavedActivations(model, None)(128).kept
    assert (kept - recomputed) / (128 * 2 * 1024) == pytest.approx(7.8, abs=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma2", "DeepseekV3", "Lfm2"])
def test_a_trace_of_some_layers_gives_the_bytes_of_all(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Windows, a dense layer before those of experts, convolutions."""
    if name == "Lfm2":
        kinds = {**HYBRID, "layer_types": ["conv", "full_attention"] * 4, "num_hidden_layers": 8}
        config = Lfm2Config(**kinds)
    else:
        config = tiny_family(name).config
        config.num_hidden_layers = 8
        if getattr(config, "layer_types", None):
            config.layer_types = list(config.layer_types) * 4
    model = empty_model(config, torch.bfloat16, LoraSettings())

    def trace() -> tuple[Any, ...]:
        saved = SavedActivations(model, torch.bfloat16)
        return (*(saved(60, level) for level in LEVELS), cached_layers(model))

    few = trace()
    monkeypatch.setattr(equal_layers, "RUNS", 8)
    assert few == trace()
