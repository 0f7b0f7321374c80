"""Rollouts -> packed microbatches: no padding, one rollout after the other.

Shapes: T all tokens of a microbatch, B its rollouts, S its sampled tokens. A microbatch of two
rollouts ``p p s s t s`` and ``p s s`` (p prompt, s sampled, t tool)::

    token_ids_T    p p s s t s | p s s
    bounds         0             6     9
    targets_S        1 2   4   | 6 7        positions whose NEXT token was sampled
    row_S            0 0   0   | 1 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from agenttrain.types import LedgerError, Rollout, Task

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rollout as training sees it; everything of it comes from the rollout's spans."""

    rollout: Rollout
    token_ids_T: Tensor
    targets_S: Tensor
    """Positions whose next token was sampled."""
    behaviour_S: Tensor
    """The engine's logprobs of the sampled tokens."""
    ref_logprobs_S: Tensor | None = None
    """Of the reference, once it has scored the rollout."""
    old_logprobs_S: Tensor | None = None
    """Of the policy before the step's first update, where the algorithm asks for them."""
    old_entropy_S: Tensor | None = None
    """Its entropies there, likewise."""
    weight: float = 0.0
    """Of each sampled token in the loss; 0: no gradient from this rollout."""

    @property
    def length(self) -> int:
        """Number of all tokens."""
        return self.token_ids_T.numel()

    @property
    def sampled_length(self) -> int:
        """Number of sampled tokens."""
        return self.targets_S.numel()

    @property
    def advantage(self) -> float:
        """The rollout's advantage, 0 where it has none."""
        return self.rollout.advantage or 0.0


def make_row(rollout: Rollout) -> Row:
    """The tensors of a rollout that has at least one sampled token."""
    mask_T = torch.tensor(rollout.loss_mask, dtype=torch.bool)
    if mask_T[0]:
        raise LedgerError(
            f"rollout {rollout.rollout_id} turn 0: the token at position 0 is sampled, but there "
            "is nothing before it that it was sampled from. Append the prompt first."
        )
    return Row(
        rollout=rollout,
        token_ids_T=torch.tensor(rollout.token_ids),
        targets_S=mask_T.nonzero()[:, 0] - 1,
        behaviour_S=torch.tensor(rollout.rollout_logprobs)[mask_T],
    )


def stand_in() -> Row:
    """A row without a sampled token, for a process that has no row and must not stay away.

    Its loss is an empty sum: the backward pass meets the other processes' and adds nothing.
    """
    task = Task(task_id="stand-in", messages=())
    return Row(
        rollout=Rollout(task=task, rollout_id="stand-in", group_id="stand-in", sample=0),
        token_ids_T=torch.zeros(2, dtype=torch.long),
        targets_S=torch.zeros(0, dtype=torch.long),
        behaviour_S=torch.zeros(0),
        ref_logprobs_S=torch.zeros(0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Rows packed into one forward pass, the longest first."""

    rows: tuple[Row, ...]
    token_ids_T: Tensor
    bounds: tuple[int, ...]
    """[B + 1] Rollout b is tokens bounds[b] … bounds[b + 1] - 1."""
    targets_S: Tensor
    labels_S: Tensor
    """The sampled tokens."""
    behaviour_S: Tensor
    row_S: Tensor
    """Index of the token's rollout in `rows`."""
    advantages_B: Tensor
    weights_B: Tensor
    ref_logprobs_S: Tensor | None


def pack(rows: Sequence[Row], token_budget: int, device: torch.device) -> list[Microbatch]:
    """Microbatches of at most `token_budget` tokens; a longer row is a microbatch alone.

    Neighbours are of similar length, which the packed attention profits from. The microbatch with
    the most tokens comes first, so that memory runs out at once if it does. Rows of one length
    keep the order in which they were given.
    """
    by_length = sorted(rows, key=lambda row: -row.length)
    microbatches = [_pack_one(part, device) for part in _within(by_length, token_budget)]
    return sorted(microbatches, key=lambda microbatch: -microbatch.token_ids_T.numel())


def _within(rows: Sequence[Row], token_budget: int) -> Iterator[tuple[Row, ...]]:
    part: list[Row] = []
    tokens = 0
    for row in rows:
        if part and tokens + row.length > token_budget:
            yield tuple(part)
            part, tokens = [], 0
        part.append(row)
        tokens += row.length
    if part:
        yield tuple(part)


def _pack_one(rows: tuple[Row, ...], device: torch.device) -> Microbatch:
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + row.length)
    token_ids_T = torch.cat([row.token_ids_T for row in rows])
    targets_S = torch.cat([row.targets_S + start for row, start in zip(rows, bounds, strict=False)])
    refs = [row.ref_logprobs_S for row in rows if row.ref_logprobs_S is not None]
    counts_B = torch.tensor([row.sampled_length for row in rows])
    return Microbatch(
        rows=rows,
        token_ids_T=token_ids_T.to(device),
        bounds=tuple(bounds),
        targets_S=targets_S.to(device),
        labels_S=token_ids_T[targets_S + 1].to(device),
        behaviour_S=torch.cat([row.behaviour_S for row in rows]).to(device),
        row_S=torch.repeat_interleave(torch.arange(len(rows)), counts_B).to(device),
        advantages_B=torch.tensor([row.advantage for row in rows]).to(device),
        weights_B=torch.tensor([row.weight for row in rows]).to(device),
        ref_logprobs_S=torch.cat(refs).to(device) if refs else None,
    )


def split(groups: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """`groups` in order, in at most `parts` parts that differ by at most one group.

    Example: 5 groups in 2 parts are 3 and 2; 1 group in 2 parts is one part.
    """
    size, larger = divmod(len(groups), parts)
    ends = [part * size + min(part, larger) for part in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(ends) if a < b]
