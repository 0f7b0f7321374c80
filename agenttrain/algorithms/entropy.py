"""Entropy: which tokens are trained, and how strongly it is kept up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.config.algorithm import AlgorithmConfig

TIED = 1e-4
"""Nats within which two tokens' entropies are equal: a token's own changes by some 1e-6 with what
shares its microbatch."""


def top_entropy_mask(entropy_N: Tensor, place_N: Tensor, share: float) -> Tensor:
    """Mask of the tokens among the top `share` by entropy, [N] of bool.

    https://arxiv.org/abs/2506.01939. As many tokens as reach TRL's quantile if no two are equal.
    Of tokens that are equal to the last one kept (`TIED`) those of the lowest `place_N` are kept,
    where TRL keeps all that rounding puts above: rollouts of a group have the same entropy where
    their texts do not differ yet, and rounding is another in other microbatches.

    Example: of [0, 1, 2, 3, 4] the top half, .5, is [2, 3, 4]; of [1, 1, 1, 2, 0] with places 0 …
    4 it is the first two and the 2.
    """
    tokens = entropy_N.numel()
    count = tokens - math.ceil((1 - share) * (tokens - 1) - 1e-9)
    if tokens == 0:
        return torch.zeros(0, dtype=torch.bool)
    cutoff = entropy_N.float().sort(descending=True).values[count - 1]
    kept_N = entropy_N > cutoff + TIED
    (tied,) = ((entropy_N >= cutoff - TIED) & ~kept_N).nonzero(as_tuple=True)
    kept_N[tied[place_N[tied].argsort()[: count - int(kept_N.sum())]]] = True
    return kept_N


@dataclass(slots=True)
class EntropyBonus:
    """The weight of the entropy in the loss; adaptive with `entropy_target`.

    Adaptive as in Skywork-OR1, https://arxiv.org/abs/2505.22312: after each update the coefficient
    rises by a step while the entropy is not above its target, else it falls; and it acts only while
    the entropy of the last update was not above the target.

    Example: target 1.0, step .01, at coefficient .02: an update of entropy .8 makes it .03, one of
    entropy 1.2 makes it .02 again, which does not act.
    """

    coefficient: float
    last: float | None = None
    """Mean entropy of the last update; None before the first."""

    def weight(self, config: AlgorithmConfig) -> float:
        """Weight of the entropy in the loss of the next update."""
        target = config.entropy_target
        above = target is not None and self.last is not None and self.last > target
        return 0.0 if above else self.coefficient

    def observe(self, entropy: float, config: AlgorithmConfig) -> None:
        """Record the mean entropy of an update, over the tokens that the bonus acts on."""
        self.last = entropy
        if config.entropy_target is not None:
            up = entropy <= config.entropy_target
            step = config.entropy_bonus_step if up else -config.entropy_bonus_step
            self.coefficient = min(max(self.coefficient + step, 0.0), config.entropy_bonus_max)
