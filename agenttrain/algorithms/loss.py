"""The loss of a microbatch: aggregate(correction * surrogate + beta * KL) - bonus * entropy.

Its metrics are parts that combine over microbatches, updates and processes (`Metrics`).

Shapes: S sampled tokens of B rollouts, one rollout after the other; row_S names each token's.
Tokens that the policy did not sample (prompt, template, tool) are not among the S at all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agenttrain.algorithms import losses as surrogates
from agenttrain.algorithms.config import AlgorithmConfig, Correction, Ratio, Surrogate
from agenttrain.algorithms.correction import bounded, correction_ratio, off_policy_keep
from agenttrain.algorithms.losses import (
    importance_ratio,
    kl_estimate,
    row_mean,
    row_sum,
    vespo_weight,
)

Metrics = dict[str, Tensor]
"""Name -> part, [2]. (sum, count): parts add up, and sum / count is the mean of the whole. Of names
that end in ``max`` or ``min``: (value, value), of which the greatest or least is the whole's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of the loss of a microbatch."""

    logprobs_S: Tensor
    """Logprobs under the policy being trained; they carry the gradient."""
    behaviour_S: Tensor
    """Denominator of the ratio: the engine's logprobs, or the policy's before the first update."""
    row_S: Tensor
    """Index of the token's rollout, 0 … B-1."""
    advantages_B: Tensor
    weights_B: Tensor
    """Weight of each of the rollout's tokens, from `token_weights`."""
    engine_S: Tensor | None = None
    """The engine's logprobs, where a correction or a mask reads them."""
    ref_logprobs_S: Tensor | None = None
    """Logprobs under the reference, where the loss has a KL term."""
    entropy_S: Tensor | None = None
    """Entropies of the policy being trained, with a gradient, where there is a bonus for them."""
    kept_S: Tensor | None = None
    """True for the tokens of top entropy, which alone are trained; None: all are."""
    bonus: float = 0.0
    """Weight of a token's entropy: the coefficient over the tokens of the update it acts on."""

    @property
    def rollouts(self) -> int:
        """B."""
        return self.advantages_B.numel()

    @property
    def advantages_S(self) -> Tensor:
        """The advantage of each token's rollout."""
        return self.advantages_B[self.row_S]


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """The microbatch's part of the loss (a scalar), and its metrics.

    Raises ValueError when `inputs` lack what `config` asks for.
    """
    ratio_S = importance_ratio(
        inputs.logprobs_S,
        inputs.behaviour_S,
        inputs.row_S,
        rollouts=inputs.rollouts,
        level=config.ratio,
    )
    correction, metrics = _correction(inputs, config)
    loss_S, more = _surrogate(ratio_S, correction, inputs, config)
    metrics |= more
    if correction is not None and config.surrogate is not Surrogate.vespo:
        of_tokens = config.correction is Correction.token
        loss_S = loss_S * (correction if of_tokens else correction[inputs.row_S])
    if inputs.kept_S is not None:
        loss_S = loss_S * inputs.kept_S
        metrics["mask/top_entropy"] = mean_parts(~inputs.kept_S)
    if config.off_policy_threshold is not None:
        keep_B = _off_policy_keep(inputs, config.off_policy_threshold)
        loss_S = loss_S * keep_B[inputs.row_S]
        metrics["mask/off_policy"] = mean_parts(~keep_B)
    if config.kl_in_loss:
        kl_S = _kl(ratio_S, inputs, config)
        loss_S = loss_S + config.beta * kl_S
        metrics["kl"] = mean_parts(kl_S.detach())
    loss = (loss_S * inputs.weights_B[inputs.row_S]).sum()
    if inputs.bonus:
        loss = loss - inputs.bonus * _entropy(inputs).sum()
    return loss, metrics


