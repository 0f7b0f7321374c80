"""`Image`, how one is read from what rows and tools hold, and its place among token ids.

A vision-language model's chat template writes one placeholder token per image. Before the model
sees it, the placeholder is repeated: once for each vector that the image's pixels become. An image
of 64 x 96 pixels, for a model with patches of 16 pixels of which 2 x 2 become one vector::

    … <|vision_start|> <|image_pad|> x 6 <|vision_end|> …      2 rows of 3

This module is below `types.py`, because a span knows its images. Pillow is imported where an image
is read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST_PIXELS = 16_777_216
"""Pixels of the largest image that is read by default: 4096 x 4096."""
MOST_ASPECT = 200
"""Longest side of an image relative to its shortest: image processors refuse more."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*")
"""First bytes of these formats. WEBP is recognised apart, and BMP, whose two are a common text, is
not."""
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
KEPT = ("PNG", "JPEG")
"""Formats whose files are kept as they are, where nothing about them has to change."""


class BadImage(ValueError):
    """A value that is no image, or one that is not read; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An upright picture of one frame in red, green and blue, as the bytes of a PNG or JPEG file.

    Example: ``read_image("cat.png")`` is ``Image(sha256="9f2b…", width=640, height=480)``.
    """

    data: bytes = field(repr=False)
    sha256: str
    """Hash of `data`, in hex."""
    width: int
    """Pixels."""
    height: int

    @property
    def suffix(self) -> str:
        """Ending of the name of a file with this content."""
        return ".jpg" if self.data.startswith(b"\xff\xd8") else ".png"

    def __str__(self) -> str:
        return f"image of {self.width}x{self.height} pixels ({self.sha256[:8]})"


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image and the placeholders that stand for it among token ids."""

    image: Image
    start: int
    """Position of the first placeholder."""
    grid: tuple[int, int]
    """Rows and columns of the image's vectors."""

    @property
    def tokens(self) -> int:
        """Number of placeholders."""
        return self.grid[0] * self.grid[1]

    @property
    def end(self) -> int:
        """Position after the last placeholder."""
        return self.start + self.tokens


def moved(images: Iterable[PlacedImage], by: int) -> tuple[PlacedImage, ...]:
    """Return the images at positions that are larger by `by`."""
    return tuple(PlacedImage(one.image, one.start + by, one.grid) for one in images)


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
        left = iter(images)
        expanded: list[int] = []
        for token_id in ids:
            repeats = self.tokens(next(left)) if token_id == self.token_id else 1
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
        covered = {i for one in placed for i in range(one.start, one.end)}
        if covered != {i for i, token_id in enumerate(ids) if token_id == self.token_id}:
            raise BadImage(f"the placeholders are not those of {', '.join(map(str, images))}")
        return tuple(placed)


def parts(content: Any) -> list[str | Image]:
    """Return the texts and images of a message's content; neighbouring texts are joined.

    Example: ``[{"type": "text", "text": "a"}, {"type": "image", "image": picture}]`` gives ``["a",
    picture]``; a text gives itself.
    """
    if not isinstance(content, list | tuple):
        return [content or ""]
    values = [
        part.get("image") if part.get("type") == "image" else part.get("text") for part in content
    ]
    return _joined(value for value in values if value is not None)


def _joined(values: Iterable[str | Image]) -> list[str | Image]:
    """Join neighbouring texts, and leave out empty ones."""
    joined: list[str | Image] = []
    for value in values:
        if isinstance(value, str) and joined and isinstance(joined[-1], str):
            joined[-1] += value
        elif value != "":
            joined.append(value)
    return joined


def content_of(values: Sequence[str | Image]) -> str | list[dict[str, Any]]:
    """Return a message's content of texts and images; only texts give one text."""
    values = _joined(values)
    if all(isinstance(value, str) for value in values):
        return "".join(map(str, values))
    return [
        {"type": "text", "text": value}
        if isinstance(value, str)
        else {"type": "image", "image": value}
        for value in values
    ]


def read_content(values: Sequence[Any]) -> str | list[dict[str, Any]]:
    """Return a message's content of texts, images as `is_image` knows them, and parts of messages.

    Raises BadImage for an image that cannot be read and for any other value.
    """
    read: list[str | Image] = []
    for value in values:
        if isinstance(value, Mapping) and value.get("type") in ("text", "image"):
            value = value.get(value["type"])
        if not isinstance(value, str) and not is_image(value):
            raise BadImage(f"a {type(value).__name__} is neither a text nor an image")
        read.append(value if isinstance(value, str) else read_image(value))
    return content_of(read)


def text_of(values: Sequence[str | Image]) -> str:
    """Return the texts, with ``[image of 640x480 pixels (9f2b0c11)]`` for each image."""
    return "".join(value if isinstance(value, str) else f"[{value}]" for value in values)


