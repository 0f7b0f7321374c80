"""Attention over packed rollouts: each token attends to its own rollout, causally.

The two ways that transformers offers are silently wrong with its `sdpa` attention: it ignores
`cu_seq_lens` keywords, and it does not detect packing from position ids while `use_cache` is on.
This attention takes the layout explicitly, honours sliding windows, soft caps and sinks, and
refuses every keyword and mask that it does not know. With the kernel for sequences of any length,
on a GPU, it is one call per layer (`attend_varlen`), elsewhere one per block (`attend`).
The layout reaches attention as the one keyword `blocks` (`PackedTree`), and recurrent mixers as
`recurrent` (`agenttrain.training.recurrent`).

Shapes: T packed tokens of all rollouts, U keys with shared prefixes repeated, B segments (sequences
of a block), h heads (k of keys and values), m queries, n keys, d head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, masking_utils
from transformers.masking_utils import AttentionMaskInterface

from agenttrain.engines.mixers import MixerLayout, layout_keywords
from agenttrain.training.batch import Block, make_blocks
from agenttrain.training.context_tree import Split
from agenttrain.training.handed_states import HandedTree
from agenttrain.training.kernels import Kernel, count_call, fit, in_format, is_restrictive
from agenttrain.training.partial_attention import Scoring
from agenttrain.training.recurrent import RecurrentTree
from agenttrain.training.ring_attention import ring_attention
from agenttrain.training.segments import Segment, packed_positions
from agenttrain.training.selection import Repeat, Repeats, Select, make_repeats
from agenttrain.training.transfers import to_device
from agenttrain.types import AgenttrainError

NAME = "agenttrain_packed"

HARMLESS = {"position_ids", "use_cache", "cache_position", "output_attentions"}
"""Keywords that do not change attention."""
FOR_MIXERS = {"recurrent", "seq_idx"}
"""Keywords of the recurrent mixers beside attention, which gets all of them."""


class UnsupportedAttention(AgenttrainError):
    """The model asks its attention for something that packed attention does not support."""


@dataclass(frozen=True, slots=True)
class WindowMask:
    """Mask of the layers with a sliding window. Other layers get None.

    A layer gets it as `attention_mask`, and `packed_attention` takes the window from it, as
    transformers' own attention takes windows from masks. The keyword `sliding_window` is only
    compared with it: some models (PhiMoE, Qwen2-MoE) make a windowed mask and never pass the
    keyword.
    """

    window: int

    def __getitem__(self, queries: Any) -> WindowMask:
        """Return the mask of some of the queries, which has the same window.

        Gemma 4 indexes the masks of layers that reuse keys of earlier ones, always by all queries.
        """
        return self


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
    blocks: PackedTree | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: returns [1, T, heads, head size] and no weights.

    States are [1, heads, T, head size], of T packed tokens in the layout `blocks`.
    `sliding_window` includes the token itself. `s_aux` [heads] are the scores of the sinks. Raises
    UnsupportedAttention for other masks, caches, dropout and unknown keywords.

    It is computed in one of three ways: by several processes together (`blocks.split`), by one call
    of torch's varlen kernel, or by one call for each block of similar segments.
    """
    # A mask or window that packing cannot honour is put among the unknown keywords, so that
    # `_check_supported` names it in its error.
    window = attention_mask.window if isinstance(attention_mask, WindowMask) else None
    if window is None:
        keywords["attention_mask"] = attention_mask
    if sliding_window != window and sliding_window is not None:
        keywords[f"sliding_window={sliding_window} with a mask for {window}"] = sliding_window
    _check_supported(module, query, key, keywords)
    if blocks is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} does not pass the keyword `blocks` on to its attention"
        )
    scoring = Scoring(scale=scaling, window=window, softcap=softcap, sinks=s_aux)
    states = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [T, heads, d]
    if blocks.split is not None:  # several processes compute the tree together
        tree, group = blocks.split
        # `in_format`: as autocast casts them.
        return ring_attention(*in_format(*states), tree, group, scoring)[None], None
    if blocks.use_varlen and (kernel := varlen_kernel()) is not None:
        query_T, key_T, value_T = in_format(*states)
        if varlen_takes(query_T, value_T, scoring):
            count_call(Kernel.varlen)
            output = attend_varlen(query_T, key_T, value_T, blocks.varlen, scoring, kernel)
            return output[None], None
    # Otherwise block by block. `split` once instead of a slice for each block: autograd would make
    # a gradient of all T tokens for every slice.
    sizes = [block.tokens for block in blocks.blocks]
    queries, keys, values = (tensor.split(sizes) for tensor in states)
    outputs = []
    for block, query_block, key_block, value_block in zip(
        blocks.blocks, queries, keys, values, strict=True
    ):
        output = attend(  # states as [segments, heads, length, d]; keys with the shared prefix
            _lay_out(block, query_block),
            _lay_out(block, key_block, keys),
            _lay_out(block, value_block, values),
            scoring,
        )
        output = output.transpose(1, 2).flatten(0, 1)  # [segments x length, heads, d]
        if block.padding.numel():
            # Take the tokens out of the padded rows: `scatter` has the row of each. For the way
            # back, `gather` has the token of each row, and rows that are padding get no gradient.
            output = Select.apply(output, block.scatter, block.gather, block.padding)
        outputs.append(output)
    return torch.cat(outputs)[None], None