def _surrogate(
    ratio_S: Tensor, correction: Tensor | None, inputs: LossInputs, config: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    advantages_S, logprobs_S = inputs.advantages_S, inputs.logprobs_S
    low, high = config.clip_low, config.clip_high
    if config.surrogate is Surrogate.clip:
        loss_S = surrogates.clipped_surrogate(ratio_S, advantages_S, low, high, config.clip_dual)
        bounds = (1 - low, 1 + high)
        return loss_S, clip_metrics(
            ratio_S.detach(), bounds, inputs.row_S, inputs.advantages_B, config.ratio
        )
    if config.surrogate is Surrogate.cispo:
        capped_S = (ratio_S.detach() > 1 + high) & (advantages_S > 0)
        loss_S = surrogates.cispo_surrogate(ratio_S, logprobs_S, advantages_S, high)
        if config.ratio is not Ratio.token:
            # A rollout's tokens share its ratio: the share is one of rollouts, as TRL's.
            capped_S = row_mean(capped_S.float(), inputs.row_S, inputs.rollouts)
        return loss_S, {"cispo_clip_ratio": mean_parts(capped_S)}
    if config.surrogate is Surrogate.sapo:
        taus = config.tau_pos, config.tau_neg
        return surrogates.sapo_surrogate(ratio_S, advantages_S, *taus), {}
    if config.surrogate is Surrogate.reinforce:
        return surrogates.reinforce_surrogate(logprobs_S, advantages_S), {}
    if config.surrogate is Surrogate.vespo:
        return _vespo(correction, inputs, config)
    log_ratio_S = logprobs_S - inputs.behaviour_S
    loss_S = surrogates.geometric_mean_surrogate(
        log_ratio_S, advantages_S, inputs.row_S, inputs.rollouts, low, high
    )
    metrics = clip_metrics(
        log_ratio_S.detach(), (-low, high), inputs.row_S, inputs.advantages_B, config.ratio
    )
    return loss_S, metrics


def _vespo(
    correction: Tensor | None, inputs: LossInputs, config: AlgorithmConfig
) -> tuple[Tensor, Metrics]:
    factor = None
    if correction is not None:
        factor = correction.log().clamp(surrogates.LEAST_LOG_WEIGHT, surrogates.LOG_RATIO_BOUND)
        if config.correction is Correction.token:
            factor = row_sum(factor, inputs.row_S, inputs.rollouts)
    weight_B = vespo_weight(
        inputs.logprobs_S - inputs.behaviour_S,
        inputs.advantages_B,
        inputs.row_S,
        log_correction_B=factor,
        positive=(config.vespo_k_pos, config.vespo_lambda_pos),
        negative=(config.vespo_k_neg, config.vespo_lambda_neg),
    )
    loss_S = -weight_B[inputs.row_S] * inputs.advantages_S * inputs.logprobs_S
    return loss_S, {"vespo/phi_seq_mean": mean_parts(weight_B)}


def _correction(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor | None, Metrics]:
    """The weight for the engine's mismatch, and its metrics.

    [S] on token level, [B] above it.
    """
    if config.correction is Correction.none:
        return None, {}
    if inputs.engine_S is None:
        raise ValueError(f"algorithm.correction={config.correction}: the loss needs engine_S")
    ratio = correction_ratio(
        inputs.behaviour_S,
        inputs.engine_S,
        inputs.row_S,
        rollouts=inputs.rollouts,
        level=config.correction,
    )
    low, high = config.correction_min, config.correction_max
    weight = bounded(ratio, config.correction_mode, low=low, high=high)
    metrics = {
        "sampling/importance_sampling_ratio/mean": mean_parts(weight),
        **extremes("sampling/importance_sampling_ratio", weight),
        "mask/correction": mean_parts(weight == 0),
    }
    return weight, metrics


def _off_policy_keep(inputs: LossInputs, threshold: float) -> Tensor:
    if inputs.engine_S is None:
        raise ValueError(f"algorithm.off_policy_threshold={threshold}: the loss needs engine_S")
    return off_policy_keep(
        inputs.logprobs_S, inputs.engine_S, inputs.advantages_B, inputs.row_S, threshold
    )


def _kl(ratio_S: Tensor, inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    if inputs.ref_logprobs_S is None:
        raise ValueError(f"algorithm.beta={config.beta}: the loss needs ref_logprobs_S")
    kl_S = kl_estimate(inputs.logprobs_S, inputs.ref_logprobs_S, config.kl)
    return kl_S * ratio_S if config.kl_bias_correction else kl_S


def _entropy(inputs: LossInputs) -> Tensor:
    """Entropy of the tokens that the bonus acts on, 0 at the others, [S]."""
    if inputs.entropy_S is None:
        raise ValueError(f"bonus={inputs.bonus}: the loss needs entropy_S")
    entropy_S = inputs.entropy_S * (inputs.weights_B > 0)[inputs.row_S]
    return entropy_S if inputs.kept_S is None else entropy_S * inputs.kept_S


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
    """Return the metrics that an update with this configuration has besides loss and gradient."""
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
