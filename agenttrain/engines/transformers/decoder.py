"""A causal language model over the rows of a RowCache: new tokens in, last logits out.

N rows of a forward pass, T its tokens (padded on the left), L the longest row's tokens after it,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agenttrain.engines.base import EngineError
from agenttrain.engines.transformers.cache import RowCache
from agenttrain.engines.vision import Layout, Piece, Vision, embed

Ids = np.ndarray
"""Token ids, int64."""
CHUNK_TOKENS = 1024
"""Tokens of one sequence in one forward pass: bounds the [T, L] mask of a long prompt."""
PASS_TOKENS = 8192
"""Tokens, padding included, of one forward pass over several new sequences."""
AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By training.mixed_precision."""


class Decoder:
    """Feeds rows of the cache. A row is a position in the cache, not a request."""

    def __init__(
        self,
        model: Any,
        max_rows: int,
        max_context: int,
        vision: Vision | None = None,
        autocast: torch.dtype | None = None,
    ) -> None:
        refuse_unknown_caches(model)
        self.autocast = autocast
        self.vision = vision
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        layers = model.config.get_text_config().num_hidden_layers
        self.cache = RowCache(layers, max_rows, max_context)
        _compare_with_plain_forward(self)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the block in eval and inference mode, under autocast if the trainer computes so.

        Eval mode switches off dropout, and gradient checkpointing, which would drop the cache.
        """
        training = self.model.training
        # Autocast's cache of weights is shared by all threads: the trainer would get weights
        # without a gradient from it.
        autocast = torch.autocast(
            self.device.type,
            self.autocast,
            enabled=self.autocast is not None,
            cache_enabled=False,
        )
        if training:
            self.model.eval()
        try:
            with torch.inference_mode(), autocast:
                yield
        finally:
            if training:
                self.model.train()

    def prefill(
        self,
        first: int,
        new: Sequence[Ids],
        starts: Sequence[int],
        layouts: Sequence[Layout | None] = (),
    ) -> Tensor:
        """Feed new[i] to row first + i, which holds starts[i] tokens; return last logits [N, V].

        Rows of similar lengths should be neighbours: they share a pass and its padding. `layouts`
        are those of the rows' sequences, if any of them has images.
        """
        starts = list(starts)
        new = list(new)
        for i in range(len(new)):
            while len(new[i]) > CHUNK_TOKENS:
                self.forward(first + i, [new[i][:CHUNK_TOKENS]], [starts[i]], layouts[i : i + 1])
                starts[i] += CHUNK_TOKENS
                new[i] = new[i][CHUNK_TOKENS:]
        # Consecutive rows share a pass whose padded size stays within PASS_TOKENS.
        logits, start, widest = [], 0, 0
        for i, ids in enumerate(new):
            widest = max(widest, len(ids))
            if i > start and widest * (i + 1 - start) > PASS_TOKENS:
                rows = slice(start, i)
                logits.append(self.forward(first + start, new[rows], starts[rows], layouts[rows]))
                start, widest = i, len(ids)
        logits.append(self.forward(first + start, new[start:], starts[start:], layouts[start:]))
        return torch.cat(logits)

    def forward(
        self,
        first: int,
        new: Sequence[Ids],
        starts: Sequence[int],
        layouts: Sequence[Layout | None] = (),
    ) -> Tensor:
        """Feed all of `new` in one pass. Arguments and result are those of `prefill`.

        Example: rows with 2 and 3 cached tokens get 1 and 2 new ones. T = 2, L = 5::

            ids_NT       0 a    column_NT  1 2    the first id of the first row is padding, whose
                         b c               3 4    keys and values go to the spare slot
        """
        width = max(len(ids) for ids in new)
        ids_NT = np.zeros((len(new), width), dtype=np.int64)
        for row, ids in zip(ids_NT, new, strict=True):
            row[width - len(ids) :] = ids
        pad_N = width - np.array([len(ids) for ids in new])
        length = int((np.array(starts) + width - pad_N).max())
        self.cache.reserve(first + len(new), length)
        column_NT = np.array(starts)[:, None] + np.arange(width) - pad_N[:, None]
        padding_NT = np.arange(width) < pad_N[:, None]
        window = self.cache.window
        rows_N1 = np.arange(first, first + len(new))[:, None]
        spare_slot = window.rows * window.capacity
        slots_NT = np.where(padding_NT, spare_slot, rows_N1 * window.capacity + column_NT)
        window.first, window.count, window.length = first, len(new), length
        window.slots = self._tensor(slots_NT.reshape(-1))
        positions_NT = self._tensor(np.maximum(column_NT, 0))
        # [N, 1, T, L], added to attention scores: both sdpa and eager attention take this form.
        dtype = self.autocast or self.model.dtype
        is_later = torch.arange(length, device=self.device) > positions_NT[:, None, :, None]
        mask = torch.zeros(is_later.shape, dtype=dtype, device=self.device)
        mask.masked_fill_(is_later, torch.finfo(dtype).min)
        if any(layout is not None for layout in layouts):
            return self._forward_with_images(ids_NT, mask, starts, pad_N, layouts)
        output = self.model(
            input_ids=self._tensor(ids_NT),
            attention_mask=mask,
            position_ids=positions_NT,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

    def _forward_with_images(
        self,
        ids_NT: Ids,
        mask: Tensor,
        starts: Sequence[int],
        pad_N: Ids,
        layouts: Sequence[Layout | None],
    ) -> Tensor:
        """Feed rows to the language model, with image features at their placeholders."""
        assert self.vision is not None
        width = ids_NT.shape[1]
        positions_3NT = np.zeros((3, *ids_NT.shape), dtype=np.int64)
        pieces: list[Piece] = []
        for row, (start, pad, layout) in enumerate(zip(starts, pad_N, layouts, strict=True)):
            layout = layout or Layout(())
            stop = start + width - int(pad)
            positions_3NT[:, row, pad:] = layout.positions(start, stop)
            pieces += layout.pieces(start, stop, row * width + int(pad))
        features = {p.image.sha256: self.vision.features(self.model, p.image) for p in pieces}
        output = self.model.model.language_model(
            **embed(self.model, self._tensor(ids_NT), pieces, features),
            attention_mask=mask,
            position_ids=self._tensor(positions_3NT),
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: Tensor = self.model.get_output_embeddings()(output.last_hidden_state[:, -1])
        return logits

    def _tensor(self, values: Ids) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def refuse_unknown_caches(model: Any) -> None:
    """Raise EngineError for a model that needs another cache than that of full attention."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        unsupported = sorted(set(layer_types) - {"full_attention"})
    else:
        unsupported = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    if getattr(model, "_is_stateful", False):
        unsupported.append("recurrent state")
    attention = config._attn_implementation
    if attention not in ("sdpa", "eager"):
        unsupported.append(f"attn_implementation={attention}")
    if unsupported:
        raise EngineError(
            f"engine=transformers: {type(model).__name__} has {', '.join(unsupported)}; "
            "this engine keeps full-attention caches under sdpa or eager attention. Choose such a "
            "model, or another engine."
        )


