"""Cut a text to a number of tokens, visibly."""

from __future__ import annotations

from agenttrain.chat.encoding import Encoder, clean

CHARACTERS_PER_TOKEN = 8
"""First guess at how much text can fill a limit; doubled until it does."""
PREFIX = 8
"""An ASCII text has at most a token per character, and these that a tokenizer may put before it."""
MARKERS = ("… [{:,} characters clipped]", "…")


def clip(encoder: Encoder, text: str, max_tokens: int) -> str:
    """Return the whole text, or its head and a marker, in at most `max_tokens` plain tokens.

    Reads only as much of the text as can fit, whatever its length. Where the marker has no room, a
    bare ``…`` stands for the rest, or nothing. Example: ``clip(encoder, "7 " * 9999, 12)`` is
    ``"7 7 7… [19,993 characters clipped]"``.
    """
    text = clean(text)
    if text.isascii() and len(text) + PREFIX <= max_tokens:
        return text
    size = max(max_tokens, 1) * CHARACTERS_PER_TOKEN
    while True:
        ids, offsets = encoder.encode_plain_offsets(text[:size])
        if len(ids) > max_tokens:
            break
        if size >= len(text):
            return text
        size *= 2
    for marker in MARKERS:
        kept = max_tokens - len(encoder.encode_plain(marker.format(len(text))))
        # The longer marker is worth its tokens only where most of the limit is left for the text.
        if marker == MARKERS[0] and 2 * kept < max_tokens:
            continue
        while kept >= 0:
            head = text[: offsets[kept - 1][1]] if kept else ""
            clipped = head + marker.format(len(text) - len(head))
            # Tokens can merge across the cut or, with a character cut in two, split.
            excess = len(encoder.encode_plain(clipped)) - max_tokens
            if excess <= 0:
                return clipped
            kept -= excess
    return ""
