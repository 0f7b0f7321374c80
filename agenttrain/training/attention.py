"""Attention over packed rollouts: each attends to itself, causally, and to nothing else.

Two ways that transformers offers are silently wrong on its `sdpa` attention: `cu_seq_lens` keywords
are ignored, and packing is not detected from position ids while `use_cache` is on. This attention
takes the layout explicitly, honours sliding windows, soft caps and sinks, and refuses every keyword
and mask that it does not know.

Shapes: 1 x heads x T x head size for queries, keys and values; T tokens of all rollouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from agenttrain.training.attend import Scoring, attend
from agenttrain.training.kernels import Kernel, in_format, note
from agenttrain.training.layout import Block
from agenttrain.training.varlen import Varlen, attend_varlen, takes
from agenttrain.training.varlen import kernel as varlen_kernel
from agenttrain.types import AgenttrainError

NAME = "agenttrain_packed"

HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions"}
"""Keywords that carry nothing the attention itself would have to act on."""


class UnsupportedAttention(AgenttrainError):
    """The model asks its attention for something that packing does not honour."""


@dataclass(frozen=True, slots=True)
class WindowMask:
    """The mask of layers with a sliding window; the others get None.

    The mask decides, as in transformers' own attention: some models (PhiMoE, Qwen2-MoE) make one
    and never pass the keyword `sliding_window`.
    """

    window: int


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: WindowMask | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    blocks: tuple[Block, ...] | None = None,
    varlen: Varlen | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: returns [1, T, heads, head size] and no weights.

    `sliding_window` counts the token itself, `s_aux` [heads] are the sinks' scores; with `varlen`
    the layers that the kernel takes are one call. Raises UnsupportedAttention for other masks,
    caches, dropout and unknown keywords.
    """
    window = attention_mask.window if isinstance(attention_mask, WindowMask) else None
    if window is None:
        keywords["attention_mask"] = attention_mask
    if sliding_window != window and sliding_window is not None:
        keywords[f"sliding_window={sliding_window} with a mask for {window}"] = sliding_window
    _refuse(module, query, key, keywords)
    if blocks is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} does not pass the keyword `blocks` on to its attention"
        )
    scoring = Scoring(scale=scaling, window=window, softcap=softcap, sinks=s_aux)
    states = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    if varlen is not None and (kernel := varlen_kernel()) is not None:
        short = in_format(*states)
        if takes(short[0], short[2], scoring):
            note(Kernel.varlen)
            return attend_varlen(*short, varlen, scaling, kernel)[None], None
    # Split at once: the gradient of a slice is as large as what it was taken from.
    sizes = [block.tokens for block in blocks]
    queries, keys, values = (tensor.split(sizes) for tensor in states)
    outputs = []
    for block, own, own_key, own_value in zip(blocks, queries, keys, values, strict=True):
        output = attend(
            _padded(block, own),
            _after_prefix(block, keys, own_key),
            _after_prefix(block, values, own_value),
            scoring,
        )
        output = output.transpose(1, 2).flatten(0, 1)
        if block.padding.numel():
            output = _Rows.apply(output, block.scatter, block.gather, block.padding)
        outputs.append(output)
    return torch.cat(outputs)[None], None


class _Rows(torch.autograd.Function):
    """Rows at some positions, with a gradient that is a selection of rows too.

    `there` [rows] says from which row each comes, `back` [rows before] where each row went, and
    `unused` which rows before went nowhere, if some did. A row that went to several places has the
    gradient of the one in `back` only: that of padding is 0, for nothing attends to a padded key,
    and the output of a padded query is dropped.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, there: Tensor, back: Tensor, unused: Tensor | None
    ) -> Tensor:
        ctx.back, ctx.unused = back, unused
        return rows.index_select(0, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradient.index_select(0, ctx.back)
        return (
            (rows if ctx.unused is None else rows.index_fill_(0, ctx.unused, 0)),
            None,
            None,
            None,
        )


def _padded(block: Block, own: Tensor) -> Tensor:
    """Lay out the block's own tokens [tokens, heads, head size] as [segments, heads, length, head
    size]."""
    if block.padding.numel():
        own = _Rows.apply(own, block.gather, block.scatter, None)
    return own.unflatten(0, (block.segments, block.length)).transpose(1, 2)


def _after_prefix(block: Block, all_blocks: Sequence[Tensor], own: Tensor) -> Tensor:
    """Lay them out as `_padded` does, each segment after the block's prefix."""
    if not block.prefix_length:
        return _padded(block, own)
    prefix = all_blocks[block.prefix_block][block.prefix : block.prefix + block.prefix_length]
    repeated = prefix.transpose(0, 1).expand(block.segments, -1, -1, -1)
    return torch.cat((repeated, _padded(block, own)), dim=2)


def _refuse(module: torch.nn.Module, query: Tensor, key: Tensor, keywords: dict[str, Any]) -> None:
    """Raise UnsupportedAttention for keywords that are not harmless and for a cache."""
    causal = keywords.pop("is_causal", None)
    asked = sorted(
        name
        for name, value in keywords.items()
        if name not in HARMLESS
        and value is not None
        and not (isinstance(value, int | float) and value == 0)
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


def packed_mask(
    *,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> WindowMask | None:
    """Mask function for transformers: returns the window of a causal mask, if it has one.

    Raises UnsupportedAttention for chunked masks, a model's own masks, and padding.
    """
    if attention_mask is not None or use_vmap:
        raise UnsupportedAttention("the model adds to the causal mask what packing does not honour")
    if local_size is None:
        return None
    if local_size != getattr(config, "sliding_window", None):
        raise UnsupportedAttention("the model asks for a local mask that is no sliding window")
    return WindowMask(local_size)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)


@contextmanager
def packing(model: PreTrainedModel) -> Iterator[None]:
    """Within, the model's forward passes need the keyword `blocks`; its own attention after."""
    before = model.config._attn_implementation
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
