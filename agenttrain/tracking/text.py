"""Text that a model or a tool wrote, made safe for a terminal."""

from __future__ import annotations

import re

# C0 without tab and newline, DEL and C1 (escape sequences start here), line and paragraph
# separators, and the marks that reorder or hide what follows.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)


def printable(text: str) -> str:
    """`text` without the characters that could move the cursor, change colours or hide text.

    Markup of rich is not touched: put the result into a `rich.text.Text`, which reads none.
    """
    return _UNSAFE.sub("", text)


def one_line(text: str, most: int) -> str:
    """`printable` on one line of at most `most` characters, cut with an ellipsis."""
    flat = " ".join(printable(text).split())
    return flat if len(flat) <= most else flat[: most - 1] + "…"
