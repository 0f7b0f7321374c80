"""Reading images: from files, bytes, base64, Pillow's images and arrays.

Pillow is imported where an image is read: text-only runs do without it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agenttrain.types import Image

MOST_PIXELS = 16_777_216
"""Pixels of the largest image that is read by default: 4096 x 4096."""
MOST_ASPECT = 200
"""Longest side of an image relative to its shortest: image processors refuse more."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAGIC = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF8", b"II*\x00", b"MM\x00*")
"""First bytes of these formats, without WEBP (`is_file`) and BMP, whose two may begin a text."""
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")
EXIF_ORIENTATION = 0x0112
"""EXIF tag of the way that a camera was held; 1: upright."""
KEPT = ("PNG", "JPEG")
"""Formats whose files are kept as they are, where nothing about them has to change."""


class BadImage(ValueError):
    """A value that is no image, or one that is not read; the message is the reason."""


def read_image(value: Any, *, most_pixels: int = MOST_PIXELS) -> Image:
    """Read an image from a file, its bytes, base64 text, Pillow's image or an array.

    A text is a path or base64, with or without ``data:image/png;base64,`` before it. A mapping is a
    cell of `datasets.Image`: its `bytes`, else its `path`. An array is uint8 [height, width, 1, 3
    or 4]. A transparent image stands on white, one of several frames is its first, and one that a
    camera took on its side is turned. Raises BadImage.
    """
    if isinstance(value, Image):
        return value
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and (encoded := _decode_base64(value)) is not None:
        value = encoded
    if isinstance(value, str | Path):
        if str(value).startswith(("http://", "https://")):
            raise BadImage(
                f"{value!s:.80} is an address, and nothing is downloaded; store the file"
            )
        path = Path(value).expanduser()
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
    """Return True if a tool's return value is an image: Pillow's, an array, a file's bytes or path.

    A str is never one, though `read_image` also reads paths and base64 that are given as str.
    """
    if isinstance(value, Image) or is_picture(value) or is_array(value):
        return True
    if isinstance(value, bytes | bytearray):
        return is_file(bytes(value[:16]))
    return isinstance(value, Path) and value.suffix.lower() in ENDINGS


def is_file(data: bytes) -> bool:
    """Return True if bytes begin as a file of FORMATS does."""
    return data.startswith(MAGIC) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def _decode_base64(text: str) -> bytes | None:
    """Decode a data address, or base64 text of an image; None for other texts."""
    head, comma, body = text.partition(",")
    is_data_address = text.startswith("data:")
    if is_data_address:
        if not comma or ";base64" not in head:
            raise BadImage(f"{text[:40]!r} is no data address with base64")
    elif len(text) >= 64 and "." not in text:  # too long for a path without a file ending
        body = text
    else:
        return None
    try:
        data = base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        if is_data_address:
            raise BadImage(f"its base64 is broken: {error}") from error
        return None
    return data if is_data_address or is_file(data) else None


def _from_file(data: bytes, most_pixels: int) -> Image:
    """Make an image of a file: unchanged if it is a plain PNG or JPEG, else converted to PNG."""
    from PIL import Image as Pillow

    try:
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            _check_size(picture.size, most_pixels)
            picture.verify()  # raises for a file that lacks its end, though it can be decoded
        # Again: Pillow cannot decode a picture after `verify`.
        with Pillow.open(io.BytesIO(data), formats=FORMATS) as picture:
            upright = picture.getexif().get(EXIF_ORIENTATION, 1) == 1
            frames = getattr(picture, "n_frames", 1)
            picture.load()
            plain = picture.mode == "RGB" and "transparency" not in picture.info
            if plain and picture.format in KEPT and upright and frames == 1:
                return _make_image(data, picture.size)
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
    """Raise BadImage for a (width, height) that is empty, too large or too narrow."""
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
    return _make_image(file.getvalue(), picture.size)


def _from_array(array: Any) -> Any:
    from PIL import Image as Pillow

    height, width, channels = array.shape
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
    return Pillow.frombytes(mode, (width, height), array.tobytes())


def _make_image(data: bytes, size: tuple[int, int]) -> Image:
    digest = hashlib.sha256(data).hexdigest()
    return Image(data=data, sha256=digest, width=size[0], height=size[1])


def picture_of(image: Image) -> Any:
    """Return an image as one of Pillow's."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(image.data), formats=KEPT) as picture:
        picture.load()
        return picture
