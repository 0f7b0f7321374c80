"""A causal language model over the rows of a RowCache: new tokens in, last logits out.

N rows of a forward pass, T its tokens (padded on the left), L the longest row's tokens after it,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agenttrain.engines.base import EngineError
from agenttrain.engines.language_model import language_model
from agenttrain.engines.mixers import has_mixers, layout_keywords
from agenttrain.engines.routers import RouteRecorder
from agenttrain.engines.soft_cap import keep_soft_cap
from agenttrain.engines.transformers.cache import RowCache
from agenttrain.engines.transformers.layers import LayerKind, layer_kinds
from agenttrain.engines.transformers.masks import make_masks, mask_names
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
    """Runs a model over rows of a KV cache: new token ids in, logits after the last one out.

    A row holds the cache of one sequence, in slots, one for each token. It is given by its index,
    and `EngineWorker` decides which request has which row. A pass is one call of the model: it
    feeds new ids to neighbouring rows, as an array with a line for each row. Lines with fewer ids
    than columns are padded on the left. `forward` does one pass, and `prefill` as many as long
    prompts need.

    Once built, a decoder is called in the decode thread only, in the block of `evaluating`.
    """

    def __init__(
        self,
        model: Any,
        max_rows: int,
        max_context: int,
        vision: Vision | None = None,
        autocast: torch.dtype | None = None,
        record_routes: bool = False,
    ) -> None:
        """Check that the model works with the row cache. Raises EngineError if it does not.

        `max_rows` sequences of `max_context` tokens fit in the cache. `vision` turns images into
        features, and `autocast` is the number format that forward passes compute in, if it differs
        from that of the weights. With `record_routes`, `recorder` records the experts of each row's
        last token.
        """
        keep_soft_cap(model)  # of attention scores: sdpa would drop it
        kinds = known_kinds(model)
        self.autocast = autocast
        self.vision = vision
        self.model = model
        self.device: torch.device = next(model.parameters()).device
        self.cache = RowCache(kinds, max_rows, max_context)
        self._window = next((kind.window for kind in kinds if kind.window is not None), None)
        self._mask_names = mask_names(model.config.get_text_config())
        self._mixer_keywords: dict[str, Any] = {}
        """Further keywords of the model in a padded pass. They give `next_pass` to its recurrent
        mixers as the layout of the rows, so that padding leaves their states as they are."""
        if self.cache.has_states:
            self._mixer_keywords |= layout_keywords(model, self.cache.next_pass)
        self.recorder: RouteRecorder | None = None
        self.batch_needs_routes = record_routes
        """False: no sequence of the current batch needs its experts, so that `recorder` is not
        used. `EngineWorker` sets it for each batch."""
        # A model that this cache does not fit is refused here, before anything is sampled wrongly.
        lengths = _checked_lengths(kinds, max_context)  # that the rows of this check have
        _compare_with_plain_forward(self, lengths)
        self.cache.free()
        if record_routes:
            with self.evaluating():  # it runs forward passes
                self.recorder = RouteRecorder(model, max_rows)

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
        # Long rows are fed alone, chunk by chunk, up to their last chunk.
        for i in range(len(new)):
            while len(new[i]) > CHUNK_TOKENS:
                self.forward(first + i, [new[i][:CHUNK_TOKENS]], [starts[i]], layouts[i : i + 1])
                starts[i] += CHUNK_TOKENS
                new[i] = new[i][CHUNK_TOKENS:]
        # Consecutive rows share a pass whose padded size stays within PASS_TOKENS.
        logits_of_passes: list[Tensor] = []

        def feed(begin: int, end: int) -> None:
            """Feed rows `begin` to `end` - 1 of the arguments in one pass."""
            rows = slice(begin, end)
            logits = self.forward(first + begin, new[rows], starts[rows], layouts[rows])
            logits_of_passes.append(logits)

        begin, widest = 0, 0  # first row of the pass, and ids of its longest row
        for i, ids in enumerate(new):
            widest = max(widest, len(ids))
            if i > begin and widest * (i + 1 - begin) > PASS_TOKENS:  # row i no longer fits
                feed(begin, i)
                begin, widest = i, len(ids)
        feed(begin, len(new))
        return torch.cat(logits_of_passes)

    def forward(
        self,
        first: int,
        new: Sequence[Ids],
        starts: Sequence[int],
        layouts: Sequence[Layout | None] = (),
    ) -> Tensor:
        """Feed new[i] to row first + i in one pass; return the last logits of each row, [N, V].

        Row first + i holds starts[i] tokens so far. `layouts` are those of the rows' sequences, if
        any of them has images.

        Example: rows with 2 and 3 cached tokens get 1 and 2 new ones. They are padded on the left
        to T = 2 ids, and the longer row then has L = 5 tokens. `position_NT` has each token's
        position. That of padding, here 1, does not matter: its keys and values go to a slot that
        nothing reads::

            ids_NT       0 a    position_NT  1 2
                         b c                 3 4
        """
        lengths = np.array([len(ids) for ids in new])
        self.cache.reserve(first + len(new), int((np.array(starts) + lengths).max()))
        next_pass = self.cache.next_pass
        next_pass.begin(first, starts, lengths, self.device)  # the cache's layers read it
        self.cache.clear_fresh_rows()  # of states of the sequences that had these rows before
        ids_NT = np.zeros((len(new), next_pass.width), dtype=np.int64)
        for row, ids in zip(ids_NT, new, strict=True):
            row[next_pass.width - len(ids) :] = ids
        dtype = self.autocast or self.model.dtype
        keywords = {
            "attention_mask": make_masks(next_pass, self._window, self._mask_names, dtype),
            "past_key_values": self.cache,
            "use_cache": True,
            **(self._mixer_keywords if next_pass.is_padded else {}),
        }
        recorder = self.recorder if self.batch_needs_routes else None
        with nullcontext() if recorder is None else recorder.recording(first, len(new)):
            if any(layout is not None for layout in layouts):
                return self._forward_with_images(ids_NT, starts, layouts, keywords)
            output = self.model(
                input_ids=self._tensor(ids_NT),
                position_ids=self._tensor(np.maximum(next_pass.position_NT, 0)),
                logits_to_keep=1,
                **keywords,
            )
            return output.logits[:, -1]

    def _forward_with_images(
        self,
        ids_NT: Ids,
        starts: Sequence[int],
        layouts: Sequence[Layout | None],
        keywords: Mapping[str, Any],
    ) -> Tensor:
        """Feed rows to the language model, with image features at their placeholders.

        `forward` has begun the pass and padded `ids_NT` on the left. `starts` are the tokens that
        each row has in the cache. Positions have three dimensions: time, height and width
        (`Layout`). A row without a layout has no images. Each of the `pieces` says which
        placeholders of the pass get which vectors of an image.
        """
        assert self.vision is not None
        width = ids_NT.shape[1]
        pad_N = self.cache.next_pass.padding_NT.sum(1)
        positions_3NT = np.zeros((3, *ids_NT.shape), dtype=np.int64)
        pieces: list[Piece] = []
        for row, (start, pad, layout) in enumerate(zip(starts, pad_N, layouts, strict=True)):
            layout = layout or Layout(())
            stop = start + width - int(pad)  # tokens start … stop - 1 of the sequence are fed
            positions_3NT[:, row, pad:] = layout.positions(start, stop)
            first_in_pass = row * width + int(pad)  # index of the first one in the flattened ids_NT
            pieces += layout.pieces(start, stop, first_in_pass)
        features = {p.image.sha256: self.vision.features(self.model, p.image) for p in pieces}
        output = language_model(self.model)(
            **embed(self.model, self._tensor(ids_NT), pieces, features),
            position_ids=self._tensor(positions_3NT),
            **keywords,
        )
        logits: Tensor = self.model.get_output_embeddings()(output.last_hidden_state[:, -1])
        return logits

    def _tensor(self, values: Ids) -> Tensor:
        return torch.from_numpy(values).to(self.device)


def known_kinds(model: Any) -> list[LayerKind]:
    """Return what each layer keeps of a sequence in the cache: keys and values, states, or both.

    Raises EngineError for a model that the row cache does not fit. A model with recurrent layers
    needs mixers whose convolutions and scans can be run over padded rows (`MixerLayout`).
    """
    config = model.config.get_text_config()
    kinds, unknown = layer_kinds(config)
    windows = {kind.window for kind in kinds if kind.window is not None}
    is_recurrent = any(kind.state_count for kind in kinds)
    attention = config._attn_implementation
    problem = None
    if unknown:
        problem = f"layers of {', '.join(unknown)}, for which this engine has no cache"
    elif len(windows) > 1:
        problem = f"windows of several lengths, {sorted(windows)}"
    elif getattr(model, "_is_stateful", False) and not is_recurrent:  # transformers' mark
        problem = "a recurrent state that its config does not name"
    elif is_recurrent and not has_mixers(model):
        problem = "recurrent layers whose scan takes no layout of rows"
    elif attention not in ("sdpa", "eager"):
        problem = f"attn_implementation={attention}, and neither sdpa nor eager"
    if problem:
        raise EngineError(
            f"engine=transformers: {type(model).__name__} has {problem}. Choose another model, or "
            "another engine."
        )
    return kinds


CHUNK_OF_SCAN = 64
"""Most tokens that a mixer's torch code scans at once, in most families."""
LONGEST_CHECKED = 1024
"""Longest window that the check crosses, in tokens."""


