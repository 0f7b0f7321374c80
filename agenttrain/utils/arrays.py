"""Arrays of token ids."""

from __future__ import annotations

import numpy as np


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Return how many ids at the beginning of two arrays are equal.

    Example: 2 for ``[7, 8, 9]`` and ``[7, 8, 1, 2]``.
    """
    length = min(len(left), len(right))
    unequal = left[:length] != right[:length]
    return int(unequal.argmax()) if unequal.any() else length
