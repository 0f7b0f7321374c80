"""Sums over the tokens of each rollout, in packed form.

Shapes: S sampled tokens of B rollouts; row_S names each token's.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(values_S: Tensor, row_S: Tensor, rollouts: int) -> Tensor:
    """Sum over each rollout's tokens, [B].

    Example: values [1, 2, 5] of rows [0, 0, 2] and 3 rollouts make [3, 0, 5].
    """
    return values_S.new_zeros(rollouts).index_add(0, row_S, values_S)


def row_mean(values_S: Tensor, row_S: Tensor, rollouts: int) -> Tensor:
    """Mean over each rollout's tokens, [B]; 0 for a rollout without one."""
    count_B = torch.bincount(row_S, minlength=rollouts).clamp(min=1)
    return row_sum(values_S, row_S, rollouts) / count_B