def _compare_with_plain_forward(decoder: Decoder) -> None:
    """Raise EngineError for a model that computes something else with this cache, e.g. with ALiBi.

    Compares log-probabilities of two short rows of different lengths, with and without the cache.
    """
    name = type(decoder.model).__name__
    dtype = decoder.autocast or decoder.model.dtype
    tolerance = 1e-3 if dtype is torch.float32 else 0.5
    try:
        vocabulary = decoder.model.get_input_embeddings().num_embeddings
        long, short = (np.arange(1, n + 1) % vocabulary for n in (7, 4))
        gaps = []
        with decoder.evaluating():
            decoder.forward(0, [long[:3], short[:1]], [0, 0])
            cached = decoder.forward(0, [long[3:], short[1:]], [3, 1]).float().log_softmax(-1)
            for row, ids in zip(cached, (long, short), strict=True):
                plain = decoder.model(input_ids=torch.from_numpy(ids)[None].to(decoder.device))
                gaps.append((row - plain.logits[0, -1].float().log_softmax(-1)).abs().max())
        gap = torch.stack(gaps).max().item()
    except Exception as error:
        raise EngineError(
            f"engine=transformers: {name} cannot run on this engine's cache "
            f"({type(error).__name__}: {error}). Choose another model, or another engine."
        ) from error
    if not gap <= tolerance:  # not `gap > tolerance`: NaN is a difference too
        raise EngineError(
            f"engine=transformers: through this engine's cache, {name} differs from a plain "
            f"forward pass by {gap:.3g} in log-probability (at most {tolerance}). Choose another "
            "model, or another engine."
        )
