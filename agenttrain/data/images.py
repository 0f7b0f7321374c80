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
    """Pixels of an image."""
    count: int = 8
    """Images of a row."""
    total: int = MOST_IMAGES
    """Images of all rows of a dataset that are checked before the run."""
    urls: bool = False
    """Images may be given by their addresses, which are then downloaded."""


def with_images(
    messages: Sequence[Mapping[str, Any]], column: Any, limits: ImageLimits
) -> list[dict[str, Any]]:
    """Return messages whose contents are texts, or lists of texts and read images.

    A part of a content is a text, ``{"type": "image", "image": …}``, OpenAI's ``{"type":
    "image_url", "image_url": {"url": …}}``, or ``{"type": "image"}`` for the next image of the
    `column`. Without a part of the last kind, the images of the column stand before the text of the
    first user message. Values are those of `read_image`. Raises ValueError with the message, or the
    number of the image, and the reason.
    """
    given = list(column) if isinstance(column, list | tuple) else [] if column is None else [column]
    left = iter([_read(value, f"{COLUMN}[{i}]", limits) for i, value in enumerate(given)])
    shown = [_message(message, left, limits) for message in messages]
    unplaced = list(left)
    if unplaced and len(unplaced) == len(given):
        users = [message for message in shown if message.get("role") == "user"]
        if not users:
            raise ValueError(f"{COLUMN}: there is no user message to show them in")
        text = users[0].get("content") or ""
        own = text if isinstance(text, list) else [{"type": "text", "text": text}]
        users[0]["content"] = [*content_of(unplaced), *own]
    elif unplaced:
        raise ValueError(
            f"{COLUMN}: holds {len(given)} images, and the messages name "
            f"{len(given) - len(unplaced)} of them"
        )
    count = sum(
        part["type"] == "image"
        for message in shown
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )
    if count > limits.count:
        raise ValueError(f"{count} images, more than data.max_images={limits.count}")
    return shown


def _message(
    message: Mapping[str, Any], column: Iterator[Image], limits: ImageLimits
) -> dict[str, Any]:
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


def absolute_paths(row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a row of a file in `folder` whose paths of images are absolute."""

    def resolved(value: Any) -> Any:
        if isinstance(value, Mapping) and not value.get("bytes") and value.get("path"):
            return {**value, "path": resolved(value["path"])}
        if not isinstance(value, str) or value.startswith(URLS) or not (folder / value).is_file():
            return value
        return str(folder / value)

    def part_of(part: Any) -> Any:
        if not isinstance(part, Mapping):
            return part
        address = part.get("image_url")
        if isinstance(address, Mapping):
            address = {**address, "url": resolved(address.get("url"))}
        named = {"image": resolved(part.get("image")), "image_url": resolved(address)}
        return {**part, **{key: value for key, value in named.items() if value is not None}}

    changed = dict(row)
    if COLUMN in row:
        own = row[COLUMN]
        is_list = isinstance(own, list | tuple)
        changed[COLUMN] = [resolved(value) for value in own] if is_list else resolved(own)
    for key in ("messages", "prompt"):
        if isinstance(row.get(key), list):
            changed[key] = [
                {**message, "content": [part_of(part) for part in message["content"]]}
                if isinstance(message, Mapping) and isinstance(message.get("content"), list)
                else message
                for message in row[key]
            ]
    return changed
