"""The placeholder tokens that stand for images among token ids.

A vision-language model's chat template writes one placeholder token per image. Before the model
sees it, the placeholder is repeated: once for each vector that the image's pixels become. An image
of 64 x 96 pixels, for a model with patches of 16 pixels of which 2 x 2 become one vector::

    … <|vision_start|> <|image_pad|> x 6 <|vision_end|> …      2 rows of 3
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agenttrain.types import Image, PlacedImage
from agenttrain.utils.image_files import BadImage

SEEING = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
"""Model types whose images agenttrain reads. Each marks an image by repeats of one placeholder, and
has the positions of `Layout`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placeholders:
    """The placeholders of a model: their token, and how many of them an image has.

    Example: with patches of 16 pixels, 2 x 2 of which become one vector, and no bound that matters,
    an image of 64 x 96 pixels has ``grid(image) == (3, 2)`` and 6 tokens.
    """

    token_id: int
    """Id of the placeholder, e.g. of ``<|image_pad|>``."""
    patch: int
    """Pixels of a patch's side."""
    merge: int
    """Patches of the side of a square that becomes one vector."""
    least_pixels: int
    """Images are scaled up to this area, and down to `most_pixels`."""
    most_pixels: int

    def grid(self, image: Image) -> tuple[int, int]:
        """Return (rows, columns) of an image's vectors.

        The arithmetic of `smart_resize` in transformers' image processor of Qwen2-VL.
        """
        side, height, width = self.patch * self.merge, image.height, image.width
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self.most_pixels:
            shrink = math.sqrt(height * width / self.most_pixels)
            rows = max(1, math.floor(height / shrink / side))
            columns = max(1, math.floor(width / shrink / side))
        elif rows * columns * side**2 < self.least_pixels:
            stretch = math.sqrt(self.least_pixels / (height * width))
            rows, columns = math.ceil(height * stretch / side), math.ceil(width * stretch / side)
        return rows, columns

    def tokens(self, image: Image) -> int:
        """Return the number of placeholders of an image."""
        rows, columns = self.grid(image)
        return rows * columns

    def expand(self, ids: Sequence[int], images: Sequence[Image]) -> list[int]:
        """Repeat the n-th placeholder in `ids` as often as the n-th image needs.

        Raises BadImage unless there is one for each image.
        """
        count = sum(token_id == self.token_id for token_id in ids)
        if count != len(images):
            raise BadImage(
                f"the chat template writes {count} placeholders (id {self.token_id}) for "
                f"{len(images)} images"
            )
        remaining_images = iter(images)
        expanded: list[int] = []
        for token_id in ids:
            repeats = self.tokens(next(remaining_images)) if token_id == self.token_id else 1
            expanded += [token_id] * repeats
        return expanded

    def place(self, ids: Sequence[int], images: Sequence[Image]) -> tuple[PlacedImage, ...]:
        """Return the images at their placeholders in `ids`, which were expanded for them.

        Raises BadImage if the placeholders are not those of these images.
        """
        placed: list[PlacedImage] = []
        position = 0
        for image in images:
            while position < len(ids) and ids[position] != self.token_id:
                position += 1
            placed.append(PlacedImage(image, position, self.grid(image)))
            position = placed[-1].end
        covered = {i for image in placed for i in range(image.start, image.end)}
        if covered != {i for i, token_id in enumerate(ids) if token_id == self.token_id}:
            raise BadImage(f"the placeholders are not those of {', '.join(map(str, images))}")
        return tuple(placed)
