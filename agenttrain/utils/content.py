"""Contents of chat messages that have images beside their texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from agenttrain.types import Image
from agenttrain.utils.image_files import BadImage, is_image, read_image


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
    return _join_texts(value for value in values if value is not None)


def _join_texts(values: Iterable[str | Image]) -> list[str | Image]:
    """Join neighbouring texts, and leave out empty ones."""
    joined: list[str | Image] = []
    for value in values:
        if isinstance(value, str) and joined and isinstance(joined[-1], str):
            joined[-1] += value
        elif value != "":
            joined.append(value)
    return joined


def content_of(values: Sequence[str | Image]) -> str | list[dict[str, Any]]:
    """Return texts and images as a message's content: one text, or a list of parts with images."""
    values = _join_texts(values)
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
    texts_and_images: list[str | Image] = []
    for value in values:
        if isinstance(value, Mapping) and value.get("type") in ("text", "image"):
            value = value.get(value["type"])
        if not isinstance(value, str) and not is_image(value):
            raise BadImage(f"a {type(value).__name__} is neither a text nor an image")
        texts_and_images.append(value if isinstance(value, str) else read_image(value))
    return content_of(texts_and_images)


def text_of(values: Sequence[str | Image]) -> str:
    """Return the texts, with ``[image of 640x480 pixels (9f2b0c11)]`` for each image."""
    return "".join(value if isinstance(value, str) else f"[{value}]" for value in values)


def images_in(messages: Iterable[Mapping[str, Any]]) -> Iterator[Image]:
    """Yield the images of messages, in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            yield from (value for value in parts(content) if isinstance(value, Image))