def _checked_lengths(kinds: Sequence[LayerKind], max_context: int) -> list[tuple[int, int]]:
    """Return the lengths with which `_compare_with_plain_forward` checks the cache.

    Each pair is the number of tokens that the check's two rows hold after a pass. The rows always
    differ, so that one is padded. With full attention alone: 3 and 1 after the first pass, then 7
    and 4 after one that continues them. With windows or states the first pass is longer than each
    of them, so that windows lose keys and scans run in chunks. A third pass feeds one token to each
    row, as decoding does.
    """
    windows = [kind.window for kind in kinds if kind.window and kind.window < max_context]
    # A window beyond LONGEST_CHECKED is not crossed: the engine would be slow to start.
    lengths_to_cross = [window for window in windows if window <= LONGEST_CHECKED]
    if any(kind.state_count for kind in kinds):
        lengths_to_cross.append(CHUNK_OF_SCAN)
    if not lengths_to_cross:
        return [(3, 1), (7, 4)]
    longest = max(lengths_to_cross) + 2
    return [(longest, 1), (longest + 4, 3), (longest + 5, 4)]


def _compare_with_plain_forward(decoder: Decoder, lengths: Sequence[tuple[int, int]]) -> None:
    """Raise EngineError for a model that computes something else with this cache, e.g. with ALiBi.

    Compares log-probabilities of two rows of different lengths, with and without the cache.
    `lengths` are the tokens that each row holds after each pass, e.g. [(3, 1), (7, 4)].
    """
    name = type(decoder.model).__name__
    dtype = decoder.autocast or decoder.model.dtype
    tolerance = 1e-3 if dtype is torch.float32 else 0.5
    try:
        vocabulary = decoder.model.get_input_embeddings().num_embeddings
        rows = [np.arange(1, n + 1) % vocabulary for n in lengths[-1]]
        starts = (0, 0)
        gaps = []
        with decoder.evaluating():
            for ends in lengths:
                new_ids = [
                    ids[start:end] for ids, start, end in zip(rows, starts, ends, strict=True)
                ]
                logprobs_2V = decoder.forward(0, new_ids, starts).float().log_softmax(-1)
                starts = ends
            # `logprobs_2V` are those after the last pass: compare the last token of each row.
            for logprobs_V, ids in zip(logprobs_2V, rows, strict=True):
                ids_1T = torch.from_numpy(ids)[None].to(decoder.device)
                plain = decoder.model(input_ids=ids_1T, use_cache=False)
                plain_logprobs_V = plain.logits[0, -1].float().log_softmax(-1)
                gaps.append((logprobs_V - plain_logprobs_V).abs().max())
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
