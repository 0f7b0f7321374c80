"""Means and extremes over microbatches, updates and processes, from their parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Averages:
    """Collects parts by name.

    Example: parts (6., 3.) and (2., 1.) of ``kl`` make the mean 2.0; parts (6., 6.) and (2., 2.) of
    ``kl_max`` make 6.0, as of every name that ends in ``max``; those in ``min`` make the least.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, name: str, part: Tensor) -> None:
        """Add a (sum, count), or a (value, value) of a maximum or minimum, [2]."""
        known = self._parts.get(name)
        self._parts[name] = part if known is None else _combine(name, torch.stack((known, part)))

    def means(self, accelerator: Any) -> dict[str, float]:
        """The value of each name over all processes, which must have added the same names.

        NaN where there was nothing to average, or to take the greatest or least of.
        """
        if not self._parts:
            return {}
        names = sorted(self._parts)
        mine = torch.stack([self._parts[name] for name in names])
        parts = accelerator.gather(mine[None])
        return {name: _value(name, _combine(name, parts[:, i])) for i, name in enumerate(names)}


def nothing(name: str, like: Tensor) -> Tensor:
    """The part of `name` that changes no other, [2]."""
    if not name.endswith(("max", "min")):
        return torch.zeros_like(like)
    return torch.full_like(like, -torch.inf if name.endswith("max") else torch.inf)


def _combine(name: str, parts: Tensor) -> Tensor:
    if name.endswith("max"):
        return parts.amax(0)
    return parts.amin(0) if name.endswith("min") else parts.sum(0)


def _value(name: str, part: Tensor) -> float:
    if not name.endswith(("max", "min")):
        return (part[0] / part[1]).item()
    return part[0].item() if part[0].isfinite() else torch.nan
