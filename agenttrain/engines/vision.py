"""Images in a model of this process: their features, their positions, and where both enter.

The engine and the trainer both call these functions, so that both see the same features. An image's
features do not depend on the rest of the sequence. If the vision tower is frozen they are computed
once and cached. If it is trained, an update computes those of a microbatch in one pass.

N rows of a forward pass, T tokens of a row or of a packed batch, M = N*T, V placeholders, H hidden.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
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
PROCESSOR_FILES = (PROCESSOR_FILE, "video_preprocessor_config.json", "processor_config.json")
"""Settings of a model's image processors. Other programs that load its encoders want them."""
CACHED_TOKENS = 2**18
"""Placeholders whose features are cached. 4 GiB at hidden size 2,048 in 16 bits, with three
deepstack layers."""
KEY_DIGITS = 15
"""Hex digits of an image's hash in its key: keys fit 64 bits."""


class Features(NamedTuple):
    """Vectors that a model makes of an image."""

    rows_VH: Tensor
    """Vectors that replace the placeholders' embeddings."""
    deep: tuple[Tensor, ...]
    """[V, H] each, added to the hidden states after the first layers (Qwen3-VL's deepstack)."""


class Piece(NamedTuple):
    """Consecutive placeholders of one image in a forward pass: all of them, or a part.

    They get the image's vectors `first_vector` … `end_vector` - 1. Example: a prompt chunk of 100
    tokens ends with the first 4 of 6 placeholders: place 96, vectors 0 … 3.
    """

    place: int
    """Index of the first placeholder among the flattened tokens of the pass."""
    image: Image
    first_vector: int
    end_vector: int


