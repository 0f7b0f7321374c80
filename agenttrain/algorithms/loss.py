"""The loss of a microbatch: aggregate(surrogate(ratio, advantage) + beta * KL).

Shapes: S sampled tokens of B rollouts, one rollout after the other; row_S names each token's.
Tokens that the policy did not sample (prompt, template, tool) are not among the S at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.algorithms.kl import kl_estimate
from agenttrain.algorithms.surrogate import clipped_surrogate, importance_ratio
from agenttrain.config.schema import AlgorithmConfig, KlIn, Ratio

Metrics = dict[str, Tensor]
"""Name -> [2] (sum, count): parts of a batch add up, and sum / count is the batch's mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """What the loss of a microbatch depends on."""

    logprobs_S: Tensor
    """Of the policy being trained; carries the gradient."""
    behaviour_S: Tensor
    """Of the policy that sampled."""
    ref_logprobs_S: Tensor | None
    """Of the frozen reference, where the loss has a KL term."""
    row_S: Tensor
    """Index of the token's rollout, 0 … B-1."""
    advantages_B: Tensor
    weights_B: Tensor
    """Of each of the rollout's tokens, from `token_weights`."""


def policy_loss(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Metrics]:
    """The microbatch's part of the loss (a scalar), and its metrics.

    On token level the clip ratios are shares of tokens, else of rollouts.
    """
    advantages_S = inputs.advantages_B[inputs.row_S]
    ratio_S = importance_ratio(
        inputs.logprobs_S,
        inputs.behaviour_S,
        inputs.row_S,
        rollouts=inputs.advantages_B.numel(),
        level=config.ratio,
    )
    loss_S = clipped_surrogate(ratio_S, advantages_S, config.clip_low, config.clip_high)
    metrics = _clip_metrics(ratio_S.detach(), advantages_S, inputs, config)
    if config.beta > 0 and config.kl_in is KlIn.loss:
        if inputs.ref_logprobs_S is None:
            raise ValueError(f"algorithm.beta={config.beta}: the loss needs ref_logprobs_S")
        kl_S = kl_estimate(inputs.logprobs_S, inputs.ref_logprobs_S, config.kl)
        loss_S = loss_S + config.beta * kl_S
        metrics["kl"] = mean_parts(kl_S.detach())
    return (loss_S * inputs.weights_B[inputs.row_S]).sum(), metrics


def mean_parts(values: Tensor) -> Tensor:
    """(sum, count) of `values`, [2]."""
    total = values.float().sum()
    return torch.stack((total, torch.full_like(total, values.numel())))


def _clip_metrics(
    ratio_S: Tensor, advantages_S: Tensor, inputs: LossInputs, config: AlgorithmConfig
) -> Metrics:
    low_S = (ratio_S < 1 - config.clip_low) & (advantages_S < 0)
    high_S = (ratio_S > 1 + config.clip_high) & (advantages_S > 0)
    shares = {"low_mean": low_S, "high_mean": high_S, "region_mean": low_S | high_S}
    if config.ratio is not Ratio.token:
        none_B = torch.zeros_like(inputs.advantages_B, dtype=torch.bool)
        shares = {
            name: none_B.index_put((inputs.row_S,), flag_S) for name, flag_S in shares.items()
        }
    return {f"clip_ratio/{name}": mean_parts(flag) for name, flag in shares.items()}