def _lay_out(block: Block, tokens: Tensor, blocks: Sequence[Tensor] = ()) -> Tensor:
    """Lay out a block's tokens [tokens, heads, d] as padded rows [segments, heads, length, d].

    `blocks` has the tokens of every block, [tokens, heads, d] each. It is given for keys and
    values: the shared prefix, which lies in earlier blocks, is put before each row. Queries need no
    prefix.
    """
    if block.padding.numel():
        # `gather` has the token of each position, and repeats one for padding. `scatter` has each
        # token's own position, whose gradient it gets: that of padding is 0.
        tokens = Select.apply(tokens, block.gather, block.scatter, None)
    padded = tokens.unflatten(0, (block.segments, block.length)).transpose(1, 2)
    if not blocks or not block.prefix:
        return padded
    prefix = [  # `part`: tokens `start` to `end` - 1 of an earlier block
        blocks[part.block][part.start : part.end].transpose(0, 1).expand(block.segments, -1, -1, -1)
        for part in block.prefix
    ]
    return torch.cat((*prefix, padded), dim=2)


def _check_supported(
    module: torch.nn.Module, query: Tensor, key: Tensor, keywords: dict[str, Any]
) -> None:
    """Raise UnsupportedAttention for keywords that change attention, and for a cache."""
    causal = keywords.pop("is_causal", None)
    unsupported = sorted(
        name
        for name, value in keywords.items()
        if name not in HARMLESS | FOR_MIXERS
        and value is not None
        and not (isinstance(value, int | float) and value == 0)  # False, or a dropout of 0.0
    )
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        unsupported.append("is_causal=False")
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:  # a batch, or keys from a cache
        unsupported.append(f"queries {tuple(query.shape)} over keys {tuple(key.shape)}")
    if unsupported:
        raise UnsupportedAttention(
            f"{type(module).__name__} asks its attention for {', '.join(unsupported)}, which "
            "packed attention does not honour"
        )


def packed_mask(
    *,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    attention_mask: Tensor | None = None,
    **_: Any,
) -> WindowMask | None:
    """Make the mask of a layer, as transformers' registered mask functions do.

    It is the window of a causal mask, or None for a causal mask of the whole sequence. Raises
    UnsupportedAttention for all other masks.
    """
    # transformers sets `use_vmap` if the model combines the mask with a function of its own.
    if attention_mask is not None or use_vmap:
        raise UnsupportedAttention("the model adds to the causal mask what packing does not honour")
    if local_size is None:
        return None
    if local_size != getattr(config, "sliding_window", None):
        raise UnsupportedAttention("the model asks for a local mask that is no sliding window")
    return WindowMask(local_size)


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, packed_mask)


@cache
def exclude_from_compilation() -> None:
    """Have torch.compile call packed attention as it is: its layout changes with the microbatch."""
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))


