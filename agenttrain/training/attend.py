"""Causal attention of a few sequences whose queries may begin after a prefix of their keys.

Shapes: B sequences, h heads (k for keys and values), m queries, n keys, d head size. The queries
are the last m of the n positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from agenttrain.training.kernels import Kernel, fit, is_choosy, note

QUERIES = 256
"""Queries of one call. A CPU kernel computes the keys after a query as well and drops them: calls
over 256 queries, each up to its own last key, take 0.7 to 0.95 times as long from 512 tokens on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How a model scores a query and a key; None: as plain attention does."""

    scale: float | None = None
    window: int | None = None
    """Keys that a query sees, its own included."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks: Tensor | None = None
    """[h] Score of a key that every query sees and that has no value."""


def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention of the last m positions to all n, [B, h, m, d of values]."""
    queries, offset = query.shape[2], key.shape[2] - query.shape[2]
    in_parts = query.device.type == "cpu" or offset or scoring.window or scoring.softcap
    size = QUERIES if in_parts else queries
    parts = []
    for first in range(0, queries, size):
        last = min(first + size, queries)
        low = 0 if scoring.window is None else max(0, offset + first - scoring.window + 1)
        seen = slice(low, offset + last)
        states = query[:, :, first:last], key[:, :, seen], value[:, :, seen]
        if scoring.softcap is not None:
            parts.append(_explicit(*states, scoring))
        elif scoring.sinks is not None:
            parts.append(_with_sinks(*states, scoring))
        else:
            mask = _mask(last - first, states[1].shape[2], scoring.window, query.device)
            parts.append(_kernel(*states, mask, scoring.scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Call a fused kernel; it wants one size of head, so smaller values are padded."""
    size = value.shape[-1]
    missing = query.shape[-1] - size
    if missing > 0:
        value = pad(value, (0, missing))
    if is_choosy(query.device):
        query, key, value, scale = fit(query, key, value, mask, scale)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return output if output.shape[-1] == size else output[..., :size]


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """[m, n] True where a query sees a key; None for plain causal attention."""
    before = keys - queries
    windowed = window is not None and window < keys
    if before == 0 and not windowed:
        return None
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(before)
    return seen.triu(before - window + 1) if window is not None and windowed else seen


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend with each sink as a first key without value; one more dimension of the heads carries
    its score."""
    assert scoring.sinks is not None
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    sinks = (scoring.sinks.to(query.dtype) / scale)[None, :, None, None]
    sink = pad(sinks.expand(key.shape[0], -1, 1, 1), (query.shape[-1], 0))
    query = pad(query, (0, 1), value=1.0)
    key = torch.cat((sink, pad(key, (0, 1))), dim=2)
    value = pad(value, (0, 0, 1, 0))
    mask = _mask(query.shape[2], key.shape[2] - 1, scoring.window, query.device)
    if mask is not None:
        return _kernel(query, key, value, pad(mask, (1, 0), value=True), scale)
    # One query more in front keeps the causal kernel: query i sees the sink and keys 0 … i.
    return _kernel(pad(query, (0, 0, 1, 0)), key, value, None, scale)[:, :, 1:]


def _explicit(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend with all scores in memory, m x n per head: no fused kernel caps them."""
    assert scoring.softcap is not None
    note(Kernel.math)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = scoring.softcap * torch.tanh(query @ key.mT * (scale / scoring.softcap))
    mask = _mask(query.shape[2], key.shape[2], scoring.window, query.device)
    if mask is None:
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype))
    return weights[..., : key.shape[2]].to(value.dtype) @ value
