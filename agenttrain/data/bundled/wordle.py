"""Rows of the game `agenttrain.environments.builtin.wordle.Wordle`: a word to find.

The words are the 555 of five letters in `words.py`. Splits share none: a word's place decides.
"""

from __future__ import annotations

import random
from typing import Any

from agenttrain.data.bundled.words import WORDS
from agenttrain.utils.data_fields import Data

FIVE_LETTERS = tuple(word for word in WORDS if len(word) == 5)
RESIDUES = {"train": (0, 1, 2, 3), "test": (4,)}
"""Remainders, modulo 5, of a word's place in FIVE_LETTERS in each split."""


def row(split: Data[str], index: int, seed: Data[int]) -> dict[str, Any]:
    """Return row `index` of a split, drawn from (split, seed, index) alone.

    Example: ``{"task_id": "wordle/train/0/3", "word": "crane"}``. Raises ValueError for an unknown
    split.
    """
    if split not in RESIDUES:
        raise ValueError(f"split={split!r}: must be one of {', '.join(RESIDUES)}")
    words = [word for i, word in enumerate(FIVE_LETTERS) if i % 5 in RESIDUES[split]]
    word = random.Random(f"wordle/{split}/{seed}/{index}").choice(words)
    return {"task_id": f"wordle/{split}/{seed}/{index}", "word": word}
