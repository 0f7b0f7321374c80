"""Means over microbatches, updates and processes, from (sum, count) parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Averages:
    """Collects parts by name.

    Example: parts (6., 3.) and (2., 1.) of ``kl`` make the mean 2.0.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, part: Tensor) -> None:
        """Add a (sum, count), [2]."""
        self._parts[name] = self._parts[name] + part if name in self._parts else part

    def means(self, accelerator: Any) -> dict[str, float]:
        """sum / count by name over all processes, which must have added the same names."""
        if not self._parts:
            return {}
        names = sorted(self._parts)
        parts = accelerator.reduce(torch.stack([self._parts[name] for name in names]), "sum")
        return {name: (part[0] / part[1]).item() for name, part in zip(names, parts, strict=True)}
