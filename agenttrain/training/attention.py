"""Attention over packed rollouts: each attends to itself, causally, and to nothing else.

Two ways that transformers offers are silently wrong on its `sdpa` attention: `cu_seq_lens` keywords
are ignored, and packing is not detected from position ids while `use_cache` is on. This attention
takes the rollouts' bounds explicitly, and refuses every keyword that it does not honour.

Shapes: 1 x heads x T x head size for queries, keys and values; T tokens of all rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from agenttrain.types import AgenttrainError

NAME = "agenttrain_packed"
SHORTEST = 0.85
"""Rollouts at least this long, relative to a block's longest, share its call. Measured on CPU with
96 rollouts of 80-250 tokens: 0.8 to 0.95 differ little, one call per rollout is 4 % slower."""

HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions"}
"""Keywords that carry nothing the attention itself would have to act on."""


class UnsupportedAttention(AgenttrainError):
    """The model asks its attention for something that packing does not honour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring rollouts of similar length, attended to in one padded call.

    Padding stands at the end, where causal attention never sees it, and its queries are dropped.
    """

    rollouts: int
    length: int
    """Of the longest."""
    gather: Tensor
    """[rollouts x length] Packed position of every padded one; padding repeats the last token."""
    scatter: Tensor
    """[tokens of the block] Padded position of every packed one."""


def make_blocks(bounds: Sequence[int], device: torch.device) -> tuple[Block, ...]:
    """Blocks of the rollouts between `bounds`, in packed order."""
    lengths = [end - start for start, end in pairwise(bounds)]
    blocks, first = [], 0
    for index in range(1, len(lengths) + 1):
        if index < len(lengths) and SHORTEST * lengths[first] <= lengths[index] <= lengths[first]:
            continue
        blocks.append(_make_block(bounds[first:index], lengths[first:index], device))
        first = index
    return tuple(blocks)


def _make_block(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Block:
    steps_L = torch.arange(lengths[0], device=device)
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    starts_B1 = torch.tensor(starts, device=device)[:, None]
    return Block(
        rollouts=len(lengths),
        length=lengths[0],
        gather=(starts_B1 + torch.minimum(steps_L, lengths_B1 - 1)).flatten(),
        scatter=(steps_L < lengths_B1).flatten().nonzero()[:, 0],
    )


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    blocks: tuple[Block, ...] | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """As transformers' attention functions: [1, T, heads, head size] and no weights.

    Raises UnsupportedAttention for masks, caches, dropout, windows, caps and sinks.
    """
    _refuse(module, query, key, attention_mask, keywords)
    if blocks is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} does not pass the keyword `blocks` on to its attention"
        )
    heads = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    outputs = [_attend(block, *heads, scaling=scaling) for block in blocks]
    return torch.cat(outputs)[None], None


def _attend(
    block: Block, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None
) -> Tensor:
    def padded(tensor: Tensor) -> Tensor:
        rows = tensor.index_select(0, block.gather)
        return rows.unflatten(0, (block.rollouts, block.length)).transpose(1, 2)

    output = scaled_dot_product_attention(
        padded(query), padded(key), padded(value), is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).flatten(0, 1).index_select(0, block.scatter)


def _refuse(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    keywords: dict[str, Any],
) -> None:
    causal = keywords.pop("is_causal", None)
    found = {name: value for name, value in keywords.items() if name not in HARMLESS}
    found["attention_mask"] = attention_mask
    asked = sorted(
        name
        for name, value in found.items()
        if value is not None and not (isinstance(value, int | float) and value == 0)
    )
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        asked.append("is_causal=False")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        asked.append(f"queries {tuple(query.shape)} over keys {tuple(key.shape)}")
    if asked:
        raise UnsupportedAttention(
            f"{type(module).__name__} asks its attention for {', '.join(asked)}, which packed "
            "attention does not honour"
        )


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)


@contextmanager
def packing(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model's forward passes need the keyword `blocks`; its own attention after."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
