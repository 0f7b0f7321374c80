"""Rows of nothing but a seed, for environments that make their own tasks."""

from __future__ import annotations

from typing import Any

from agenttrain.utils.data_fields import Data
from agenttrain.utils.seeds import derive_seed

SPLITS = ("train", "test")


def row(split: Data[str], index: int, seed: Data[int]) -> dict[str, Any]:
    """Return row `index` of a split, which depends on (split, seed, index) alone.

    Example: ``{"task_id": "seeds/test/0/3", "seed": 1185622734}``. A seed is below 2**31, the
    largest that most environments take. Raises ValueError for an unknown split.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: must be one of {', '.join(SPLITS)}")
    row_seed = derive_seed("seeds", split, seed, index) % 2**31
    return {"task_id": f"seeds/{split}/{seed}/{index}", "seed": row_seed}
