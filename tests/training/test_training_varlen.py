"""The layout and the choice of the kernel for sequences of any length, which only a GPU has."""

from __future__ import annotations

import inspect

import pytest
import tiny
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from agenttrain.training import attention
from agenttrain.training import attention as varlen
from agenttrain.training.attention import (
    Scoring,
    attend_varlen,
    has_kernel,
    make_varlen,
    packing,
    varlen_kernel,
    varlen_takes,
)
from agenttrain.training.kernels import Kernel, counting_calls
from agenttrain.training.logprobs import (
    TRIAL,
    Scorer,
    packed_hidden,
    separate_hidden,
    why_not_packed,
)
from agenttrain.training.segments import Segment, one_after_the_other

CPU = torch.device("cpu")
PREFIX = Segment(5, 3)
SHARED = (Segment(0, 5), PREFIX, Segment(8, 2, PREFIX), Segment(10, 1, PREFIX))


def plain(
    query,
    key,
    value,
    queries_B,
    keys_B,
    longest_q,
    longest_k,
    *,
    scale,
    window_size,
    enable_gqa=False,
):
    """What torch's documentation says of `varlen_attn`, sequence by sequence, in any format."""
    before, after = window_size
    assert after == 0
    lengths_q, lengths_k = queries_B.diff().tolist(), keys_B.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (longest_q, longest_k)
    outputs = []
    for q, k, v, m, n in zip(
        query.split(lengths_q),
        key.split(lengths_k),
        value.split(lengths_k),
        lengths_q,
        lengths_k,
        strict=True,
    ):
        mask = torch.ones(m, n, dtype=torch.bool).tril(n - m)  # the last of both together
        if before >= 0:
            mask = mask.triu(n - m - before)
        states = (state.transpose(0, 1)[None] for state in (q, k, v))
        out = scaled_dot_product_attention(
            *states, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def test_layout_of_segments_that_share_nothing():
    found = make_varlen(one_after_the_other([4, 2, 3]), CPU)
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_k.tolist() == [0, 4, 6, 9]
    assert (found.max_seqlen_q, found.max_seqlen_k, found.keys) == (4, 4, None)
    assert found.cu_seqlens_q.dtype is torch.int32


def test_layout_of_segments_with_a_shared_prefix():
    found = make_varlen(SHARED, CPU)
    assert found.cu_seqlens_q.tolist() == [0, 5, 8, 10, 11]
    # 5 | 3 | 3 + 2 | 3 + 1
    assert found.cu_seqlens_k.tolist() == [0, 5, 8, 13, 17]
    assert found.keys.sources.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 5, 6, 7, 10]
    assert (found.max_seqlen_q, found.max_seqlen_k) == (5, 5)


def on_cpu(monkeypatch) -> None:
    """Let the choice fall on the plain kernel, in the float32 of the tests."""
    monkeypatch.setattr(attention, "varlen_kernel", lambda: plain)
    monkeypatch.setattr(varlen, "SHORT_FORMATS", (torch.float32,))


@pytest.mark.parametrize("segments", [SHARED, TRIAL, one_after_the_other([7, 4])])
def test_hidden_states_are_those_of_separate_passes(monkeypatch, segments):
    on_cpu(monkeypatch)
    model = tiny.model(initializer_range=0.4)
    ids_T = torch.arange(segments[-1].end) * 7 % 300
    with torch.no_grad(), packing(model):
        found_TH = packed_hidden(model, ids_T, segments, varlen=True)
    with torch.no_grad():
        expected_TH = separate_hidden(model, ids_T, segments)
    assert torch.allclose(found_TH, expected_TH, atol=1e-5)


def test_the_kernel_honours_a_window(monkeypatch):
    """Query i attends to keys i - 2 … i, also where these are of the prefix."""
    on_cpu(monkeypatch)
    model = tiny.model(
        initializer_range=0.4,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    )
    ids_T = torch.arange(11) * 7 % 300
    with torch.no_grad(), packing(model), counting_calls() as kernels:
        found_TH = packed_hidden(model, ids_T, SHARED, varlen=True)
    assert kernels[Kernel.varlen] == 2
    with torch.no_grad():
        expected_TH = separate_hidden(model, ids_T, SHARED)
    assert torch.allclose(found_TH, expected_TH, atol=1e-5)


