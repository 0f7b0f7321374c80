"""Tool replies with images: each is shown whole, or a marker stands in its place."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from agenttrain.chat.chat import Chat
from agenttrain.types import Image, Message, ToolError, ToolResult
from agenttrain.utils.content import content_of, parts

Parts = list[str | Image]
_warned: set[str] = set()


def readable(results: Sequence[ToolResult], chat: Chat) -> list[ToolResult]:
    """Return the results; those with images are errors for a model that reads no images."""
    if chat.placeholders is not None:
        return list(results)
    replaced = []
    for result in results:
        if result.parts:
            name = result.call.name
            if name not in _warned:
                _warned.add(name)
                print(
                    f"warning: tool {name}: returns images, and {chat.no_images}: the model gets "
                    "an error instead (logged once)",
                    file=sys.stderr,
                )
            text = f"Error: {name} returned an image, and {chat.no_images}"
            result = replace(result, content=text, error=ToolError.exception, parts=())
        replaced.append(result)
    return replaced


def fit_parts(
    chat: Chat,
    replies: Sequence[Message],
    *,
    length: Callable[[Sequence[Message]], int],
    room: int,
    max_result_tokens: Sequence[int],
) -> list[Message]:
    """Shorten the replies' contents until their suffix, whose `length` this counts, fits `room`.

    The texts of all replies are cut before an image is left out, the last one first. Each reply
    takes at most its `max_result_tokens`. If not even empty replies fit, they are empty.
    """
    shown = [
        _within(chat, parts(reply.get("content")), most)
        for reply, most in zip(replies, max_result_tokens, strict=True)
    ]

    def contents(all_parts: Sequence[Parts]) -> list[Message]:
        return [
            {**reply, "content": content_of(own)}
            for reply, own in zip(replies, all_parts, strict=True)
        ]

    while (excess := length(contents(shown)) - room) > 0:
        texts = [(i, j) for i, own in enumerate(shown) for j, p in enumerate(own) if p and _text(p)]
        pictures = [
            (i, j) for i, own in enumerate(shown) for j, p in enumerate(own) if not _text(p)
        ]
        if texts:
            i, j = texts[-1]
            text = str(shown[i][j])
            left = max(len(chat.encode_plain(text)) - excess, 0)
            shorter = chat.clip(text, left)
            shown[i][j] = shorter if len(shorter) < len(text) else ""
        elif pictures:
            i, j = pictures[-1]
            image = shown[i][j]
            assert isinstance(image, Image)
            shown[i][j] = _marker(chat, image, "there is no room for its")
        else:
            break
    return contents(shown)


def _text(part: str | Image) -> bool:
    return isinstance(part, str)


def _within(chat: Chat, values: Parts, most: int) -> Parts:
    """Cut the texts of a reply, and leave out images, so that it takes at most `most` tokens."""
    assert chat.placeholders is not None
    left = most
    kept: Parts = []
    for value in values:
        if isinstance(value, Image):
            tokens = chat.placeholders.tokens(value)
            if tokens > left:
                value = _marker(chat, value, f"max_result_tokens={most} is less than its")
        if isinstance(value, str):
            value = chat.clip(value, max(left, 0))
            tokens = len(chat.encode_plain(value))
        left -= tokens
        kept.append(value)
    return kept


def _marker(chat: Chat, image: Image, why: str) -> str:
    """Return the text in the place of an image that is left out."""
    assert chat.placeholders is not None
    size = f"{image.width}x{image.height}"
    return f"[image of {size} pixels left out: {why} {chat.placeholders.tokens(image)} tokens]"
