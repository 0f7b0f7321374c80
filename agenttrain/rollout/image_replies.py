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


def refuse_unreadable_images(results: Sequence[ToolResult], chat: Chat) -> list[ToolResult]:
    """Return the results; for a model that reads no images, those with images become errors.

    The first such error of each tool is logged.
    """
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
    max_suffix_tokens: int,
    max_result_tokens: Sequence[int],
) -> list[Message]:
    """Shorten the contents of replies until their suffix has at most `max_suffix_tokens`.

    `length` returns the tokens of the suffix of some replies. The last texts are cut first, and
    only then images are left out, also from the last one on. Each reply takes at most its
    `max_result_tokens`. If not even empty replies fit, they are empty.
    """
    reply_parts = [
        _fit_reply(chat, parts(reply.get("content")), max_tokens)
        for reply, max_tokens in zip(replies, max_result_tokens, strict=True)
    ]

    def messages() -> list[Message]:
        return [
            {**reply, "content": content_of(content)}
            for reply, content in zip(replies, reply_parts, strict=True)
        ]

    while (excess := length(messages()) - max_suffix_tokens) > 0:
        # Places (reply i, part j) of what can still be shortened.
        places = [(i, j) for i, content in enumerate(reply_parts) for j in range(len(content))]
        images = [(i, j) for i, j in places if isinstance(reply_parts[i][j], Image)]
        texts = [(i, j) for i, j in places if (i, j) not in images and reply_parts[i][j]]
        if texts:
            i, j = texts[-1]
            text = str(reply_parts[i][j])
            shorter = chat.clip(text, max(len(chat.encode_plain(text)) - excess, 0))
            # A text that cannot be clipped further goes, so that the loop ends.
            reply_parts[i][j] = shorter if len(shorter) < len(text) else ""
        elif images:
            i, j = images[-1]
            image = reply_parts[i][j]
            assert isinstance(image, Image)
            assert chat.placeholders is not None
            tokens = chat.placeholders.tokens(image)
            reply_parts[i][j] = _marker(image, f"there is no room for its {tokens} tokens")
        else:
            break
    return messages()


def _fit_reply(chat: Chat, reply_parts: Parts, max_tokens: int) -> Parts:
    """Return the parts of a reply in at most `max_tokens` tokens.

    Texts are clipped, and a marker takes the place of an image that does not fit.
    """
    assert chat.placeholders is not None
    remaining = max_tokens
    fitted: Parts = []
    for part in reply_parts:
        if isinstance(part, Image):
            tokens = chat.placeholders.tokens(part)
            if tokens > remaining:
                # The model reads the limit of the whole reply, also if earlier parts used some.
                why = f"max_result_tokens={max_tokens} is less than its {tokens} tokens"
                part = _marker(part, why)
        if isinstance(part, str):  # a text, or the marker
            part = chat.clip(part, max(remaining, 0))
            tokens = len(chat.encode_plain(part))
        remaining -= tokens
        fitted.append(part)
    return fitted


def _marker(image: Image, why: str) -> str:
    """Return the text in the place of an image that is left out."""
    return f"[image of {image.width}x{image.height} pixels left out: {why}]"