def test_a_kernel_without_the_keyword_for_grouped_queries_is_called_without_it(monkeypatch):
    """torch 2.11 and 2.12 take fewer heads of keys, and have no `enable_gqa`."""

    def older(query, key, value, a, b, m, n, *, return_aux=None, scale=None, window_size=(-1, -1)):
        return plain(
            query, key, value, a, b, m, n, scale=scale, window_size=window_size, enable_gqa=True
        )

    torch.manual_seed(0)
    query, key, value = torch.randn(11, 4, 8), torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    layout = make_varlen(SHARED, CPU)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", older)
    varlen_kernel.cache_clear()
    try:
        found = attend_varlen(query, key, value, layout, Scoring(), varlen_kernel())
    finally:
        varlen_kernel.cache_clear()
    assert torch.equal(found, attend_varlen(query, key, value, layout, Scoring(), plain))


def test_the_kernel_is_called_once_per_layer(monkeypatch):
    calls = []

    def counted(*arguments, **keywords):
        calls.append(None)
        return plain(*arguments, **keywords)

    on_cpu(monkeypatch)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: counted)
    model = tiny.model()
    with torch.no_grad(), packing(model):
        packed_hidden(model, torch.arange(11), SHARED, varlen=True)
        assert len(calls) == 2
        packed_hidden(model, torch.arange(11), SHARED)
    assert len(calls) == 2


def test_a_kernel_that_aligns_otherwise_is_found_out(monkeypatch):
    def first_together(*arguments, **keywords):
        """Causal from the first key on: right without a prefix, wrong with one."""
        query, key, value, queries_B, keys_B, *longest = arguments
        cut = [
            k[: len(q)]
            for q, k in zip(
                query.split(queries_B.diff().tolist()),
                key.split(keys_B.diff().tolist()),
                strict=True,
            )
        ]
        values = [
            v[: len(q)]
            for q, v in zip(
                query.split(queries_B.diff().tolist()),
                value.split(keys_B.diff().tolist()),
                strict=True,
            )
        ]
        longest_q = longest[0]
        return plain(
            query,
            torch.cat(cut),
            torch.cat(values),
            queries_B,
            queries_B,
            longest_q,
            longest_q,
            **keywords,
        )

    on_cpu(monkeypatch)
    model = tiny.model(initializer_range=0.4)
    assert why_not_packed(model) is None
    monkeypatch.setattr(varlen, "SHORT_FORMATS", (torch.bfloat16,))  # as the trial runs it
    assert why_not_packed(model, varlen=True) is None
    monkeypatch.setattr(attention, "varlen_kernel", lambda: first_together)
    assert "packed, its hidden states differ by" in why_not_packed(model, varlen=True)


def test_a_kernel_that_fails_is_not_used(monkeypatch):
    def fails(*arguments, **keywords):
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")

    monkeypatch.setattr(attention, "varlen_kernel", lambda: fails)
    assert "only supports Ampere" in why_not_packed(tiny.model(), varlen=True)


@pytest.mark.parametrize(
    "dtype, size, value_size, scoring, expected",
    [
        (torch.bfloat16, 128, 128, Scoring(), True),
        (torch.float16, 64, 64, Scoring(scale=0.1), True),
        (torch.float32, 64, 64, Scoring(), False),
        (torch.bfloat16, 64, 64, Scoring(window=128), True),
        (torch.bfloat16, 64, 64, Scoring(softcap=50.0), False),
        (torch.bfloat16, 64, 64, Scoring(sinks=torch.zeros(2)), False),
        (torch.bfloat16, 192, 128, Scoring(), False),
        (torch.bfloat16, 512, 512, Scoring(), False),
    ],
)
def test_what_the_kernel_takes(dtype, size, value_size, scoring, expected):
    query = torch.zeros(3, 2, size, dtype=dtype)
    assert varlen_takes(query, torch.zeros(3, 2, value_size, dtype=dtype), scoring) is expected


def test_on_a_cpu_nothing_is_chosen():
    assert not has_kernel(CPU)
    assert not Scorer(tiny.model(), temperature=1.0, logits_budget_mb=1).varlen


@pytest.mark.skipif(
    varlen_kernel() is None, reason="this torch has no varlen_attn: pip install -U torch"
)
def test_torchs_kernel_takes_what_it_is_given():
    """Its own shape function runs it over tensors without contents."""
    parameters = list(inspect.signature(varlen_kernel()).parameters)
    assert parameters[:7] == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    layout = make_varlen(SHARED, CPU)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        query = torch.empty(11, 4, 8, dtype=torch.bfloat16)
        key, value = torch.empty(2, 11, 2, 8, dtype=torch.bfloat16)
        output = attend_varlen(query, key, value, layout, Scoring(), varlen_kernel())
    assert output.shape == (11, 4, 8)
