"""Which attention kernel is chosen, also by the rules that torch has on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import tiny
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from training_cases import policy, random_groups

from agenttrain.runs.sampling import load_model
from agenttrain.settings.compose import Source, compose_run, hydra_session
from agenttrain.trainer import train_policy
from agenttrain.training import attention, kernels, logprobs, wrapping
from agenttrain.training import attention as attend_module
from agenttrain.training import attention as varlen
from agenttrain.training.attention import Scoring, attend
from agenttrain.training.kernels import (
    Kernel,
    SlowAttention,
    check_kernels,
    counting_calls,
    fit,
    kernel_names,
    sdpa_kernel,
)
from agenttrain.training.logprobs import Scorer
from agenttrain.training.sharding import Sharding

SHORT = (torch.float16, torch.bfloat16)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def rules(query, key, value, mask=None, dropout=0.0, causal=False, *, scale=None, enable_gqa=False):
    """What torch 2.13 takes on an H100 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).

    Of cuDNN nothing: whether it is built in, and takes a shape, differs between installations.
    """
    size, grouped = query.shape[-1], query.shape[1] != key.shape[1]
    # Sizes of 16 bits that are no multiple of 8 are padded for FlashAttention by torch itself.
    if mask is None and query.dtype in SHORT and size == value.shape[-1] <= 256:
        return SDPBackend.FLASH_ATTENTION.value
    multiple = 8 if query.dtype in SHORT else 4
    if not grouped and size % multiple == 0 and value.shape[-1] % multiple == 0:
        return SDPBackend.EFFICIENT_ATTENTION.value
    return SDPBackend.MATH.value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU chooses as a GPU does."""
    monkeypatch.setattr(torch, "_fused_sdp_choice", rules)
    monkeypatch.setattr(attend_module, "is_restrictive", lambda device: True)


def states(dtype: torch.dtype, queries: int, keys: int, size: int) -> list[torch.Tensor]:
    """Four heads of queries, two of keys and values."""
    shapes = [(1, 4, queries, size), (1, 2, keys, size), (1, 2, keys, size)]
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


WINDOW, SINKS = {"window": 100}, {"sinks": torch.linspace(-1, 1, 4)}


@pytest.mark.parametrize(
    "dtype, size, prefix, scoring, expected",
    [
        (torch.bfloat16, 64, 0, {}, Kernel.flash),
        (torch.bfloat16, 64, 40, {}, Kernel.efficient),
        (torch.bfloat16, 64, 0, WINDOW, Kernel.efficient),
        (torch.bfloat16, 80, 40, WINDOW, Kernel.efficient),
        (torch.float16, 64, 40, {}, Kernel.efficient),
        (torch.float32, 64, 0, {}, Kernel.efficient),
        (torch.float32, 64, 40, {}, Kernel.efficient),
        (torch.float32, 63, 40, {}, Kernel.efficient),
        # With a sink heads have one dimension more.
        (torch.bfloat16, 64, 0, SINKS, Kernel.flash),
        (torch.bfloat16, 64, 40, SINKS, Kernel.efficient),
        (torch.float32, 64, 0, SINKS, Kernel.efficient),
        (torch.bfloat16, 512, 0, {}, Kernel.efficient),
        (torch.bfloat16, 64, 0, {"softcap": 50.0}, Kernel.math),
    ],
)
def test_on_a_gpu_a_fused_kernel_is_taken_where_there_is_one(
    request, dtype, size, prefix, scoring, expected
) -> None:
    query, key, value = states(dtype, 200, 200 + prefix, size)
    plain = attend(query, key, value, Scoring(**scoring))
    request.getfixturevalue("gpu")
    with counting_calls() as used:
        output = attend(query, key, value, Scoring(**scoring))
    assert used == Counter({expected: 1})
    assert torch.allclose(output.float(), plain.float(), atol=3e-2 if dtype in SHORT else 1e-5)


def test_torch_by_itself_would_take_none(gpu) -> None:
    query, key, value = states(torch.bfloat16, 300, 340, 64)
    mask = torch.ones(300, 340, dtype=torch.bool)
    assert sdpa_kernel(query, key, value, mask, causal=False) is Kernel.math


def test_states_of_autocast_are_asked_about_in_its_format(gpu) -> None:
    query, key, value = states(torch.float32, 200, 200, 64)
    with counting_calls() as exact:
        attend(query, key, value, Scoring())
    with torch.autocast("cpu", torch.bfloat16), counting_calls() as cast:
        attend(query, key, value, Scoring())
    assert (set(exact), set(cast)) == ({Kernel.efficient}, {Kernel.flash})


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("prefix", [0, 40])
def test_gradients_of_few_bfloat16_queries_are_float32s_rounded_once(autocast, prefix) -> None:
    short = [state.requires_grad_() for state in states(torch.bfloat16, 70, 70 + prefix, 64)]
    exact = [state.detach().float().requires_grad_() for state in short]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = attend(*short, Scoring())
    expected = attend(*exact, Scoring())
    assert output.dtype is torch.bfloat16
    assert torch.equal(output, expected.bfloat16())
    gradient = torch.randn_like(output)
    for got, wanted in zip(
        torch.autograd.grad(output, short, gradient),
        torch.autograd.grad(expected, exact, gradient.float()),
        strict=True,
    ):
        assert torch.equal(got, wanted.bfloat16())


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("masked", [True, False])
def test_what_is_fit_for_a_kernel_is_the_same_attention(monkeypatch, scale, masked) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 4, 7, 5, requires_grad=True)
    key, value = (torch.randn(1, 2, 9 if masked else 7, 5, requires_grad=True) for _ in range(2))
    mask = torch.ones(7, 9, dtype=torch.bool).tril(2) if masked else None

    def attended(q, k, v, scale):
        made = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return made[..., :5]

    expected = attended(query, key, value, scale)
    slopes = torch.autograd.grad(expected.square().sum(), (query, key, value))
    monkeypatch.setattr(torch, "_fused_sdp_choice", rules)
    *fitted, new_scale = fit(query, key, value, mask, scale)
    # Four heads of size 5 for all three became four of size 8.
    assert [tuple(state.shape[1::2]) for state in fitted] == [(4, 8)] * 3
    assert sdpa_kernel(*fitted, mask, causal=mask is None) is Kernel.efficient
    found = attended(*fitted, new_scale)
    assert torch.allclose(found, expected, atol=1e-6)
    own = torch.autograd.grad(found.square().sum(), (query, key, value))
    for slope, expected_slope in zip(own, slopes, strict=True):
        assert torch.allclose(slope, expected_slope, atol=1e-5)


