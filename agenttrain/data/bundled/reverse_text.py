"""The reverse-text task: write a few words backwards, character by character.

    crazy habit lunar   ->   <reversed_text>ranul tibah yzarc</reversed_text>

The rules are those of `reverse-text` of verifiers, which prime-rl's first example trains: the
answer stands in tags, and the reward is its similarity to the right one. There the texts come from
a dataset of the hub; here they are random words, so that rows need no network.

Splits share the words and never a text: a checksum of its letters decides the split.
"""

from __future__ import annotations

import random
from typing import Any

from agenttrain.data.bundled.words import WORDS
from agenttrain.utils.data_fields import Data

TAG = "reversed_text"
INSTRUCTION = f"Write the text backwards, letter by letter. Put it in <{TAG}> tags."
RESIDUES = {"train": range(0, 8), "tune": (8,), "test": (9,)}
"""Remainders, modulo 10, of the sum of a text's character codes in each split."""


def row(
    split: Data[str], index: int, seed: Data[int], fewest: Data[int] = 2, most: Data[int] = 5
) -> dict[str, Any]:
    """Return row `index` of a split, a text of `fewest` to `most` words.

    It is drawn from (split, seed, index) alone. Example: ``{"task_id": "reverse_text/train/0/3",
    "messages": [{"role": "system", …}, {"role": "user", "content": "crazy habit lunar"}], "answer":
    "ranul tibah yzarc", "words": 3}``. Raises ValueError for an unknown split or impossible bounds.
    """
    if split not in RESIDUES:
        raise ValueError(f"split={split!r}: must be one of {', '.join(RESIDUES)}")
    if not 1 <= fewest <= most:
        raise ValueError(f"fewest={fewest}: must be 1 or more, and most={most} not below it")
    rng = random.Random(f"reverse_text/{split}/{seed}/{index}")
    count = rng.randint(fewest, most)
    while True:  # until the text belongs to the split
        text = " ".join(rng.choices(WORDS, k=count))
        if sum(map(ord, text)) % 10 in RESIDUES[split]:
            break
    return {
        "task_id": f"reverse_text/{split}/{seed}/{index}",
        "messages": [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": text},
        ],
        "answer": text[::-1],
        "words": count,
    }
