"""Images in a model of this process: their features, their positions, and where both enter.

The engine and the trainer call these functions, so that both see an image alike. An image's
features do not depend on what is beside it: they need not be computed twice, and are kept where the
vision tower is frozen. Where it is trained, an update computes those of a microbatch in one pass. N
rows of a forward pass, T tokens of a row or of a packed batch, V of them placeholders, H hidden.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from agenttrain.types import Image, PlacedImage
from agenttrain.utils.image_files import BadImage, picture_of
from agenttrain.utils.placeholders import Placeholders

PROCESSOR_FILE = "preprocessor_config.json"
CACHED_TOKENS = 2**18
"""Placeholders whose features are kept: at hidden size 2,048 in 16 bits, with three deepstack
layers, 4 GiB."""
KEY_DIGITS = 15
"""Hex digits of an image's hash in its key: keys fit 64 bits."""


class Features(NamedTuple):
    """Vectors that a model makes of an image."""

    rows_VH: Tensor
    """Vectors that take the place of the placeholders' embeddings."""
    deep: tuple[Tensor, ...]
    """[V, H] each: added to the hidden states after the first layers (Qwen3-VL's deepstack)."""


class Piece(NamedTuple):
    """Neighbouring placeholders of one image among the tokens of a pass."""

    start: int
    """Position of the first one among the flattened tokens of the pass."""
    image: Image
    first: int
    """Number of its vector, of all of the image."""
    last: int
    """Number after that of the last one's vector."""


