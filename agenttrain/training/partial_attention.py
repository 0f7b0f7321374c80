"""Attention to a part of the keys, and the merge of such parts.

A query's output over some keys, with log sum exp of their scores (`lse`), is all that is needed to
merge it with its output over other keys (https://arxiv.org/abs/1805.02867). The backward pass of a
part takes the merged output and `lse`, because the weights of all keys are known by then.

Shapes: m queries, n keys, h heads (k of keys and values), d head size, e head size of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agenttrain.training.kernels import MULTIPLE, Kernel, count_call

TILE = (256, 2048)
"""Queries and keys of a tile whose scores are in memory at once."""
LOWEST = -1e30
"""Score of a key that a query does not attend to: finite, so that differences are numbers."""
FUSED_HEAD = 256
"""Largest head of torch's FlashAttention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Deviations of a model's attention scores from plain attention. None: no deviation."""

    scale: float | None = None
    window: int | None = None
    """Number of keys that a query attends to, its own included."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[h] Score of an additional key without a value, to which every query attends."""


def nothing_yet(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return output [m, h, e] and log sum exp [m, h] of queries that attended to no key so far."""
    shape, exact = query.shape[:2], torch.promote_types(query.dtype, torch.float32)
    output = torch.zeros(*shape, value.shape[-1], dtype=exact, device=query.device)
    return output, torch.full(shape, LOWEST, dtype=exact, device=query.device)


def merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge attention to further keys into `output` [m, h, e] and `lse` [m, h], in place.

    `lse` and `part_lse` are log sum exp of the scores of their keys.

    Example: a part of two keys and one of a key, all with score 0, have the logarithms log 2 and 0,
    and weigh 2/3 and 1/3.
    """
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp()[..., None])
    output.add_(part * (part_lse - total).exp()[..., None])
    lse.copy_(total)


def attend_partially(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, shift: int | None
) -> tuple[Tensor, Tensor]:
    """Return the output [m, h, e] over these keys, and log sum exp of their scores, [m, h].

    m queries [m, h, d] with h heads, n keys [n, k, d] with k heads, values [n, k, e]. Query a
    attends to key b if b <= a + shift, within the window of `scoring`; to all keys if `shift` is
    None. Sinks do not count here: see `add_sinks`.
    """
    if _is_fused(query, value, scoring, shift):
        count_call(Kernel.flash)
        states = _for_kernel(query, key, value)  # [1, heads, tokens, d]
        function: Any = _FORWARD[query.device.type]
        dropout, causal = 0.0, shift is not None  # if not None it is 0 (`_is_fused`)
        output, lse, *_ = function(*states, dropout, causal, scale=scoring.scale)
        return output[0].transpose(0, 1), lse[0].transpose(0, 1)
    count_call(Kernel.tiles)
    output, lse = nothing_yet(query, value)  # `merge` adds each tile to them in place
    for queries, keys in _tiles(query.shape[0], key.shape[0], shift, scoring.window):
        scores, _ = _scores(query, key, scoring, shift, queries, keys)
        part_lse = scores.logsumexp(-1)
        weights = (scores - part_lse[..., None]).exp()
        part = weights @ _by_query_head(value[keys], query).to(weights.dtype)
        merge(output[queries], lse[queries], part.transpose(0, 1), part_lse.T)
    return output, lse


