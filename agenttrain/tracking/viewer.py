"""A page that shows rollouts token by token: who wrote each token, and how likely it was.

One HTML file without any other (it works from ``file://`` and as an e-mail attachment); the page
itself is `viewer.html`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from agenttrain.tracking.run_folder import write_atomically
from agenttrain.utils.json_lines import dumps

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, so the most byte-level tokens that one can be spread over."""


def render(
    rollouts: Iterable[Mapping[str, Any]], decode: Decode, *, title: str = "agenttrain rollouts"
) -> str:
    """The page for rollout records as `rollouts.read_step` gives them.

    Example: ``render(read_step(Path("outputs/shop/run"), 10), tokenizer.decode)``
    """
    known: dict[int, str] = {}
    data = [
        {**r, "trajectories": [_with_texts(t, decode, known) for t in r["trajectories"]]}
        for r in rollouts
    ]
    # Inside a script element only `</` and `<!--` mean something; JSON may spell `<` as an escape.
    payload = dumps(data).replace("<", "\\u003c")
    page = files("agenttrain.tracking").joinpath("viewer.html").read_text(encoding="utf-8")
    parts = {"__TITLE__": html.escape(title), "__DATA__": payload}
    # One pass: a title or a token that reads like a placeholder is left alone.
    return re.sub("|".join(parts), lambda match: parts[match[0]], page)


def _with_texts(
    trajectory: Mapping[str, Any], decode: Decode, known: dict[int, str]
) -> dict[str, Any]:
    return {**trajectory, "texts": token_texts(trajectory["token_ids"], decode, known)}


def write(
    path: Path,
    rollouts: Iterable[Mapping[str, Any]],
    decode: Decode,
    *,
    title: str = "agenttrain rollouts",
) -> None:
    """Write `render`'s page to `path` in one go."""
    write_atomically(path, render(rollouts, decode, title=title))


def token_texts(token_ids: Sequence[int], decode: Decode, known: dict[int, str]) -> list[str]:
    """The text of each token; `known` caches what single ids decode to.

    A character that is spread over several tokens stands at the first; the others show a dot. A
    token of bytes that are no character shows U+FFFD.
    """
    texts: list[str] = []
    while len(texts) < len(token_ids):
        start = len(texts)
        token_id = token_ids[start]
        if token_id not in known:
            known[token_id] = decode([token_id])
        text, width = known[token_id], 1
        if "\ufffd" in text:
            text, width = _joined(token_ids[start : start + LONGEST_CHARACTER], decode, text)
        texts += [text] + ["·"] * (width - 1)
    return texts


def _joined(token_ids: Sequence[int], decode: Decode, alone: str) -> tuple[str, int]:
    for width in range(2, len(token_ids) + 1):
        text = decode(token_ids[:width])
        if "\ufffd" not in text:
            return text, width
    return alone, 1