def image_key(image: Image) -> int:
    """Return the number that stands for an image's placeholders where ids are compared.

    It is negative, so that it is no token id: equal placeholders of different images differ.
    """
    return -1 - int(image.sha256[:KEY_DIGITS], 16)


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of a sequence with images, in three dimensions, and its placeholders.

    Multimodal rotary positions (https://arxiv.org/abs/2409.12191): a text token has one number
    three times. An image has its own first position in time, and in height and width those of its
    rows and columns; what follows it goes on after the largest. ``a b`` before an image of 2 x 3
    vectors, ``c`` after it::

        time    0 1   2 2 2 2 2 2   5
        height  0 1   2 2 2 3 3 3   5
        width   0 1   2 3 4 2 3 4   5

    They are computed from the sequence alone: transformers keeps an offset in the module, of the
    sequence that it saw last.
    """

    images: tuple[PlacedImage, ...]

    def __post_init__(self) -> None:
        for one, following in pairwise(self.images):
            if one.end > following.start:
                raise BadImage(
                    f"{one.image} and {following.image}: both stand at position {following.start}"
                )

    def positions(self, first: int, last: int) -> np.ndarray:
        """Return the positions of tokens `first` to `last` - 1, [3, T]."""
        columns: list[np.ndarray] = []
        token = position = 0
        if self.images and first >= self.images[-1].end:
            gained = sum(max(one.grid) - one.tokens for one in self.images)
            return _text(first + gained, last - first)
        for one in self.images:
            columns.append(_text(position, one.start - token))
            position += one.start - token
            high, wide = one.grid
            grid = np.indices((1, high, wide)).reshape(3, -1)
            columns.append(grid + position)
            position += max(high, wide)
            token = one.end
        columns.append(_text(position, max(last - token, 0)))
        return np.concatenate(columns, axis=1)[:, first:last]

    def pieces(self, first: int, last: int, start: int) -> Iterator[Piece]:
        """Yield the placeholders among tokens `first` to `last` - 1, which begin at `start`."""
        for one in self.images:
            low, high = max(one.start, first), min(one.end, last)
            if low < high:
                yield Piece(start + low - first, one.image, low - one.start, high - one.start)

    def keyed(self, ids: np.ndarray) -> np.ndarray:
        """Return a copy of the ids with an image's key in the place of its placeholders."""
        keyed = ids.copy()
        for one in self.images:
            keyed[one.start : one.end] = image_key(one.image)
        return keyed


def _text(position: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(position, position + count), (3, count))


class Vision:
    """The images of one model: pixels by its image processor, features by its vision tower."""

    def __init__(
        self,
        placeholders: Placeholders,
        processor: Any,
        *,
        frozen: bool = True,
        settings: bytes = b"",
    ) -> None:
        """`frozen`: the tower is never trained, so that features stay the same all run.

        `settings` is the content of the processor's file, for checkpoints.
        """
        self.settings = settings
        self.placeholders, self.frozen = placeholders, frozen
        self._processor = processor
        self._cache: OrderedDict[str, Features] = OrderedDict()
        self._cached = 0
        self.computed = 0
        """Images whose features were computed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Vision:
        # The copy of a model, e.g. the reference, has the same frozen tower, or another one.
        return (
            self
            if self.frozen
            else Vision(self.placeholders, self._processor, frozen=False, settings=self.settings)
        )

    def forget(self) -> None:
        """Drop the features, after the weights have changed."""
        if not self.frozen:
            self._cache.clear()
            self._cached = 0

    def features(self, model: Any, image: Image) -> Features:
        """Return the features of an image without a gradient, from the cache if they are there."""
        known = self._cache.get(image.sha256)
        if known is None:
            (known,) = self.compute(model, [image], grad=False)
            self._cache[image.sha256] = known
            self._cached += len(known.rows_VH)
            while self._cached > CACHED_TOKENS and len(self._cache) > 1:
                self._cached -= len(self._cache.popitem(last=False)[1].rows_VH)
        else:
            self._cache.move_to_end(image.sha256)
        return known

    def compute(self, model: Any, images: Sequence[Image], *, grad: bool) -> list[Features]:
        """Compute the features of images in one pass of the tower, in which none sees another.

        Raises BadImage if they are not as many as expected.
        """
        self.computed += len(images)
        merge = self.placeholders.merge
        pixels, grids = [], []
        for image in images:
            made = self._processor(images=[picture_of(image)], return_tensors="np")
            grid = made["image_grid_thw"].tolist()
            rows, columns = self.placeholders.grid(image)
            if grid != [[1, rows * merge, columns * merge]]:
                raise BadImage(
                    f"{image}: the image processor makes a grid of {grid} patches of it, and "
                    f"{rows} x {columns} placeholders stand for it; preprocessor_config.json and "
                    "config.json of the model disagree"
                )
            pixels.append(torch.from_numpy(made["pixel_values"]))
            grids += grid
        tower: Any = model.model.visual
        device = next(tower.parameters()).device
        # Not `inference_mode`, in which the engine runs: the trainer uses the tensors too.
        with (
            torch.inference_mode(False),  # which switches gradients on
            torch.set_grad_enabled(grad),
            torch.autocast(device.type, enabled=False),
        ):
            output = model.model.get_image_features(
                torch.cat(pixels).to(device), torch.tensor(grids, device=device), return_dict=True
            )
        deep = getattr(output, "deepstack_features", None) or ()
        return [
            Features(rows_VH, tuple(layer[number] for layer in deep))
            for number, rows_VH in enumerate(output.pooler_output)
        ]


def embed(
    model: Any, ids_NT: Tensor, pieces: Sequence[Piece], known: dict[str, Features]
) -> dict[str, Any]:
    """Return keywords of the language model: embeddings, and the deepstack features.

    `ids_NT` holds keys at placeholders (`Layout.keyed`). `pieces` are in the order of the flattened
    tokens, `known` has the features of their images. Raises BadImage unless there is a vector for
    each placeholder, and none left.
    """
    embeddings_NTH = model.get_input_embeddings()(ids_NT.clamp(min=0))
    seen_NT = ids_NT < 0
    if sum(piece.last - piece.first for piece in pieces) != int(seen_NT.sum()):
        raise BadImage(
            f"{int(seen_NT.sum())} placeholders, but {sum(p.last - p.first for p in pieces)} "
            "vectors of images"
        )
    if not pieces:
        return {"inputs_embeds": embeddings_NTH}
    device = ids_NT.device
    places_V = torch.cat(
        [torch.arange(p.start, p.start + p.last - p.first, device=device) for p in pieces]
    )

    def vectors(number: int | None) -> Tensor:
        """Return the vectors of all pieces: the rows, or those of a deepstack layer."""
        taken = []
        for piece in pieces:
            features = known[piece.image.sha256]
            own = features.rows_VH if number is None else features.deep[number]
            taken.append(own[piece.first : piece.last])
        return torch.cat(taken).to(device, embeddings_NTH.dtype)

    flat_MH = embeddings_NTH.flatten(0, 1).index_copy(0, places_V, vectors(None))
    keywords: dict[str, Any] = {"inputs_embeds": flat_MH.view_as(embeddings_NTH)}
    layers = len(known[pieces[0].image.sha256].deep)
    if layers:
        keywords["visual_pos_masks"] = seen_NT
        keywords["deepstack_visual_embeds"] = [vectors(number) for number in range(layers)]
    return keywords


@contextmanager
def language_attention(model: Any, name: str) -> Iterator[None]:
    """Use an attention function in the language model of a model that sees, in the block."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = name
    try:
        yield
    finally:
        config._attn_implementation = before


def load_vision(folder: Path, placeholders: Placeholders, *, frozen: bool) -> Vision:
    """Load the image processor of a model's folder, by Pillow; `placeholders` are the model's."""
    from transformers import AutoImageProcessor

    settings = (folder / PROCESSOR_FILE).read_bytes()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor.size = {
        "shortest_edge": placeholders.least_pixels,
        "longest_edge": placeholders.most_pixels,
    }
    return Vision(placeholders, processor, frozen=frozen, settings=settings)
