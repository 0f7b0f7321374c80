"""Images that rows name by an address: downloaded once per machine, only on request."""

from __future__ import annotations

import hashlib
import os

from agenttrain.types import Image
from agenttrain.utils.files import cache_folder
from agenttrain.utils.image_files import BadImage, read_image

MOST_BYTES = 64 * 2**20
"""Bytes of the largest file that is downloaded."""
TIMEOUT_S = 30.0
"""Longest wait for a connection, and for the next bytes."""


def image_at(address: str, *, most_pixels: int) -> Image:
    """Return the image at an address, from the cache if it was downloaded before.

    The cache is ``~/.cache/agenttrain/images``, or below XDG_CACHE_HOME. Only readable images are
    kept there. Raises BadImage.
    """
    file = cache_folder() / "images" / hashlib.sha256(address.encode()).hexdigest()
    if file.is_file():
        return read_image(file, most_pixels=most_pixels)
    data = _download(address)
    try:
        image = read_image(data, most_pixels=most_pixels)
    except BadImage as error:
        raise BadImage(f"{address:.200}: {error}") from error
    file.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that another process never reads half an image.
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    part.write_bytes(data)
    part.replace(file)
    return image


def _download(address: str) -> bytes:
    """Return the bytes at an address. Raises BadImage."""
    import httpx

    data = bytearray()
    try:
        with httpx.stream("GET", address, follow_redirects=True, timeout=TIMEOUT_S) as response:
            response.raise_for_status()
            for piece in response.iter_bytes():
                data += piece
                if len(data) > MOST_BYTES:
                    raise BadImage(f"{address:.200} has more than {MOST_BYTES} bytes")
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise BadImage(f"{address:.200} is answered with status {status}") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise BadImage(f"{address:.200} cannot be downloaded: {reason}") from error
    return bytes(data)
