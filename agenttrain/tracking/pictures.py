"""Images of recorded rollouts: each is one file under rollouts/images/, named by its hash.

In a rollout's object the part of a message is ``{"type": "image", "sha256": "9f2b…", "width": 640,
"height": 480, "file": "images/9f2b….png"}``, and a span with images has ``"images": [{"start": 1,
"grid": [2, 3], "sha256": "9f2b…"}]``, with positions within the span.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rich.color import Color
from rich.style import Style
from rich.text import Text

from agenttrain.types import AgenttrainError, Image, Message, PlacedImage, Rollout
from agenttrain.utils.files import write_atomically
from agenttrain.utils.image_files import BadImage, picture_of, read_image

FOLDER = "images"
Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


class PictureMissing(AgenttrainError):
    """A file of an image is missing or was changed; the message names it."""


def recorded_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which each image is replaced by its hash, size and file."""
    return _with_parts(messages, _recorded)


def _with_parts(messages: Sequence[Message], convert: Callable[[Any], Any]) -> list[Message]:
    """Return messages with the parts of their content converted; a text is left as it is."""
    return [
        {**message, "content": [convert(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def _recorded(part: Any) -> Any:
    """Return a part of a message's content as it is recorded: an image by hash, size and file."""
    image = part.get("image") if isinstance(part, Mapping) else None
    if not isinstance(image, Image):
        return part
    return {
        "type": "image",
        "sha256": image.sha256,
        "width": image.width,
        "height": image.height,
        "file": f"{FOLDER}/{image.sha256}{image.suffix}",
    }


def shown_text(content: Any) -> str:
    """Return a message's content as text: an image is ``[image of 640x480 pixels (9f2b0c11)]``.

    A message of a record has an image's hash and size. One of a run in memory has the Image.
    """
    if not isinstance(content, list):
        return str(content or "")
    shown = []
    for part in content:
        if isinstance(part, Mapping) and "sha256" in part:
            size = f"{part['width']}x{part['height']}"
            shown.append(f"[image of {size} pixels ({part['sha256'][:8]})]")
        elif isinstance(part, Mapping) and isinstance(part.get("image"), Image):
            shown.append(f"[{part['image']}]")  # an Image's text has the same form
        else:
            shown.append(str(part.get("text", part) if isinstance(part, Mapping) else part))
    return "".join(shown)


def decoded(decode: Decode, ids: Sequence[int], images: Iterable[PlacedImage]) -> str:
    """Decode ids; an image's placeholders are ``[image of 64x96 pixels (9f2b0c11), 6 tokens]``."""
    return _decoded(
        decode, ids, [(image.start, image.tokens, str(image.image)) for image in images]
    )


def decoded_span(decode: Decode, ids: Sequence[int], images: Iterable[Mapping[str, Any]]) -> str:
    """Decode the ids of a recorded span; each of its `images` is ``[image 9f2b0c11, 6 tokens]``."""
    places = [(i["start"], prod(i["grid"]), f"image {i['sha256'][:8]}") for i in images]
    return _decoded(decode, ids, places)


def _decoded(decode: Decode, ids: Sequence[int], places: Iterable[tuple[int, int, str]]) -> str:
    """Decode ids; `places` are the first position, the tokens and the name of each image."""
    texts, position = [], 0
    for start, tokens, name in places:
        texts += [decode(ids[position:start]), f"[{name}, {tokens} tokens]"]
        position = start + tokens
    return "".join([*texts, decode(ids[position:])])


def blocks(image: Image, columns: int = 32) -> Text:
    """Return an image as characters for a terminal: each shows two pixels, one above the other."""
    width = min(columns, image.width)
    # Even, because a character has an upper and a lower pixel.
    height = max(round(image.height * width / image.width / 2), 1) * 2
    pixels = picture_of(image).convert("RGB").resize((width, height))
    text = Text()
    for y in range(0, height, 2):
        for x in range(width):
            upper, lower = pixels.getpixel((x, y)), pixels.getpixel((x, y + 1))
            text.append("▀", Style(color=Color.from_rgb(*upper), bgcolor=Color.from_rgb(*lower)))
        text.append("\n")
    return text


def image_path(part: Mapping[str, Any], folder: Path) -> Path:
    """Return the file of a recorded image in `folder`/images, whatever folder `part` names.

    A record of somebody else names a file, and gets no file from elsewhere on this machine.
    """
    return folder / FOLDER / Path(str(part.get("file"))).name


def with_data(messages: Sequence[Message], folder: Path) -> list[Message]:
    """Return recorded messages with each image of `folder`/images as a ``data:…`` address.

    An image whose file does not exist stays as it is.
    """

    def add_data(part: Any) -> Any:
        """Return a part of a message; that of a recorded image gets its file as ``data``."""
        if not isinstance(part, Mapping) or "sha256" not in part:
            return part
        path = image_path(part, folder)
        if not path.is_file():
            return part
        kind = "jpeg" if path.suffix == ".jpg" else "png"
        data = base64.b64encode(path.read_bytes()).decode()
        return {**part, "data": f"data:image/{kind};base64,{data}"}

    return _with_parts(messages, add_data)


def write_images(folder: Path, rollouts: Iterable[Rollout]) -> None:
    """Write the images of rollouts that `folder`/images lacks."""
    for rollout in rollouts:
        for trajectory in rollout.trajectories:
            for image in (placed.image for placed in trajectory.images):
                path = folder / FOLDER / f"{image.sha256}{image.suffix}"
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    write_atomically(path, image.data)


def with_pictures(record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return a rollout's object with the images of `folder`/images in its messages.

    Raises PictureMissing if an image's file is missing or was changed.
    """
    for trajectory in record["trajectories"]:
        for message in trajectory["messages"]:
            if isinstance(message.get("content"), list):
                message["content"] = [_read_part(part, folder) for part in message["content"]]
    return record


def _read_part(part: Any, folder: Path) -> Any:
    """Return a recorded part of a message with its image read from `folder`/images."""
    if not isinstance(part, Mapping) or "sha256" not in part:
        return part
    path = image_path(part, folder)
    try:
        image = read_image(path, most_pixels=part["width"] * part["height"])
    except BadImage as error:
        raise PictureMissing(f"{path}: an image of a recorded rollout: {error}") from error
    if image.sha256 != part["sha256"]:
        raise PictureMissing(f"{path}: its content is not what was written")
    return {"type": "image", "image": image}


def placed_images(
    span: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> tuple[PlacedImage, ...]:
    """Return the images of a recorded span, taken from its trajectory's messages."""
    if not span.get("images"):
        return ()
    image_of_hash = {
        part["image"].sha256: part["image"]
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part.get("image"), Image)
    }
    try:
        return tuple(
            PlacedImage(image_of_hash[i["sha256"]], i["start"], (i["grid"][0], i["grid"][1]))
            for i in span["images"]
        )
    except KeyError as error:
        raise PictureMissing(f"the messages of a rollout lack its image {error}") from error