@contextmanager
def packing(model: PreTrainedModel) -> Iterator[None]:
    """Use packed attention in the block: forward passes then need the keyword `blocks`.

    Encoders keep the attention that they have.
    """
    config = model.config.get_text_config()
    former_name = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = former_name


@contextmanager
def no_search_for_packing() -> Iterator[None]:
    """Keep transformers from looking for packed sequences among position ids in the block.

    Before it makes a mask it reads from the ids whether there are several sequences, for which a
    GPU's host waits. `packed_mask` ignores the result, and other passes here have one sequence.
    """
    find_packed_sequences = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_packed_sequences


QUERIES_PER_CALL = 256
"""Queries of one call of a kernel, where `attend` divides them. A CPU kernel computes the scores of
later keys too and drops them: calls over 256 queries, each up to its own last key, take 0.7 to 0.95
times as long from 512 tokens on."""


def attend(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Compute causal attention of queries that are the last m of n positions.

    Shapes: query [B, h, m, d], key and value [B, k, n, d], result [B, h, m, d of values], for B
    segments, h heads and k heads of keys and values.
    """
    queries = query.shape[2]
    offset = key.shape[2] - queries  # keys of the prefix, before the first query's own
    if is_faster_in_float32(query):
        # Without autocast, which would cast the states back to bfloat16.
        with torch.autocast("cpu", enabled=False):
            exact = attend(query.float(), key.float(), value.float(), scoring)
        return exact.to(query.dtype)
    # A GPU's kernel takes causal attention of a sequence without a prefix in one call, with sinks
    # too (`_attend_with_sinks`): it skips the keys after a query by itself. Other calls compute the
    # scores of all their keys: on a CPU, with a mask for a prefix or a window, with a soft cap.
    # Parts of the queries, each with no more keys than it needs, then save time and memory.
    in_parts = query.device.type == "cpu" or offset or scoring.window or scoring.softcap
    size = QUERIES_PER_CALL if in_parts else queries
    parts = []
    for start in range(0, queries, size):
        end = min(start + size, queries)
        # Keys from the first in the window of the part's first query to its last query's own.
        first_key = 0 if scoring.window is None else max(0, offset + start - scoring.window + 1)
        keys = slice(first_key, offset + end)
        states = query[:, :, start:end], key[:, :, keys], value[:, :, keys]
        if scoring.softcap is not None:
            parts.append(_attend_explicitly(*states, scoring))
        elif scoring.sinks is not None:
            parts.append(_attend_with_sinks(*states, scoring))
        else:
            mask = _mask(end - start, states[1].shape[2], scoring.window, query.device)
            parts.append(_call_kernel(*states, mask, scoring.scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def is_faster_in_float32(query: Tensor) -> bool:
    """Return True if the backward pass is faster in float32: on a CPU, bfloat16, few queries.

    With 16 to 200 queries over 115 to 256 keys, torch's kernel in bfloat16 takes 1.5 to 2.5
    times as long for both passes, casts included. From 256 queries on it is no slower.
    """
    short = query.dtype is torch.bfloat16 and query.shape[2] < QUERIES_PER_CALL
    return short and query.device.type == "cpu" and query.requires_grad


def _call_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Call torch's attention. Its kernels need one head size, so narrower values are padded."""
    size = value.shape[-1]
    padding = query.shape[-1] - size
    if padding > 0:
        value = pad(value, (0, padding))
    if is_restrictive(query.device):  # a GPU, whose fused kernels refuse some heads and masks
        query, key, value, scale = fit(query, key, value, mask, scale)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return output if output.shape[-1] == size else output[..., :size]


def _mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return the mask [queries, keys], True where a query attends to a key.

    The queries are the last positions. None stands for plain causal attention of all positions.
    """
    offset = keys - queries
    has_window = window is not None and window < keys
    if offset == 0 and not has_window:
        return None
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)
    return mask.triu(offset - window + 1) if window is not None and has_window else mask


def _attend_with_sinks(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend with each head's sink as a first key, whose value is zero.

    A sink is a learnt score in the softmax without a value. No kernel takes one. So heads get an
    additional dimension, which carries the sink's score: queries are 1 there, keys 0, and the
    sink's key, 0 elsewhere, is score / scale. The scaled product is then exactly the score.

    Shapes: query [B, h, m, d], key and value [B, k, n, d].
    """
    assert scoring.sinks is not None
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    mask = _mask(query.shape[2], key.shape[2], scoring.window, query.device)  # [m, n]
    # `pad` takes (before, after) of the last dimension, then of the one before it.
    scores = (scoring.sinks.to(query.dtype) / scale)[None, :, None, None]
    sink_key = pad(scores.expand(key.shape[0], -1, 1, 1), (query.shape[-1], 0))  # [B, h, 1, d + 1]
    query = pad(query, (0, 1), value=1.0)  # [B, h, m, d + 1]
    key = torch.cat((sink_key, pad(key, (0, 1))), dim=2)  # [B, h, n + 1, d + 1]
    value = pad(value, (0, 0, 1, 0))  # [B, h, n + 1, d]
    if mask is not None:
        mask = pad(mask, (1, 0), value=True)  # all attend to the sink
        return _call_kernel(query, key, value, mask, scale)
    # Plain causal attention, m = n: the kernel lets query i attend to keys 0 … i. With the sink in
    # front of the keys these are one too few. So a query is put in front as well, and dropped.
    query = pad(query, (0, 0, 1, 0))
    return _call_kernel(query, key, value, None, scale)[:, :, 1:]


def _attend_explicitly(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Attend with all scores in memory, m x n per head: no fused kernel supports soft caps."""
    assert scoring.softcap is not None
    count_call(Kernel.math)
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = scoring.softcap * torch.tanh(query @ key.mT * (scale / scoring.softcap))
    mask = _mask(query.shape[2], key.shape[2], scoring.window, query.device)
    if mask is None:  # plain causal attention: m = n
        mask = scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is not None:
        sinks = scoring.sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    # A sink takes its share of the softmax, and its column is dropped: it has no value.
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, scores.dtype))
    return weights[..., : key.shape[2]].to(value.dtype) @ value


NEEDED = {"scale", "window_size"}
"""Keywords that this module needs of the kernel; torch has them from 2.11 on."""
CAUSAL = (-1, 0)
"""`window_size` of the kernel without a window: all keys before a query, none after it."""
SHORT_FORMATS = (torch.float16, torch.bfloat16)
"""Number formats that the kernel takes."""
LARGEST_HEAD = 256
"""Largest head that the kernel takes."""
OLDEST = (8, 0)
"""Compute capability of the first GPUs that FlashAttention 2 runs on (Ampere)."""

VarlenKernel = Callable[..., Tensor]
"""`torch.nn.attention.varlen.varlen_attn`, or a function that does the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Varlen:
    """Layout of a microbatch's B segments as torch's `varlen_attn` takes it."""

    cu_seqlens_q: Tensor
    """[B + 1] int32: packed position at which each segment starts, and the end."""
    cu_seqlens_k: Tensor
    """[B + 1] int32: the same in the list of keys, where each segment follows its prefix."""
    max_seqlen_q: int
    """Most tokens of a segment."""
    max_seqlen_k: int
    """Most keys of a segment."""
    keys: Repeats | None
    """The packed token of every key: a shared prefix is repeated for each segment after it. None if
    no prefix is shared: keys are the packed tokens."""


def make_varlen(segments: Sequence[Segment], device: torch.device) -> Varlen:
    """Return the layout of segments that are packed one after the other.

    Example: for segments of 5, 3, 2 and 1 tokens, the last two with the second as prefix, the keys
    are ``0 … 4 | 5 6 7 | 5 6 7 8 9 | 5 6 7 10``.
    """
    query_lengths = [segment.length for segment in segments]
    key_lengths = [segment.prefix_length + segment.length for segment in segments]
    keys = None
    if key_lengths != query_lengths:
        keys = make_repeats(torch.cat([packed_positions(segment) for segment in segments]), device)
    cu_seqlens_q, cu_seqlens_k = (
        to_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)
        for lengths in (query_lengths, key_lengths)
    )
    return Varlen(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max(query_lengths),
        max_seqlen_k=max(key_lengths),
        keys=keys,
    )


class PackedTree:
    """Layout of packed segments, passed to every layer of a forward pass as keyword `blocks`.

    Each kernel's form of it is made when a layer first asks for it. A forward pass takes
    `keywords`. They give `packed_attention` this object, as its keyword `blocks`, of which it reads
    the first that it can use: `split`, then `varlen` (with `use_varlen`), then the attribute
    `blocks`. Recurrent layers get a layout by keywords of their own: `recurrent`, or with `split` a
    `HandedTree`.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        use_varlen: bool = False,
        split: Split | None = None,
    ) -> None:
        """Take segments that are packed one after the other.

        With `use_varlen` layers call torch's varlen kernel where it supports their attention. With
        `split` several processes compute these segments together: `segments` are all of them, but a
        forward pass gets the tokens of this process alone.
        """
        self.segments, self.device, self.use_varlen = segments, device, use_varlen
        self.split = split

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Segments of similar length as padded rows, for one call of `attend` each."""
        return make_blocks(self.segments, self.device)

    @cached_property
    def varlen(self) -> Varlen:
        """Layout for `attend_varlen`, one call per layer."""
        return make_varlen(self.segments, self.device)

    @cached_property
    def recurrent(self) -> RecurrentTree:
        """Layout for recurrent mixers of all tokens in this process."""
        return RecurrentTree(self.segments, self.device)

    def keywords(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the keywords of a forward pass over this tree, inside `packing`."""
        # With `split`, processes hand the states of recurrent mixers to each other.
        layout: MixerLayout = (
            self.recurrent if self.split is None else HandedTree(*self.split, self.device)
        )
        return {"blocks": self, "use_cache": False, **layout_keywords(model, layout)}


@cache
def varlen_kernel() -> VarlenKernel | None:
    """Return torch's `varlen_attn`, the kernel for packed sequences of any length.

    None if the installed torch lacks it, or one of its keywords in `NEEDED`.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    function: Any = varlen_attn
    keywords = inspect.signature(function).parameters.keys()
    if not keywords >= NEEDED:
        return None
    if "enable_gqa" in keywords:
        return function
    # torch before 2.13 takes fewer heads of keys than of queries without being told.
    return lambda *states, enable_gqa, **keywords: function(*states, **keywords)


def has_kernel(device: torch.device) -> bool:
    """Return True if the kernel runs on this device."""
    if device.type != "cuda" or varlen_kernel() is None:
        return False
    return torch.cuda.get_device_capability(device) >= OLDEST


def varlen_takes(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Return True if `varlen_kernel` supports this attention of states [T, h, d]."""
    plain = scoring.softcap is None and scoring.sinks is None
    size = query.shape[-1]
    return (
        plain and query.dtype in SHORT_FORMATS and size == value.shape[-1] and size <= LARGEST_HEAD
    )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    varlen: Varlen,
    scoring: Scoring,
    varlen_kernel: VarlenKernel,
) -> Tensor:
    """Compute causal attention of each segment to its prefix and itself, in one call.

    Shapes: query and result [T, h, d], key and value [T, k, d], for T packed tokens, h heads and k
    heads of keys and values.

    The caller has checked that the kernel takes these states (`varlen_takes`): causal attention in
    16 bits, with a window or without, but no soft cap and no sinks. If a segment has more keys than
    queries, FlashAttention aligns the last of both, as needed here.
    """
    # Each segment's keys are those of its prefix and its own. Segments with a common prefix get a
    # copy of it each, so that there are more keys than tokens. None: no segment has a prefix.
    if varlen.keys is not None:
        key, value = (Repeat.apply(state, varlen.keys) for state in (key, value))
    return varlen_kernel(
        query,
        key,
        value,
        varlen.cu_seqlens_q,
        varlen.cu_seqlens_k,
        varlen.max_seqlen_q,
        varlen.max_seqlen_k,
        scale=scoring.scale,
        # The kernel counts the keys before a query's own, `Scoring.window` includes that one.
        window_size=CAUSAL if scoring.window is None else (scoring.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
