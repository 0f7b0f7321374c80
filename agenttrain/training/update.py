"""One optimizer update: its rows, what its loss depends on, what it measures.

Shapes: S sampled tokens of a microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor

from agenttrain.algorithms.entropy import EntropyBonus, top_entropy_mask
from agenttrain.algorithms.loss import LossInputs
from agenttrain.config.algorithm import AlgorithmConfig, Behaviour
from agenttrain.training.batch import Microbatch, Row, RowKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all microbatches of an update share."""

    kept: Mapping[RowKey, Tensor] | None
    """Row's key -> whether each of its sampled tokens is one of top entropy; None: all are."""
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
    entropy_S: Tensor
    """The entropies before it."""
    entropy: Tensor
    """Sum over the tokens that the bonus acts on."""


def plan(
    rows: Sequence[Row], config: AlgorithmConfig, bonus: EntropyBonus, accelerator: Any
) -> Plan:
    """The plan of an update over the weighed `rows` and those of the other processes."""
    acting = [row for row in rows if row.weight > 0]
    kept = None
    count = sum(row.sampled_length for row in acting)
    if config.top_entropy < 1:
        kept = _top_entropy(acting, config.top_entropy, accelerator)
        count = sum(int(kept_S.sum()) for kept_S in kept.values())
    total = int(accelerator.reduce(torch.tensor(count, device=accelerator.device), "sum"))
    weight = bonus.weight(config) / max(total, 1)
    return Plan(kept=kept, bonus_tokens=total, bonus=weight)


def _top_entropy(rows: Sequence[Row], share: float, accelerator: Any) -> dict[RowKey, Tensor]:
    """`Plan.kept` of the rows, which compete with those of the other processes.

    Where entropies are equal the earlier positions come first, and at one position the rollouts in
    the order of their ids: neither says who holds a rollout or what is packed with it.
    """
    pieces = [row.old_entropy_S for row in rows if row.old_entropy_S is not None]
    mine = torch.cat(pieces) if pieces else torch.zeros(0)
    lengths = [piece.numel() for piece in pieces]
    names = [(row.rollout.group_id, row.rollout.sample, row.key) for row in rows]
    shares: list[tuple[list[Any], list[int]]] = gather_object([(names, lengths)])
    padded = accelerator.pad_across_processes(mine.to(accelerator.device), dim=0)
    by_process = accelerator.gather(padded).cpu().view(len(shares), -1)
    entropies = [one[: sum(x)] for one, (_, x) in zip(by_process, shares, strict=True)]
    rank_of = {name: rank for rank, name in enumerate(sorted(n for x, _ in shares for n in x))}
    places = [
        torch.arange(length) * len(rank_of) + rank_of[name]
        for names_, lengths_ in shares
        for name, length in zip(names_, lengths_, strict=True)
    ]
    empty = torch.zeros(0, dtype=torch.long)
    kept_N = top_entropy_mask(torch.cat(entropies), torch.cat([empty, *places]), share)
    of_process = kept_N.split([one.numel() for one in entropies])[accelerator.process_index]
    return {name[-1]: kept for name, kept in zip(names, of_process.split(lengths), strict=True)}


def loss_inputs(
    microbatch: Microbatch,
    logprobs_S: Tensor,
    entropy_S: Tensor,
    config: AlgorithmConfig,
    plan: Plan,
) -> LossInputs:
    """The inputs of a microbatch's loss."""
    kept_S = None
    if plan.kept is not None:
        # The row that stands in for a process without rows has no token and is not in the plan.
        kept = [plan.kept[row.key] for row in microbatch.rows if row.sampled_length]
        kept_S = torch.cat([torch.zeros(0, dtype=torch.bool), *kept]).to(logprobs_S.device)
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
