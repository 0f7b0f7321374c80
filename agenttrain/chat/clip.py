"""Cut a text to a number of tokens, visibly."""

from __future__ import annotations

from agenttrain.chat.encoding import Encoder, clean

CHARACTERS_PER_TOKEN = 8
"""First guess at how much text can fill a limit; doubled until it does."""
PREFIX = 8
"""An ASCII text has at most a token per character, and these that a tokenizer may put before it."""
MARKERS = ("… [{:,} characters clipped]", "…")


def clip(encoder: Encoder, text: str, max_tokens: int) -> str:
    """The whole text, or its head and a marker, in at most `max_tokens` plain tokens.

    Reads only as much of the text as can fit, whatever its length. Where the marker has no room, a
    bare ``…`` stands for the rest, or nothing. Example: ``clip(encoder, "7 " * 9999, 12)`` is
    ``"7 7 7… [19,993 characters clipped]"``.
    """
    text = clean(text)
    if text.isascii() and len(text) + PREFIX <= max_tokens:
        return text
    ids, ends, window = _window(encoder, text, max_tokens)
    if len(ids) <= max_tokens and window == len(text):
        return text
    for marker in MARKERS:
        kept = max_tokens - len(encoder.encode_plain(marker.format(len(text))))
        # The longer marker is worth its tokens only where most of the limit is left for the text.
        if marker == MARKERS[0] and 2 * kept < max_tokens:
            continue
        clipped = _fit(encoder, text, ends, kept, max_tokens, marker)
        if clipped is not None:
            return clipped
    return ""


def _window(encoder: Encoder, text: str, max_tokens: int) -> tuple[list[int], list[int], int]:
    """Ids and their end positions over a head of the text that fills `max_tokens`; its length."""
    size = max(max_tokens, 1) * CHARACTERS_PER_TOKEN
    while True:
        ids, offsets = encoder.encode_plain_offsets(text[:size])
        if len(ids) > max_tokens or size >= len(text):
            return ids, [end for _, end in offsets], min(size, len(text))
        size *= 2


def _fit(
    encoder: Encoder, text: str, ends: list[int], kept: int, max_tokens: int, marker: str
) -> str | None:
    """The longest head of about `kept` tokens that fits together with its marker."""
    while kept >= 0:
        head = text[: ends[kept - 1]] if kept else ""
        clipped = head + marker.format(len(text) - len(head))
        # Tokens can merge across the cut or, with a character cut in two, split.
        excess = len(encoder.encode_plain(clipped)) - max_tokens
        if excess <= 0:
            return clipped
        kept -= excess
    return None
