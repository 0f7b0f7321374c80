"""Metrics of a microbatch as parts that combine over microbatches, updates and processes.

Shapes: S sampled tokens of B rollouts; row_S names each token's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from agenttrain.algorithms.rows import row_mean
from agenttrain.config.algorithm import AlgorithmConfig, Correction, Ratio, Surrogate

Metrics = dict[str, Tensor]
"""Name -> part, [2]. (sum, count): parts add up, and sum / count is the mean of the whole. Of names
that end in ``max`` or ``min``: (value, value), of which the greatest or least is the whole's."""


def mean_parts(values: Tensor) -> Tensor:
    """(sum, count) of `values`, [2]."""
    total = values.float().sum()
    return torch.stack((total, torch.full_like(total, values.numel())))


def extremes(name: str, values: Tensor) -> Metrics:
    """`<name>/min` and `<name>/max` of values of any shape, without NaN ones."""
    known = values.float()[~values.isnan()]
    nothing = known.new_tensor([torch.inf])
    lowest, highest = torch.cat((known, nothing)).min(), torch.cat((known, -nothing)).max()
    return {f"{name}/min": torch.stack((lowest,) * 2), f"{name}/max": torch.stack((highest,) * 2)}


def clip_metrics(
    ratio_S: Tensor,
    bounds: tuple[float, float],
    row_S: Tensor,
    advantages_B: Tensor,
    level: Ratio,
) -> Metrics:
    """TRL's clip_ratio/*: where the clip takes the gradient away.

    On token level the means are shares of tokens, and low_min and high_max the least and greatest
    share of a rollout's tokens; above it all are of rollouts.
    """
    advantages_S, rollouts = advantages_B[row_S], advantages_B.numel()
    low_S = (ratio_S < bounds[0]) & (advantages_S < 0)
    high_S = (ratio_S > bounds[1]) & (advantages_S > 0)
    shares = {"low": low_S, "high": high_S, "region": low_S | high_S}
    # Above token level a rollout's tokens all have its flag, so that their mean is the flag.
    by_row = {name: row_mean(flag.float(), row_S, rollouts) for name, flag in shares.items()}
    values = shares if level is Ratio.token else by_row
    if level is Ratio.token:
        sampled_B = torch.bincount(row_S, minlength=rollouts) > 0
        by_row = {name: share_B[sampled_B] for name, share_B in by_row.items()}
    low, high = extremes("low", by_row["low"]), extremes("high", by_row["high"])
    return {
        **{f"clip_ratio/{name}_mean": mean_parts(flag) for name, flag in values.items()},
        "clip_ratio/low_min": low["low/min"],
        "clip_ratio/high_max": high["high/max"],
    }


def metric_names(config: AlgorithmConfig) -> list[str]:
    """What an update with this configuration measures besides its loss and gradient."""
    ratio = "sampling/importance_sampling_ratio"
    clip = [f"clip_ratio/{name}" for name in ("low_mean", "low_min", "high_mean", "high_max")]
    optional: list[tuple[bool, list[str]]] = [
        (config.has_clip, [*clip, "clip_ratio/region_mean"]),
        (config.surrogate is Surrogate.cispo, ["cispo_clip_ratio"]),
        (config.surrogate is Surrogate.vespo, ["vespo/phi_seq_mean"]),
        (
            config.correction is not Correction.none,
            [f"{ratio}/min", f"{ratio}/mean", f"{ratio}/max", "mask/correction"],
        ),
        (config.off_policy_threshold is not None, ["mask/off_policy"]),
        (config.top_entropy < 1, ["mask/top_entropy"]),
        (config.mask_truncated, ["mask/truncated"]),
        (config.beta > 0, ["kl"]),
        (config.has_bonus, ["entropy_coef"]),
    ]
    return ["entropy", *(name for wanted, names in optional if wanted for name in names)]


class Averages:
    """Combines parts of the same name over microbatches, updates and processes.

    Example: parts (6., 3.) and (2., 1.) of ``kl`` make the mean 2.0; parts (6., 6.) and (2., 2.) of
    ``kl_max`` make 6.0, as of every name that ends in ``max``; those in ``min`` make the least.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}

    def add(self, parts: Metrics, *, counted: bool = True) -> None:
        """Add parts; where they are not `counted`, only their names, with parts of nothing.

        Every process needs the same names: `means` combines them over all.
        """
        for name, part in parts.items():
            part = part if counted else _empty(name, part)
            known = self._parts.get(name)
            new = part if known is None else _combine(name, torch.stack((known, part)))
            self._parts[name] = new

    def means(self, accelerator: Any) -> dict[str, float]:
        """Return the value of each name over all processes, which must have added the same names.

        NaN where there was nothing to average, or to take the greatest or least of.
        """
        if not self._parts:
            return {}
        names = sorted(self._parts)
        own = torch.stack([self._parts[name] for name in names])
        parts = accelerator.gather(own[None])
        return {name: _value(name, _combine(name, parts[:, i])) for i, name in enumerate(names)}


def _empty(name: str, like: Tensor) -> Tensor:
    """Return the part of `name` that changes no other, [2]."""
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