def partial_gradients(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    shift: int | None,
    output: Tensor,
    lse: Tensor,
    gradient: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, as far as they come from these keys.

    m queries [m, h, d] with h heads, n keys [n, k, d] with k heads, values [n, k, e]. `output`
    [m, h, e] is the attention's result over all keys of all processes, `lse` [m, h] log sum exp of
    their scores, and `gradient` the gradient of `output`. Query a attends to key b if
    b <= a + shift, to all keys if `shift` is None.
    """
    if _is_fused(query, value, scoring, shift):
        states = _for_kernel(query, key, value)
        saved = _for_kernel(gradient, output)
        return _fused_gradients(states, saved, lse, scoring, causal=shift is not None)
    exact = lse.dtype
    grad_query = torch.zeros(query.shape, dtype=exact, device=query.device)
    grad_key, grad_value = (
        torch.zeros(tensor.shape, dtype=exact, device=query.device) for tensor in (key, value)
    )
    gradient = gradient.to(exact)
    # The softmax's part of the gradient: d score = weight * (d weight - sum of weight * d weight).
    # That sum over all keys is the product of output and gradient, [m, h].
    grad_output_product = (gradient * output).sum(-1)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    for queries, keys in _tiles(query.shape[0], key.shape[0], shift, scoring.window):
        # Of a tile, [h, queries, keys]. `slope` is the derivative of the soft cap, 1 without one.
        scores, slope = _scores(query, key, scoring, shift, queries, keys)
        weights = (scores - lse[queries].T[..., None]).exp()
        # `_by_query_head` repeats the k heads of keys for the h heads of queries; `_by_key_head`
        # sums over these repetitions again.
        grad_by_head = gradient[queries].transpose(0, 1)
        grad_value[keys] += _by_key_head(weights.mT @ grad_by_head, value)
        grad_weights = grad_by_head @ _by_query_head(value[keys], query).to(exact).mT
        grad_scores = weights * (grad_weights - grad_output_product[queries].T[..., None])
        grad_scores *= slope * scale
        key_by_head = _by_query_head(key[keys], query).to(exact)
        grad_query[queries] += (grad_scores @ key_by_head).transpose(0, 1)
        tile_grad_key = grad_scores.mT @ query[queries].transpose(0, 1).to(exact)
        grad_key[keys] += _by_key_head(tile_grad_key, key)
    return grad_query, grad_key, grad_value


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add a key without a value and with the score `sinks` [h] to every query, in place."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    output.mul_((lse - total).exp()[..., None])
    lse.copy_(total)


def sink_gradient(output: Tensor, lse: Tensor, gradient: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of `sinks` [h], from the output with them and its gradient."""
    weights = (sinks.to(lse.dtype) - lse).exp()
    return -(weights * (gradient.to(lse.dtype) * output).sum(-1)).sum(0)


def _is_fused(query: Tensor, value: Tensor, scoring: Scoring, shift: int | None) -> bool:
    """Return True if torch's FlashAttention computes this attention.

    It knows no soft cap. `shift` must be None (all keys), or 0 (causal) without a window.
    """
    is_causal = shift == 0 and not scoring.window
    is_plain = scoring.softcap is None and (shift is None or is_causal)
    size = query.shape[-1]
    if not is_plain or size != value.shape[-1]:
        return False
    if query.device.type == "cpu":
        return True
    has_16_bits = query.dtype in (torch.float16, torch.bfloat16)
    has_fused_size = size <= FUSED_HEAD and size % MULTIPLE == 0
    return query.device.type == "cuda" and has_16_bits and has_fused_size


_FORWARD = {
    "cpu": torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,
    "cuda": torch.ops.aten._scaled_dot_product_flash_attention,
}


def _for_kernel(*states: Tensor) -> list[Tensor]:
    """Return states [tokens, heads, d] as [1, heads, tokens, d]; on a CPU in float32 or more.

    A CPU has no kernel in 16 bits that is as fast, and a part's output would be rounded there.
    """
    if states[0].device.type == "cpu":
        exact = torch.promote_types(states[0].dtype, torch.float32)
        states = tuple(state.to(exact) for state in states)
    return [state.transpose(0, 1)[None] for state in states]


def _fused_gradients(
    states: list[Tensor], saved: list[Tensor], lse: Tensor, scoring: Scoring, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value by torch's FlashAttention.

    `states` are these three, `saved` are the output's gradient and the output, all [1, heads,
    tokens, d]. The keys are only some of those that the queries attend to, but `output` and `lse`
    [tokens, heads], the log sum exp of scores, are over all of them. The kernel computes a key's
    weight as exp(score - lse), so that these keys get their share of the whole softmax.
    """
    query, key, value = states
    gradient, output = (tensor.to(query.dtype) for tensor in saved)
    lse_by_head = lse.T[None].contiguous()
    if query.device.type == "cpu":  # this kernel takes fewer heads of keys than of queries
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, *states, output, lse_by_head, 0.0, causal, scale=scoring.scale
        )
    else:
        # Heads of keys are repeated: the backward kernel takes as many as of queries.
        groups = query.shape[1] // key.shape[1]
        repeated = [state.repeat_interleave(groups, dim=1) for state in (key, value)]
        no_lengths = None  # cumulative lengths of sequences: all have the same
        no_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a generator
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            gradient,
            query,
            *repeated,
            output,
            lse_by_head.float(),
            no_lengths,  # of queries
            no_lengths,  # of keys
            query.shape[2],
            key.shape[2],
            0.0,  # dropout
            causal,
            no_state,  # seed of dropout
            no_state,  # offset of dropout
            scale=scoring.scale,
        )
        grad_query, *grad_repeated = gradients
        gradients = (grad_query, *(g.unflatten(1, (-1, groups)).sum(2) for g in grad_repeated))
    grad_query, grad_key, grad_value = (tensor[0].transpose(0, 1) for tensor in gradients)
    return grad_query, grad_key, grad_value


def _tiles(
    queries: int, keys: int, shift: int | None, window: int | None
) -> Iterator[tuple[slice, slice]]:
    """Yield the tiles (queries, keys) in which a query attends to a key.

    Query a attends to key b if b <= a + shift, within the window; to all keys if `shift` is None.
    """
    for start in range(0, queries, TILE[0]):
        stop = min(start + TILE[0], queries)
        # Keys `low` to `high` - 1 are seen by at least one of these queries.
        low, high = 0, keys
        if shift is not None:
            high = min(keys, stop + shift)
            low = 0 if window is None else max(0, start + shift - window + 1)
        for key_start in range(low, high, TILE[1]):
            yield slice(start, stop), slice(key_start, min(key_start + TILE[1], high))


def _scores(
    query: Tensor,
    key: Tensor,
    scoring: Scoring,
    shift: int | None,
    queries: slice,
    keys: slice,
) -> tuple[Tensor, Tensor | float]:
    """Return a tile's scores, [h, queries, keys], and their slope: d score / d uncapped score.

    `query` [m, h, d] and `key` [n, k, d] are all m queries and n keys, with h and k heads. The
    tile's are those at `queries` and `keys`. Query a sees key b if b <= a + shift, within the
    window, where a and b count in all of them. `shift` None: every query sees all keys.

    The slope is 1 without a soft cap. Keys that a query does not see have the score LOWEST.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    rows = query[queries].transpose(0, 1).to(exact)
    scores = rows @ _by_query_head(key[keys], query).to(exact).mT * scale
    slope: Tensor | float = 1.0
    if scoring.softcap is not None:
        bounded = torch.tanh(scores / scoring.softcap)
        scores, slope = scoring.softcap * bounded, 1 - bounded.square()
    if shift is not None:
        # Indices among all queries and keys, not those of the tile: query a, key b.
        a = torch.arange(queries.start, queries.stop, device=query.device)[:, None]
        b = torch.arange(keys.start, keys.stop, device=query.device)
        visible = b <= a + shift
        if scoring.window is not None:
            visible &= b > a + shift - scoring.window
        scores = scores.masked_fill(~visible, LOWEST)
    return scores, slope


def _by_query_head(tokens: Tensor, query: Tensor) -> Tensor:
    """Return keys or values [n, k, d] as [h, n, d], each head repeated for its queries' heads."""
    return tokens.transpose(0, 1).repeat_interleave(query.shape[1] // tokens.shape[1], dim=0)


def _by_key_head(by_head: Tensor, tokens: Tensor) -> Tensor:
    """Return [h, n, d] summed over the heads that share one of keys, [n, k, d]."""
    heads = tokens.shape[1]
    return by_head.unflatten(0, (heads, -1)).sum(1).transpose(0, 1)
