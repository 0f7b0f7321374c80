"""One attention call per layer for all rollouts of a microbatch, on a GPU that has the kernel.

torch's `varlen_attn` (FlashAttention) takes sequences of any lengths one after the other. It is for
plain causal attention in 16 bits; windows, soft caps, sinks and float32 go block by block, as on a
CPU, for which torch has no such kernel.

Shapes: T packed tokens, U keys with shared prefixes repeated, B segments, h heads (k of keys and
values), d head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from agenttrain.training.attend import Scoring
from agenttrain.training.layout import Segment

NEEDED = {"scale", "window_size", "enable_gqa"}
"""Keywords of the kernel that are used; torch 2.13 has them."""
CAUSAL = (-1, 0)
SHORT_FORMATS = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256
OLDEST = (8, 0)
"""Compute capability of the first GPUs that FlashAttention 2 runs on (Ampere)."""

Kernel = Callable[..., Tensor]
"""`torch.nn.attention.varlen.varlen_attn`, or what does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """Where the sequences of a microbatch stand, as the kernel takes it."""

    queries_B: Tensor
    """[B + 1] int32: the packed position at which each segment starts, and the end."""
    keys_B: Tensor
    """[B + 1] int32: the same of its keys, prefix and own."""
    longest_query: int
    longest_key: int
    gather_U: Tensor | None
    """Packed position of every key; None: keys are the packed tokens, as nothing is shared."""


def make_varlen(segments: Sequence[Segment], device: torch.device) -> Varlen:
    """Lay out segments that stand one after the other.

    Example: segments of 5, 3, 2 and 1 tokens, the last two after the second, have the keys
    ``0 … 4 | 5 6 7 | 5 6 7 8 9 | 5 6 7 10``.
    """
    queries = [segment.length for segment in segments]
    keys = [segment.prefix_length + segment.length for segment in segments]
    gather = None
    if keys != queries:
        spans = [
            (start, start + length)
            for s in segments
            for start, length in ((s.prefix, s.prefix_length), (s.start, s.length))
        ]
        gather = torch.cat([torch.arange(*span) for span in spans]).to(device)
    return Varlen(
        queries_B=_starts(queries, device),
        keys_B=_starts(keys, device),
        longest_query=max(queries),
        longest_key=max(keys),
        gather_U=gather,
    )


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


@cache
def kernel() -> Kernel | None:
    """The installed torch's kernel, if it has one with what is needed."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    function: Any = varlen_attn
    return function if inspect.signature(function).parameters.keys() >= NEEDED else None


def has_kernel(device: torch.device) -> bool:
    """Return whether the kernel runs on this device."""
    if device.type != "cuda" or kernel() is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


def takes(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return whether the kernel computes this attention, of states [T, h, d] in their final
    format."""
    plain = scoring.window is None and scoring.softcap is None and scoring.sinks is None
    size = query.shape[-1]
    return (
        plain and query.dtype in SHORT_FORMATS and size == value.shape[-1] and size <= LARGEST_HEAD
    )


def attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, varlen: Varlen, scale: float | None, kernel: Kernel
) -> Tensor:
    """Causal attention of each segment to its prefix and itself, [T, h, d].

    Where a segment has more keys than queries the last of both stand together, as FlashAttention
    aligns them.
    """
    if varlen.gather_U is not None:
        key, value = (state.index_select(0, varlen.gather_U) for state in (key, value))
    return kernel(
        query,
        key,
        value,
        varlen.queries_B,
        varlen.keys_B,
        varlen.longest_query,
        varlen.longest_key,
        scale=scale,
        window_size=CAUSAL,
        enable_gqa=query.shape[1] != key.shape[1],
    )
