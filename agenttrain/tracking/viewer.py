"""A page that shows rollouts token by token, with the origin and the probability of each token.

One HTML file that needs no other: it works from ``file://`` and as an e-mail attachment. Its
template is `viewer.html`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from agenttrain.tracking.notable import Section
from agenttrain.tracking.pictures import with_data
from agenttrain.utils.json_lines import dumps

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens included."""

LONGEST_CHARACTER = 4
"""Most bytes of a character in UTF-8, hence most byte-level tokens of a character."""


def render(
    rollouts: Iterable[Mapping[str, Any]],
    decode: Decode,
    *,
    title: str = "agenttrain rollouts",
    folder: Path | None = None,
    sections: Sequence[Section] = (),
) -> str:
    """Return the HTML page of rollout records, as `rollouts.read_step` yields them.

    `folder` has their images. Without it, images are shown by size and hash. With `sections` the
    page opens with lists of rollouts (`tracking/notable.py`).

    Example: ``render(read_step(Path("outputs/shop/run"), 10), tokenizer.decode)``
    """
    text_of_id: dict[int, str] = {}
    data = [
        {
            **rollout,
            "trajectories": [
                {
                    **trajectory,
                    "messages": trajectory["messages"]
                    if folder is None
                    else with_data(trajectory["messages"], folder),
                    "texts": token_texts(trajectory["token_ids"], decode, text_of_id),
                }
                for trajectory in rollout["trajectories"]
            ],
        }
        for rollout in rollouts
    ]
    front = as_script([asdict(section) for section in sections])
    return fill_page("viewer.html", data, {"__TITLE__": html.escape(title), "__FRONT__": front})


def fill_page(name: str, data: Any, texts: Mapping[str, str]) -> str:
    """Return the page `name` of this folder with its data and the texts of its placeholders."""
    page = files("agenttrain.tracking").joinpath(name).read_text(encoding="utf-8")
    parts = {**texts, "__DATA__": as_script(data)}
    # In one pass, so that a title or token that reads like a placeholder stays.
    return re.sub("|".join(parts), lambda match: parts[match[0]], page)


def as_script(data: Any) -> str:
    """Return data as JSON that can stand in a script element.

    There only `</` and `<!--` mean something, and JSON may spell `<` as an escape.
    """
    return dumps(data).replace("<", "\\u003c")


def token_texts(token_ids: Sequence[int], decode: Decode, text_of_id: dict[int, str]) -> list[str]:
    """Return the text of each token; `text_of_id` caches the texts of single ids.

    The first of several tokens that make one character has the character, the others a dot. Bytes
    that are no character are U+FFFD.
    """
    texts: list[str] = []
    while len(texts) < len(token_ids):
        start = len(texts)
        token_id = token_ids[start]
        if token_id not in text_of_id:
            text_of_id[token_id] = decode([token_id])
        text, width = text_of_id[token_id], 1  # the text, and the number of tokens that make it
        if "\ufffd" in text:
            # Try to complete the character with the tokens that follow.
            for count in range(2, min(LONGEST_CHARACTER, len(token_ids) - start) + 1):
                joined = decode(token_ids[start : start + count])
                if "\ufffd" not in joined:
                    text, width = joined, count
                    break
        texts += [text] + ["·"] * (width - 1)
    return texts
