"""Attention masks of a forward pass over rows of a cache.

N rows of the pass, T its tokens (padded on the left), L the longest row's tokens after it, W
window.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agenttrain.engines.transformers.layers import Pass, is_ring

FULL = ("full_attention", "attention", "hybrid")
SLIDING = ("sliding_attention", "hybrid_sliding")
OTHER = ("linear_attention", "conv", "mamba", "moe", "mlp")
"""Names of layer types by which models look up masks. Those of `OTHER` have none."""


def mask_names(config: Any) -> set[str]:
    """Return the names by which a text model looks up masks, if it takes a dict of them.

    They are its layer types, and further ones that some models look up. Empty: the model takes one
    mask for all of its layers.
    """
    names = {*(getattr(config, "layer_types", None) or ())}
    if names <= {"full_attention"} or names <= {"sliding_attention"}:
        # With layers of one type every model takes one mask, and some take no dict.
        return set()
    # Bamba and others look masks up by this list, whose names may be other ones.
    names |= {*(getattr(config, "layers_block_type", None) or ())}
    # Falcon-H1 and Zamba look up these two, whatever the types of their layers are called.
    return names | {"full_attention", "linear_attention"}


def make_masks(
    next_pass: Pass, window: int | None, names: Collection[str], dtype: torch.dtype
) -> Tensor | dict[str, Tensor | None]:
    """Return what a model takes as `attention_mask`: a mask for each of `names`, or one for all.

    `names` are the layer types by which the model looks masks up, e.g. full_attention. If it is
    empty, all layers are of one type and take one mask. `window` is that of the model's sliding
    attention, if it has any.

    Sliding attention needs a mask of its own once a row is longer than the window: the cache then
    keeps the last tokens alone, as a ring (`ring_mask`). Until then it reads whole rows, as full
    attention does.
    """
    ring_window = window if is_ring(window, next_pass) else None
    if not names and ring_window is not None:
        return ring_mask(next_pass, ring_window, dtype)
    full = full_mask(next_pass, dtype)
    if not names:
        return full
    sliding = full if ring_window is None else ring_mask(next_pass, ring_window, dtype)
    by_name = {**dict.fromkeys(FULL, full), **dict.fromkeys(SLIDING, sliding)}
    return {name: by_name.get(name) for name in names}  # None for layers without attention


def full_mask(next_pass: Pass, dtype: torch.dtype) -> Tensor:
    """Return the mask [N, 1, T, L]: 0 where a query reads a key, else the lowest of `dtype`."""
    device = next_pass.device
    position_NT = next_pass.tensor(np.maximum(next_pass.position_NT, 0))
    is_later = torch.arange(next_pass.length, device=device) > position_NT[:, None, :, None]
    return additive(is_later, dtype)


def ring_mask(next_pass: Pass, window: int, dtype: torch.dtype) -> Tensor:
    """Return the mask [N, 1, T, W] of T new tokens over the W slots of a ring.

    A ring holds the last W tokens of a row that is longer than its window W, each token at its
    position modulo W. If T > 1, the new tokens are read after the ring's slots: [N, 1, T, W + T].

    Example: window 4, a row of 6 tokens gets one more. It is written to slot 6 % 4 = 2, so the
    slots hold positions 4 5 6 3, and the query at position 6 reads all of them.
    """
    start_N1, query_NT1 = next_pass.starts[:, None], next_pass.position_NT[:, :, None]
    # Last position in the ring: a single new token is in it, several are read behind it.
    last_N1 = start_N1 if next_pass.width == 1 else start_N1 - 1
    # Position that each slot holds when the queries read it: the latest one up to `last_N1` that is
    # the slot's number modulo W. Negative: the slot is empty.
    key_NW = last_N1 - (last_N1 - np.arange(window)) % window
    read_NS = key_NW  # positions of all keys that are read: S = W, or W + T
    if next_pass.width > 1:
        new_NT = np.where(next_pass.padding_NT, -1, next_pass.position_NT)
        read_NS = np.concatenate([key_NW, new_NT], 1)
    read_N1S = read_NS[:, None]
    is_hidden = (read_N1S < 0) | (read_N1S > query_NT1) | (read_N1S <= query_NT1 - window)
    if next_pass.width > 1:
        # Padding reads itself: a query that reads nothing would give NaN.
        is_itself = np.eye(next_pass.width, dtype=bool) & next_pass.padding_NT[:, :, None]
        is_hidden[:, :, window:] &= ~is_itself
    return additive(next_pass.tensor(is_hidden)[:, None], dtype)


def additive(is_hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to attention scores: sdpa and eager attention take this form."""
    mask = torch.zeros(is_hidden.shape, dtype=dtype, device=is_hidden.device)
    return mask.masked_fill_(is_hidden, torch.finfo(dtype).min)
