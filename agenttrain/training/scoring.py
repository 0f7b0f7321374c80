"""Log-probabilities and entropies of rollouts, without a gradient."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from agenttrain.config.algorithm import AlgorithmConfig, Behaviour
from agenttrain.training.batch import Microbatch, Row, RowKey, stand_in

Groups = list[list[Row]]


def score(scorer: Any, microbatches: Iterable[Microbatch]) -> dict[RowKey, tuple[Tensor, Tensor]]:
    """Row's key -> (logprobs_S, entropy_S) of its sampled tokens, on the CPU."""
    found: dict[RowKey, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for microbatch in microbatches:
            lengths = [row.sampled_length for row in microbatch.rows]
            pieces = [values_S.cpu().split(lengths) for values_S in scorer(microbatch)]
            for row, logprobs_S, entropy_S in zip(microbatch.rows, *pieces, strict=True):
                if row.sampled_length:  # not the one that stands in for a process without rows
                    found[row.key] = (logprobs_S, entropy_S)
    return found


def probe(scorer: Any, token_ids: Sequence[int], device: torch.device) -> list[float]:
    """Log-probability at temperature 1 of every id after the first."""
    targets_S = torch.arange(len(token_ids) - 1)
    row = replace(
        stand_in(),
        token_ids_T=torch.tensor(token_ids),
        targets_S=targets_S,
        behaviour_S=torch.zeros(len(targets_S)),
        ref_logprobs_S=None,
    )
    transform = scorer.transform
    scorer.transform = replace(transform, temperature=1.0)
    try:
        with scorer.ready():
            found = score(scorer, scorer.pack([row], len(token_ids), device))
    finally:
        scorer.transform = transform
    ((logprobs_S, _),) = found.values()
    values: list[float] = logprobs_S.tolist()
    return values


def with_reference(groups: Groups, reference: Any, pack: Callable[..., list[Microbatch]]) -> Groups:
    """The rows with the reference's logprobs."""
    with reference.ready():
        found = score(reference, pack(flat(groups)))
    return [[replace(row, ref_logprobs_S=found[row.key][0]) for row in group] for group in groups]


def with_own(groups: Groups, scorer: Any, pack: Callable[..., list[Microbatch]]) -> Groups:
    """The rows with the policy's logprobs and entropies as it is now."""
    with scorer.ready():
        found = score(scorer, pack(flat(groups)))

    def scored(row: Row) -> Row:
        logprobs_S, entropy_S = found[row.key]
        keep_scores([row], logprobs_S, entropy_S)
        return replace(row, old_logprobs_S=logprobs_S, old_entropy_S=entropy_S)

    return [[scored(row) for row in group] for group in groups]


def keep_scores(rows: Sequence[Row], logprobs_S: Tensor, entropy_S: Tensor) -> None:
    """Give the trajectories of `rows`, in their order, what the trainer computed."""
    lengths = [row.sampled_length for row in rows]
    pieces = [values_S.float().cpu().split(lengths) for values_S in (logprobs_S, entropy_S)]
    for row, own_S, entropies in zip(rows, *pieces, strict=True):
        row.trajectory.trainer_logprobs = array("f", own_S.numpy())
        row.trajectory.entropies = array("f", entropies.numpy())


def needs_own(config: AlgorithmConfig) -> bool:
    """Whether the policy has to score the rollouts before the step's first update.

    With one update per step the probabilities before it are those that it computes anyway.
    """
    recomputed = config.behaviour is Behaviour.recomputed
    return config.top_entropy < 1 or (recomputed and (config.updates > 1 or config.kl_in_reward))


def flat(groups: Sequence[Sequence[Row]]) -> list[Row]:
    """The rows of all groups, in order."""
    return [row for group in groups for row in group]
