"""Entropy: which tokens are trained, and how strongly it is kept up."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.config.algorithm import AlgorithmConfig


def top_entropy_threshold(entropy_N: Tensor, share: float) -> float:
    """The entropy that the top `share` of tokens reach: https://arxiv.org/abs/2506.01939.

    Example: of [0, 1, 2, 3, 4] the top half, .5, reaches 2. Linear between two tokens' entropies.
    """
    if entropy_N.numel() == 0:
        return torch.inf
    # torch.quantile takes no more than 2**24 values.
    ordered_N = entropy_N.float().sort().values
    position = (1 - share) * (entropy_N.numel() - 1)
    lower = int(position)
    upper = min(lower + 1, entropy_N.numel() - 1)
    return torch.lerp(ordered_N[lower], ordered_N[upper], position - lower).item()


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
        """What the loss of the next update takes."""
        target = config.entropy_target
        above = target is not None and self.last is not None and self.last > target
        return 0.0 if above else self.coefficient

    def observe(self, entropy: float, config: AlgorithmConfig) -> None:
        """Note the mean entropy of an update, over the tokens that the bonus acts on."""
        self.last = entropy
        if config.entropy_target is not None:
            up = entropy <= config.entropy_target
            step = config.entropy_bonus_step if up else -config.entropy_bonus_step
            self.coefficient = min(max(self.coefficient + step, 0.0), config.entropy_bonus_max)
