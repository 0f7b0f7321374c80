"""Padded numbers, as TRL has them, in the packed form that our loss takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agenttrain.algorithms.config import AlgorithmConfig
from agenttrain.algorithms.loss import LossInputs, policy_loss
from agenttrain.algorithms.losses import token_weights, top_entropy_mask
from agenttrain.algorithms.objectives.config import Objective, build_objective


@dataclass(frozen=True, kw_only=True)
class Padded:
    """Numbers of B rollouts of T completion tokens; `mask` is 1 where a token was sampled."""

    new: Tensor
    old: Tensor
    mask: Tensor
    advantages: Tensor
    ref: Tensor | None = None
    engine: Tensor | None = None
    entropy: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Update:
    """What the update divides by."""

    tokens: int
    rollouts: int
    fixed_length: int = 8
    bonus: float = 0.0


def config(**settings: object) -> AlgorithmConfig:
    return AlgorithmConfig(name="test", **settings)


def clip(**settings: object) -> Objective:
    return build_objective("clip", **settings)


def packed(batch: Padded, config: AlgorithmConfig, update: Update) -> LossInputs:
    """The sampled tokens of `batch`, one rollout after the other."""
    sampled = batch.mask.bool()

    def tokens(values: Tensor | None) -> Tensor | None:
        return None if values is None else values[sampled]

    kept = None
    entropy = tokens(batch.entropy)
    if config.top_entropy < 1:
        kept = top_entropy_mask(entropy, torch.arange(entropy.numel()), config.top_entropy)
    return LossInputs(
        logprobs_S=batch.new[sampled],
        behaviour_S=batch.old[sampled],
        engine_S=tokens(batch.engine),
        ref_logprobs_S=tokens(batch.ref),
        entropy_S=entropy,
        kept_S=kept,
        sequence_S=sampled.nonzero()[:, 0],
        advantages_S=batch.advantages[sampled.nonzero()[:, 0]],
        weights_B=token_weights(
            sampled.sum(1),
            config.aggregation,
            tokens=update.tokens,
            rollouts=update.rollouts,
            fixed_length=update.fixed_length,
        ),
        bonus=update.bonus,
    )


def loss_and_gradient(
    batch: Padded, config: AlgorithmConfig, update: Update
) -> tuple[float, Tensor, Mapping[str, float]]:
    """Loss, its gradient [B, T] with respect to `new`, and the values of the metrics."""
    new = batch.new.clone().requires_grad_()
    batch = Padded(**{**vars(batch), "new": new})
    loss, metrics = policy_loss(packed(batch, config, update), config)
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.item(), gradient, values(metrics)


def values(metrics: Mapping[str, Tensor]) -> dict[str, float]:
    """Metrics of a whole update from those of its one microbatch."""
    extreme = ("max", "min")
    return {
        name: (part[0] if name.endswith(extreme) else part[0] / part[1]).item()
        for name, part in metrics.items()
    }