def test_a_long_run_on_a_gpu_does_not_start_on_math() -> None:
    with pytest.raises(SlowAttention) as raised:
        check_kernels({Kernel.varlen, Kernel.math}, CUDA, 8193)
    assert "training/kernel=math,varlen: on this GPU" in str(raised.value)
    assert "every score of up to 8,193 tokens" in str(raised.value)
    check_kernels({Kernel.math}, CUDA, 8192)
    check_kernels({Kernel.math}, CPU, 100_000)
    check_kernels({Kernel.efficient, Kernel.varlen}, CUDA, 100_000)
    assert kernel_names([]) == "none"


def test_the_trial_says_what_computes_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(tiny.model(), temperature=1.0, logits_budget_mb=1)
    assert scorer.kernels == Counter({Kernel.flash: 8})  # two layers, four blocks of the trial
    separate = Scorer(tiny.model(), temperature=1.0, logits_budget_mb=1, defer=True)
    monkeypatch.setattr(logprobs, "why_not_packed", lambda *_, **__: "it says so")
    with pytest.warns(UserWarning, match="one forward pass per rollout"):
        separate.choose_layout(CPU)
    assert separate.kernels == Counter({Kernel.flash: 8})  # the model's own calls


def test_the_kernel_of_a_gpu_is_chosen_where_the_format_is_its_own(monkeypatch) -> None:
    """A GPU of our own making: the kernel's rules on this CPU."""
    from test_training_varlen import plain

    monkeypatch.setattr(logprobs, "has_kernel", lambda device: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: plain)
    settings = {"temperature": 1.0, "logits_budget_mb": 1}
    # One call per layer; the one that stands in for the kernel is itself made of torch's.
    assert Scorer(tiny.model().bfloat16(), **settings).kernels[Kernel.varlen] == 2
    # The kernel takes no float32: nothing would be computed by it.
    exact = Scorer(tiny.model(), **settings)
    assert (exact.varlen, set(exact.kernels)) == (False, {Kernel.flash})
    cast = Scorer(tiny.model(), **settings, defer=True)
    cast.choose_layout(CPU, autocast=torch.autocast("cpu", torch.bfloat16))
    assert cast.varlen and cast.kernels[Kernel.varlen] == 2
    monkeypatch.setattr(varlen, "LARGEST_HEAD", 4)
    assert not Scorer(tiny.model().bfloat16(), **settings).varlen


@pytest.fixture
def alone() -> Iterator[None]:
    """No process group is left behind."""
    AcceleratorState._reset_state()
    yield
    dist.destroy_process_group()
    AcceleratorState._reset_state()


@pytest.mark.parametrize(
    "mixed_precision, gathered", [("no", torch.float32), ("bf16", torch.bfloat16)]
)
def test_a_sharded_model_is_first_computed_sharded_and_gathered_in_its_format(
    monkeypatch, alone, mixed_precision, gathered
) -> None:
    events: list[str] = []
    model = tiny.model()
    model.model.register_forward_hook(lambda *_: events.append("forward"))
    register = wrapping.register_fsdp_forward_method

    def registered(*arguments) -> None:
        register(*arguments)
        events.append("sharded")

    monkeypatch.setattr(wrapping, "register_fsdp_forward_method", registered)
    trained = policy(
        model,
        algorithm={"kl": {"beta": 0.1}},
        training={"mixed_precision": mixed_precision},
        processes={"sharding": Sharding()},
    )
    # The reference, and then the policy; only then a forward pass.
    assert events[:3] == ["sharded", "sharded", "forward"]
    assert trained.kernel == "flash"
    train_policy(trained, random_groups(0))
    own = trained.model.model.layers[0].mlp.up_proj
    dtypes: list[torch.dtype] = []
    own.register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))
    trained.logprobs(random_groups(1)[0])
    assert set(dtypes) == {gathered}
    assert own.weight.dtype is torch.float32  # the part of this process, which is updated


def test_watching_ends() -> None:
    with counting_calls() as used:
        kernels.count_call(Kernel.varlen)
    kernels.count_call(Kernel.varlen)
    assert used == Counter({Kernel.varlen: 1})


def test_a_loaded_model_attends_without_cudnn() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        with hydra_session(Source()):
            load_model(compose_run(["experiment=shop"], Source()).config)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