def images_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[Image]:
    """Yield the images of messages, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            yield from (value for value in parts(content) if isinstance(value, Image))


def read_image(value: Any, *, most_pixels: int = MOST_PIXELS, folder: Path | None = None) -> Image:
    """Read an image from a file, its bytes, base64 text, Pillow's image or an array.

    A text is a path, relative to `folder`, or base64, with or without ``data:image/png;base64,``
    before it. A mapping is a cell of `datasets.Image`: its `bytes`, else its `path`. An array is
    uint8 [height, width, 1, 3 or 4]. A transparent image stands on white, one of several frames is
    its first, and one that a camera took on its side is turned. Raises BadImage.
    """
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and (encoded := _base64(value)) is not None:
        value = encoded
    if isinstance(value, str | Path):
        if str(value).startswith(("http://", "https://")):
            raise BadImage(
                f"{value!s:.80} is an address, and nothing is downloaded; store the file"
            )
        path = Path(value).expanduser()
        path = path if folder is None else folder / path
        try:
            value = path.read_bytes()
        except OSError as error:
            raise BadImage(f"{path} cannot be read: {error.strerror or error}") from error
    if isinstance(value, bytes | bytearray):
        return _from_file(bytes(value), most_pixels)
    if is_picture(value):
        return _from_pillow(value, most_pixels)
    if is_array(value):
        return _from_pillow(_from_array(value), most_pixels)
    raise BadImage(
        f"a value of the type {type(value).__name__} is no image; give a path, base64 text, bytes, "
        "or an image of Pillow or NumPy"
    )


def is_picture(value: object) -> bool:
    """Return True for an image of Pillow's; a program that has made one has imported Pillow."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def is_array(value: object) -> bool:
    """Return True for an array of the shape and type of an image: uint8 [h, w, 1, 3 or 4]."""
    shape: Any = getattr(value, "shape", ())
    return str(getattr(value, "dtype", "")) == "uint8" and len(shape) == 3 and shape[2] in (1, 3, 4)


def is_image(value: object) -> bool:
    """Return True for a value of a tool that is an image: of Pillow, an array, a file, its path.

    A text is never one.
    """
    if isinstance(value, Image) or is_picture(value) or is_array(value):
        return True
    if isinstance(value, bytes | bytearray):
        return is_file(bytes(value[:16]))
    return isinstance(value, Path) and value.suffix.lower() in ENDINGS


def is_file(data: bytes) -> bool:
    """Return True if bytes begin as a file of FORMATS does."""
    return data.startswith(MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _base64(text: str) -> bytes | None:
    """Decode a data address, or base64 text of an image; None for other texts."""
    head, comma, body = text.partition(",")
    if text.startswith("data:"):
        if not comma or ";base64" not in head:
            raise BadImage(f"{text[:40]!r} is no data address with base64")
    elif len(text) >= 64 and "." not in text:
        body = text
    else:
        return None
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        if text.startswith("data:"):
            raise BadImage(f"its base64 is broken: {error}") from error
        return None
    return data if is_file(data) or text.startswith("data:") else None


def _from_file(data: bytes, most_pixels: int) -> Image:
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check_size(picture.size, most_pixels)
            picture.verify()  # a file that lacks its end, though it can be decoded
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            upright = picture.getexif().get(0x0112, 1) == 1
            frames = getattr(picture, "n_frames", 1)
            picture.load()
            plain = picture.mode == "RGB" and "transparency" not in picture.info
            if plain and picture.format in KEPT and upright and frames == 1:
                return _image(data, picture.size)
            return _from_pillow(picture, most_pixels)
    except BadImage:
        raise
    except Pillow.UnidentifiedImageError as error:  # its own message names an object in memory
        raise BadImage(
            f"it cannot be decoded: its content is none of {', '.join(FORMATS)}, or cut short"
        ) from error
    except Pillow.DecompressionBombError as error:
        raise BadImage(f"it is too large to be decoded: {error}") from error
    except Exception as error:  # Pillow's readers raise what a broken file makes of them
        raise BadImage(f"it cannot be decoded: {str(error) or type(error).__name__}") from error


def _check_size(size: tuple[int, int], most_pixels: int) -> None:
    width, height = size
    if not width or not height:
        raise BadImage("it has no pixels")
    if width * height > most_pixels:
        raise BadImage(
            f"it has {width}x{height} pixels, more than data.max_image_pixels={most_pixels}"
        )
    if max(width, height) > MOST_ASPECT * min(width, height):
        raise BadImage(f"{width}x{height}: one side is more than {MOST_ASPECT} times the other")


def _from_pillow(picture: Any, most_pixels: int) -> Image:
    """Make an image of Pillow's first frame."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    _check_size(picture.size, most_pixels)
    if getattr(picture, "n_frames", 1) > 1:
        picture.seek(0)
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith("I;16"):  # 16 bits of grey, of which 8 are kept
        picture = picture.point(lambda grey: grey / 256).convert("L")
    if picture.mode in ("I", "F"):
        raise BadImage(f"its mode {picture.mode} has no fixed range; save it with 8 bits a channel")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        white = Pillow.new("RGBA", picture.size, "white")
        picture = Pillow.alpha_composite(white, picture)
    file = io.BytesIO()
    clean = Pillow.new("RGB", picture.size)  # without the notes that a file carries
    clean.paste(picture.convert("RGB"))
    clean.save(file, "PNG", compress_level=1)
    return _image(file.getvalue(), picture.size)


def _from_array(array: Any) -> Any:
    from PIL import Image as Pillow

    height, width, channels = array.shape
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    return Pillow.frombytes(mode, (width, height), array.tobytes())


def _image(data: bytes, size: tuple[int, int]) -> Image:
    digest = hashlib.sha256(data).hexdigest()
    return Image(data=data, sha256=digest, width=size[0], height=size[1])


def picture_of(image: Image) -> Any:
    """Return an image as one of Pillow's."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(image.data), formats=KEPT) as picture:
        picture.load()
        return picture
