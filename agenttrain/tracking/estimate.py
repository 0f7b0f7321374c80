"""Estimates with their uncertainty, for evaluation tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean of `n` values and its 95 % confidence interval.

    Example: ``Estimate(mean=0.25, low=0.2101, high=0.2947, n=400)``
    """

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def wilson(successes: int, n: int) -> Estimate:
    """A proportion with Wilson's score interval, which stays honest at 0, at 1 and for small n.

    https://doi.org/10.1080/01621459.1927.10502953 ; raises ValueError unless 0 <= successes <= n
    and n >= 1.
    """
    if not 0 <= successes <= n or n < 1:
        raise ValueError(f"wilson: {successes} successes of {n}; need 0 <= successes <= n, n >= 1")
    p = successes / n
    z2 = Z_95 * Z_95
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    # At the ends the interval reaches 0 or 1 exactly; rounding must not say 1e-18.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Estimate(mean=p, low=low, high=high, n=n)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Mean of independent values: Wilson's interval if all are 0 or 1, else the normal one.

    Several rollouts of one question are not independent: give their mean as one value. One value
    that is neither 0 nor 1 has an unknown spread: its interval is NaN. No values: all NaN.

    Where all values lie within [0, 1] so does the interval. Example: [0.5, 1, 1, 1] has
    0.875 [0.63, 1], which the normal interval alone would end at 1.12.
    """
    if not values:
        return Estimate(mean=math.nan, low=math.nan, high=math.nan, n=0)
    if all(value in (0, 1) for value in values):
        return wilson(sum(value == 1 for value in values), len(values))
    mean = statistics.fmean(values)
    spread = statistics.stdev(values) if len(values) > 1 else math.nan
    half = Z_95 * spread / math.sqrt(len(values))
    low, high = mean - half, mean + half
    if half == half and all(0 <= value <= 1 for value in values):
        low, high = max(low, 0.0), min(high, 1.0)
    return Estimate(mean=mean, low=low, high=high, n=len(values))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased probability that one of `k` of `n` rollouts succeeds, `correct` of which did.

    1 - C(n - c, k) / C(n, k), Chen et al. 2021, https://arxiv.org/abs/2107.03374 , section 2.1.
    Raises ValueError unless 0 <= correct <= n and 1 <= k <= n.

    Example: ``pass_at_k(4, 1, 2)`` is 0.5: of the 6 pairs, 3 hold the one success.
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass_at_k: n={n}, correct={correct}, k={k}; need 0 <= correct <= n and 1 <= k <= n "
            "(raise eval.samples to at least k)"
        )
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)
