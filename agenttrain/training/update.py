"""One optimizer update: its rows, what its loss depends on, what it measures.

Shapes: S sampled tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agenttrain.algorithms.entropy import EntropyBonus, top_entropy_threshold
from agenttrain.algorithms.loss import LossInputs
from agenttrain.config.algorithm import AlgorithmConfig, Behaviour
from agenttrain.training.batch import Microbatch, Row

NO_ENTROPY = -1.0
"""Pads entropies, which are never negative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all microbatches of an update share."""

    threshold: float | None
    """Tokens below this entropy are masked; None: none are."""
    bonus_tokens: int
    """Tokens that the entropy bonus acts on, over all processes."""
    bonus: float
    """Weight of the entropy of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a microbatch contributed to an update."""

    loss: Tensor
    microbatch: Microbatch
    trainer_S: Tensor
    """The logprobs before the update."""
    entropy: Tensor
    """Sum over the tokens that the bonus acts on."""


def plan(
    rows: Sequence[Row], config: AlgorithmConfig, bonus: EntropyBonus, accelerator: Any
) -> Plan:
    """The plan of an update over the weighed `rows` and those of the other processes."""
    acting = [row for row in rows if row.weight > 0]
    threshold = None
    if config.top_entropy < 1:
        entropy_N = _gather([row.old_entropy_S for row in acting], accelerator)
        threshold = top_entropy_threshold(entropy_N, config.top_entropy)
    tokens = torch.tensor(
        [float(_kept(row, threshold).sum()) for row in acting] or [0.0],
        device=accelerator.device,
    )
    total = int(accelerator.reduce(tokens.sum(), "sum"))
    weight = bonus.weight(config) / max(total, 1)
    return Plan(threshold=threshold, bonus_tokens=total, bonus=weight)


def _gather(pieces: Sequence[Tensor | None], accelerator: Any) -> Tensor:
    known = [piece for piece in pieces if piece is not None]
    mine = torch.cat(known) if known else torch.zeros(0)
    padded = accelerator.pad_across_processes(
        mine.to(accelerator.device), dim=0, pad_index=NO_ENTROPY
    )
    gathered: Tensor = accelerator.gather(padded)
    return gathered[gathered > NO_ENTROPY / 2]


def _kept(row: Row, threshold: float | None) -> Tensor:
    """Whether each sampled token is one of top entropy, [S]."""
    if threshold is None or row.old_entropy_S is None:
        return torch.ones(row.sampled_length, dtype=torch.bool)
    return row.old_entropy_S >= threshold


def loss_inputs(
    microbatch: Microbatch,
    logprobs_S: Tensor,
    entropy_S: Tensor,
    config: AlgorithmConfig,
    plan: Plan,
) -> LossInputs:
    """The inputs of a microbatch's loss."""
    kept_S = None
    if plan.threshold is not None:
        kept = [_kept(row, plan.threshold) for row in microbatch.rows]
        kept_S = torch.cat(kept).to(logprobs_S.device)
    return LossInputs(
        logprobs_S=logprobs_S,
        behaviour_S=_behaviour(microbatch, logprobs_S, config),
        engine_S=microbatch.behaviour_S,
        ref_logprobs_S=microbatch.ref_logprobs_S,
        entropy_S=entropy_S,
        kept_S=kept_S,
        row_S=microbatch.row_S,
        advantages_B=microbatch.advantages_B,
        weights_B=microbatch.weights_B,
        bonus=plan.bonus,
    )


def _behaviour(microbatch: Microbatch, logprobs_S: Tensor, config: AlgorithmConfig) -> Tensor:
    if config.behaviour is Behaviour.engine:
        return microbatch.behaviour_S
    old = [row.old_logprobs_S for row in microbatch.rows]
    known = [values for values in old if values is not None]
    # Before a step's only update the policy is still what it was when the step began.
    return torch.cat(known).to(logprobs_S) if len(known) == len(old) else logprobs_S.detach()
