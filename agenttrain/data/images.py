"""Images of dataset rows: read, checked, and put where the messages name them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.data.downloads import image_at
from agenttrain.types import Image
from agenttrain.utils.content import content_of
from agenttrain.utils.image_files import MOST_PIXELS, BadImage, read_image

COLUMN = "images"
"""Column with the images of a row, in the order in which its messages show them."""
ADDRESSES = ("http://", "https://")
URLS = ("data:", *ADDRESSES)


MOST_IMAGES = 1_000_000
"""Images of a dataset that are read by default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLimits:
    """Limits on the images of rows."""

    pixels: int = MOST_PIXELS
    """Most pixels of an image."""
    count: int = 8
    """Most images of a row."""
    total: int = MOST_IMAGES
    """Most images of all rows of a dataset, whose rows are checked before the run."""
    urls: bool = False
    """Images may be given by their addresses, which are then downloaded."""


def with_images(
    messages: Sequence[Mapping[str, Any]], column: Any, limits: ImageLimits
) -> list[dict[str, Any]]:
    """Return the messages with their images read and in place.

    A message names an image by a part of its content: ``{"type": "image", "image": …}``, OpenAI's
    ``{"type": "image_url", "image_url": {"url": …}}``, or ``{"type": "image"}`` for the next image
    of the `column`. Without a part of the last kind, the images of the column are put before the
    text of the first user message. Values are those of `read_image`. Raises ValueError with the
    message, or the number of the image, and the reason.
    """
    values = column if isinstance(column, list | tuple) else [column]
    if column is None:
        values = []
    images = iter([_read(value, f"{COLUMN}[{i}]", limits) for i, value in enumerate(values)])
    result = [_read_message(message, images, limits) for message in messages]
    unplaced = list(images)  # those that no part of a message has taken
    names_none = len(unplaced) == len(values)
    if unplaced and names_none:  # put them before the text of the first user message
        users = [message for message in result if message.get("role") == "user"]
        if not users:
            raise ValueError(f"{COLUMN}: there is no user message to show them in")
        content = users[0].get("content") or ""
        parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
        users[0]["content"] = [*content_of(unplaced), *parts]
    elif unplaced:
        raise ValueError(
            f"{COLUMN}: holds {len(values)} images, and the messages name "
            f"{len(values) - len(unplaced)} of them"
        )
    count = sum(
        part["type"] == "image"
        for message in result
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
    if count > limits.count:
        raise ValueError(f"{count} images, more than data.max_images={limits.count}")
    return result


def _read_message(
    message: Mapping[str, Any], column: Iterator[Image], limits: ImageLimits
) -> dict[str, Any]:
    """Return a message whose content is a text, or a list of texts and read images."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, list | tuple):
        return dict(message)
    values: list[str | Image] = []
    for number, part in enumerate(content):
        where = f"part {number} of the {role} message"
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind == "text" and isinstance(part.get("text"), str):
            values.append(part["text"])
        elif kind == "image_url":
            address = part.get("image_url")
            address = address.get("url") if isinstance(address, Mapping) else address
            values.append(_read(address, where, limits))
        elif kind == "image" and part.get("image") is not None:
            values.append(_read(part["image"], where, limits))
        elif kind == "image":
            image = next(column, None)
            if image is None:
                raise ValueError(f"{where} names an image that the column {COLUMN!r} does not have")
            values.append(image)
        else:
            raise ValueError(f"{where} is of the type {kind!r}; only texts and images can be read")
    if role == "assistant" and not all(isinstance(value, str) for value in values):
        raise ValueError("the assistant message holds an image, which no model here writes")
    return {**message, "content": content_of(values)}


def _read(value: Any, where: str, limits: ImageLimits) -> Image:
    """Read or download an image. Raises ValueError that begins with `where`."""
    try:
        if isinstance(value, str) and value.startswith(ADDRESSES):
            if not limits.urls:
                raise BadImage(
                    f"{value:.80} is an address, and nothing is downloaded; set "
                    "data.image_urls=true, or store the file"
                )
            return image_at(value, most_pixels=limits.pixels)
        return read_image(value, most_pixels=limits.pixels)
    except BadImage as error:
        raise ValueError(f"{where}: {error}") from error


def with_absolute_paths(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row of a file in `folder` whose paths of images are absolute."""

    def make_absolute(value: Any) -> Any:
        """Return an image's value with an absolute path, if it names a file of the folder.

        A name is a text, or the `path` of a mapping without `bytes`. Any other value is returned
        as it is.
        """
        if isinstance(value, Mapping) and not value.get("bytes") and value.get("path"):
            return {**value, "path": make_absolute(value["path"])}
        if not isinstance(value, str) or value.startswith(URLS) or not (folder / value).is_file():
            return value
        return str(folder / value)

    def convert_part(part: Any) -> Any:
        """Return a part of a message's content with absolute paths.

        An image is at ``image``, or in OpenAI's form at ``image_url``: a text or ``{"url": text}``.
        """
        if not isinstance(part, Mapping):
            return part
        result = dict(part)
        if part.get("image") is not None:
            result["image"] = make_absolute(part["image"])
        address = part.get("image_url")
        if isinstance(address, Mapping):
            result["image_url"] = {**address, "url": make_absolute(address.get("url"))}
        elif address is not None:
            result["image_url"] = make_absolute(address)
        return result

    result = dict(row)
    if COLUMN in row:
        column = row[COLUMN]
        if isinstance(column, list | tuple):
            result[COLUMN] = [make_absolute(value) for value in column]
        else:
            result[COLUMN] = make_absolute(column)
    for key in ("messages", "prompt"):
        if isinstance(row.get(key), list):
            result[key] = [
                {**message, "content": [convert_part(part) for part in message["content"]]}
                if isinstance(message, Mapping) and isinstance(message.get("content"), list)
                else message
                for message in row[key]
            ]
    return result