def image_key(image: Image) -> int:
    """Return the number that replaces the ids of an image's placeholders where ids are compared.

    All images have the same placeholder id, so comparing ids would take two images for one. The key
    is negative, so that it is no token id.
    """
    return -1 - int(image.sha256[:KEY_DIGITS], 16)


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of a sequence with images, in three dimensions, and its placeholders.

    Multimodal rotary positions (https://arxiv.org/abs/2409.12191). A text token has the same
    position in all three dimensions. An image's vectors share one position in time, and count its
    rows in height and its columns in width. The next token follows the largest position so far.
    Example: ``a b``, an image of 2 x 3 vectors, ``c``::

        time    0 1   2 2 2 2 2 2   5
        height  0 1   2 2 2 3 3 3   5
        width   0 1   2 3 4 2 3 4   5

    They are computed from the sequence alone. transformers keeps an offset in the module instead,
    which belongs to whichever sequence it saw last.
    """

    images: tuple[PlacedImage, ...]

    def __post_init__(self) -> None:
        for placed, following in pairwise(self.images):
            if placed.end > following.start:
                raise BadImage(
                    f"{placed.image} and {following.image}: both stand at position "
                    f"{following.start}"
                )

    def positions(self, first: int, last: int) -> np.ndarray:
        """Return the positions of tokens `first` to `last` - 1 in time, height and width, [3, T].

        Example: ``a b``, an image of 2 x 3 vectors, ``c`` have positions 0 1 2 2 2 2 2 2 5 in time,
        0 1 2 2 2 3 3 3 5 in height, and 0 1 2 3 4 2 3 4 5 in width.
        """
        # Decoding: after the last image every position differs from the token's by one constant. An
        # image of 2 x 3 vectors takes 6 tokens, and moves the position on by 3.
        if self.images and first >= self.images[-1].end:
            offset = sum(max(placed.grid) - placed.tokens for placed in self.images)
            return _text_positions(first + offset, last - first)
        columns: list[np.ndarray] = []
        token = position = 0
        for placed in self.images:
            columns.append(_text_positions(position, placed.start - token))
            position += placed.start - token
            height, width = placed.grid
            grid = np.indices((1, height, width)).reshape(3, -1)
            columns.append(grid + position)
            position += max(height, width)
            token = placed.end
        columns.append(_text_positions(position, max(last - token, 0)))
        return np.concatenate(columns, axis=1)[:, first:last]

    def pieces(self, first: int, last: int, first_index: int) -> Iterator[Piece]:
        """Yield the placeholders among tokens `first` to `last` - 1, one piece per image.

        A forward pass feeds these tokens of the sequence. `first_index` is the index of token
        `first` among the flattened tokens of the pass.
        """
        for placed in self.images:
            # The image's tokens that are fed: positions in the sequence.
            begin, end = max(placed.start, first), min(placed.end, last)
            if begin < end:
                yield Piece(
                    place=first_index + begin - first,
                    image=placed.image,
                    first_vector=begin - placed.start,
                    end_vector=end - placed.start,
                )

    def keyed(self, ids: np.ndarray) -> np.ndarray:
        """Return a copy of the ids in which each image's key replaces its placeholders.

        All images have the same placeholder id: by their keys, a cache tells them apart.
        """
        keyed = ids.copy()
        for placed in self.images:
            keyed[placed.start : placed.end] = image_key(placed.image)
        return keyed


def _text_positions(position: int, count: int) -> np.ndarray:
    return np.broadcast_to(np.arange(position, position + count), (3, count))


class Vision:
    """The images of one model: pixels by its image processor, features by its vision tower.

    The engine and the trainer share one. `features` caches by image, for forward passes without a
    gradient. `compute` does not, for the update of a tower that is trained.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        processor: Any,
        *,
        frozen: bool = True,
        settings: bytes = b"",
    ) -> None:
        """With `frozen` the encoders are not trained: features stay valid for the whole run.

        `settings` is the content of the image processor's file, which checkpoints get too.
        """
        self.settings = settings
        self.placeholders, self.frozen = placeholders, frozen
        self._processor = processor
        self._cache: OrderedDict[str, Features] = OrderedDict()
        self._cached = 0
        """Placeholders whose features are cached."""
        self.computed = 0
        """Images whose features were computed."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Vision:
        # The copy of a model, e.g. the reference, shares cached features only of a frozen tower.
        if self.frozen:
            return self
        return Vision(self.placeholders, self._processor, frozen=False, settings=self.settings)

    def forget(self) -> None:
        """Drop the cached features of a trained tower, after its weights have changed."""
        if not self.frozen:
            self._cache.clear()
            self._cached = 0

    def features(self, model: Any, image: Image) -> Features:
        """Return the features of an image without a gradient, cached if possible."""
        features = self._cache.get(image.sha256)
        if features is None:
            (features,) = self.compute(model, [image], grad=False)
            self._cache[image.sha256] = features
            self._cached += len(features.rows_VH)
            while self._cached > CACHED_TOKENS and len(self._cache) > 1:
                self._cached -= len(self._cache.popitem(last=False)[1].rows_VH)
        else:
            self._cache.move_to_end(image.sha256)
        return features

    def compute(self, model: Any, images: Sequence[Image], *, grad: bool) -> list[Features]:
        """Compute the features of images in one pass of the tower. Raises BadImage."""
        self.computed += len(images)
        merge = self.placeholders.merge
        pixels, grids = [], []
        for image in images:
            processed = self._processor(images=[picture_of(image)], return_tensors="np")
            grid = processed["image_grid_thw"].tolist()
            rows, columns = self.placeholders.grid(image)
            if grid != [[1, rows * merge, columns * merge]]:
                raise BadImage(
                    f"{image}: the image processor makes a grid of {grid} patches of it, and "
                    f"{rows} x {columns} placeholders stand for it; preprocessor_config.json and "
                    "config.json of the model disagree"
                )
            pixels.append(torch.from_numpy(processed["pixel_values"]))
            grids += grid
        device = model.device
        # Not in inference mode, in which the engine runs: the trainer uses these tensors too.
        with (
            torch.inference_mode(False),  # this switches gradients on
            torch.set_grad_enabled(grad),
            torch.autocast(device.type, enabled=False),
        ):
            output = model.get_image_features(
                torch.cat(pixels).to(device), torch.tensor(grids, device=device), return_dict=True
            )
        counts = [len(rows_VH) for rows_VH in output.pooler_output]
        # Only some models have deepstack layers. transformers 5.16 does not split their features by
        # image.
        deep = [
            layer.split(counts) if isinstance(layer, Tensor) else layer
            for layer in getattr(output, "deepstack_features", None) or ()
        ]
        return [
            Features(rows_VH, tuple(layer[number] for layer in deep))
            for number, rows_VH in enumerate(output.pooler_output)
        ]


def embed(
    model: Any, ids_NT: Tensor, pieces: Sequence[Piece], features: dict[str, Features]
) -> dict[str, Any]:
    """Return keywords of the language model: embeddings, and the deepstack features.

    `ids_NT` has a negative key in place of each image's placeholder ids (`Layout.keyed`). `pieces`
    says which placeholders get which vectors of an image, in the order of the flattened tokens.
    `features` are those of the images, by hash. Raises BadImage unless there are exactly as many
    vectors as placeholders.
    """
    # The embeddings at negative keys are replaced below.
    embeddings_NTH = model.get_input_embeddings()(ids_NT.clamp(min=0))
    is_image_NT = ids_NT < 0
    placeholder_count = int(is_image_NT.sum())
    vector_count = sum(piece.end_vector - piece.first_vector for piece in pieces)
    if vector_count != placeholder_count:
        raise BadImage(f"{placeholder_count} placeholders, but {vector_count} vectors of images")
    if not pieces:
        return {"inputs_embeds": embeddings_NTH}
    device = ids_NT.device
    places_V = torch.cat(
        [
            torch.arange(p.place, p.place + p.end_vector - p.first_vector, device=device)
            for p in pieces
        ]
    )

    def vectors(layer: int | None) -> Tensor:
        """Return the vectors of all pieces: embeddings, or those of a deepstack layer."""
        parts = []
        for piece in pieces:
            rows_VH, deep = features[piece.image.sha256]
            vectors_VH = rows_VH if layer is None else deep[layer]
            parts.append(vectors_VH[piece.first_vector : piece.end_vector])
        return torch.cat(parts).to(device, embeddings_NTH.dtype)

    flat_MH = embeddings_NTH.flatten(0, 1).index_copy(0, places_V, vectors(layer=None))
    keywords: dict[str, Any] = {"inputs_embeds": flat_MH.view_as(embeddings_NTH)}
    layers = len(features[pieces[0].image.sha256].deep)
    if layers:
        keywords["visual_pos_masks"] = is_image_NT
        keywords["deepstack_visual_embeds"] = [vectors(layer) for layer in range(layers)]
    return keywords


def load_vision(folder: Path, placeholders: Placeholders, *, frozen: bool) -> Vision:
    """Load a model's image processor, on Pillow; `placeholders` are the model's."""
    # From its own module: the name `transformers.AutoImageProcessor` of 5.16 asks for torchvision,
    # which processors on Pillow do not need.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    settings = (folder / PROCESSOR_FILE).read_bytes()
    processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
    # Despite their names, Qwen-VL's processors read them as an image's least and most pixels.
    processor.size = {
        "shortest_edge": placeholders.least_pixels,
        "longest_edge": placeholders.most_pixels,
    }
    return Vision(placeholders, processor, frozen=frozen, settings=settings)


def copy_processors(source: Path, folder: Path) -> None:
    """Copy the settings of image processors that a model's folder has into another folder."""
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
