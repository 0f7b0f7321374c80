"""Rollouts -> packed microbatches: no padding, one rollout after the other.

Shapes: T all tokens of a microbatch, B its rollouts, S its sampled tokens. A microbatch of two
rollouts ``p p s s t s`` and ``p s s`` (p prompt, s sampled, t tool)::

    token_ids_T    p p s s t s | p s s
    segments       Segment(0, 6)  Segment(6, 3)
    targets_S        1 2   4   | 6 7        positions whose NEXT token was sampled
    row_S            0 0   0   | 1 1

Rollouts of a group may share their prompt, whose tokens then stand once: see `layout.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from agenttrain.training.layout import Segment
from agenttrain.types import LedgerError, Rollout, Task, Trajectory

Item = TypeVar("Item")


RowKey = tuple[str, int]
"""A rollout's id and the index of one of its trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory as training sees it; everything of it comes from the trajectory's spans."""

    rollout: Rollout
    trajectory: Trajectory
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
    def key(self) -> RowKey:
        """Names the row among those of all processes."""
        return self.rollout.rollout_id, self.trajectory.index

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


def make_rows(rollout: Rollout) -> list[Row]:
    """Return the tensors of each trajectory that has a sampled token."""
    return [_make_row(rollout, t) for t in rollout.trajectories if t.sampled_length]


def _make_row(rollout: Rollout, trajectory: Trajectory) -> Row:
    mask_T = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    if mask_T[0]:
        raise LedgerError(
            f"{trajectory.name} turn 0: the token at position 0 is sampled, but there "
            "is nothing before it that it was sampled from. Append the prompt first."
        )
    return Row(
        rollout=rollout,
        trajectory=trajectory,
        token_ids_T=torch.tensor(trajectory.token_ids),
        targets_S=mask_T.nonzero()[:, 0] - 1,
        behaviour_S=torch.tensor(trajectory.rollout_logprobs)[mask_T],
    )


def stand_in() -> Row:
    """A row without a sampled token, for a process that has no row and must not stay away.

    Its loss is an empty sum: the backward pass meets the other processes' and adds nothing.
    """
    task = Task(task_id="stand-in", messages=())
    rollout = Rollout(task=task, rollout_id="stand-in", group_id="stand-in", sample=0)
    return Row(
        rollout=rollout,
        trajectory=rollout.trajectories[0],
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
    segments: tuple[Segment, ...]
    """The tokens' layout: one segment per rollout, and one per shared prompt."""
    targets_S: Tensor
    labels_S: Tensor
    """The sampled tokens."""
    behaviour_S: Tensor
    row_S: Tensor
    """Index of the token's rollout in `rows`."""
    advantages_B: Tensor
    weights_B: Tensor
    ref_logprobs_S: Tensor | None


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows that are packed together because they share their first tokens; or one row alone."""

    rows: tuple[Row, ...]
    """The longest first."""
    shared: int = 0
    """Tokens of the shared prefix, a part of every row."""

    @property
    def tokens(self) -> int:
        """Tokens when the prefix stands once."""
        return self.shared + sum(row.length - self.shared for row in self.rows)


def pack(bundles: Sequence[Bundle], token_budget: int, device: torch.device) -> list[Microbatch]:
    """Microbatches of at most `token_budget` tokens; a longer row is a microbatch alone.

    Neighbours are of similar length, which the packed attention profits from. The microbatch with
    the most tokens comes first, so that memory runs out at once if it does. Rows of one length
    keep the order in which they were given.
    """
    fitting = [part for bundle in bundles for part in _fit(bundle, token_budget)]
    by_length = sorted(fitting, key=lambda bundle: -bundle.rows[0].length)
    microbatches = [_pack_one(part, device) for part in _within(by_length, token_budget)]
    return sorted(microbatches, key=lambda microbatch: -microbatch.token_ids_T.numel())


def _fit(bundle: Bundle, token_budget: int) -> Iterator[Bundle]:
    """The bundle in parts of at most `token_budget` tokens each, as far as rows allow."""
    part: list[Row] = []
    tokens = bundle.shared
    for row in bundle.rows:
        own = row.length - bundle.shared
        if part and tokens + own > token_budget:
            yield _bundle(part, bundle.shared)
            part, tokens = [], bundle.shared
        part.append(row)
        tokens += own
    yield _bundle(part, bundle.shared)


def _bundle(rows: list[Row], shared: int) -> Bundle:
    return Bundle(tuple(rows), shared if len(rows) > 1 else 0)


def _within(bundles: Sequence[Bundle], token_budget: int) -> Iterator[tuple[Bundle, ...]]:
    part: list[Bundle] = []
    tokens = 0
    for bundle in bundles:
        if part and tokens + bundle.tokens > token_budget:
            yield tuple(part)
            part, tokens = [], 0
        part.append(bundle)
        tokens += bundle.tokens
    if part:
        yield tuple(part)


def _pack_one(bundles: tuple[Bundle, ...], device: torch.device) -> Microbatch:
    layout = _Layout()
    prefixes = layout.add_roots(bundles)
    for bundle, prefix in zip(bundles, prefixes, strict=True):
        layout.add_continuations(bundle, prefix)
    rows = tuple(row for row, _ in layout.placed)
    counts_B = torch.tensor([row.sampled_length for row in rows])
    refs = [row.ref_logprobs_S for row in rows if row.ref_logprobs_S is not None]
    labels = [row.token_ids_T[row.targets_S + 1] for row in rows]
    return Microbatch(
        rows=rows,
        token_ids_T=torch.cat(layout.pieces).to(device),
        segments=tuple(layout.segments),
        targets_S=torch.cat([_packed(row.targets_S, at) for row, at in layout.placed]).to(device),
        labels_S=torch.cat(labels).to(device),
        behaviour_S=torch.cat([row.behaviour_S for row in rows]).to(device),
        row_S=torch.repeat_interleave(torch.arange(len(rows)), counts_B).to(device),
        advantages_B=torch.tensor([row.advantage for row in rows]).to(device),
        weights_B=torch.tensor([row.weight for row in rows]).to(device),
        ref_logprobs_S=torch.cat(refs).to(device) if refs else None,
    )


class _Layout:
    """A microbatch that grows segment by segment: starts of rollouts, then what follows them."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.pieces: list[Tensor] = []
        self.placed: list[tuple[Row, Segment]] = []
        """Every row with its last segment."""

    def add_roots(self, bundles: Sequence[Bundle]) -> list[Segment | None]:
        """Rows alone and shared prefixes, the longest first; each bundle's prefix, if it has one.

        Together, so that attention takes those of similar length in one call.
        """
        found: dict[int, Segment] = {}
        lengths = [bundle.shared or bundle.rows[0].length for bundle in bundles]
        for index in sorted(range(len(bundles)), key=lambda index: -lengths[index]):
            bundle = bundles[index]
            first = bundle.rows[0]
            segment = self._append(first.token_ids_T[: lengths[index]])
            if bundle.shared:
                found[index] = segment
            else:
                self.placed.append((first, segment))
        return [found.get(index) for index in range(len(bundles))]

    def add_continuations(self, bundle: Bundle, prefix: Segment | None) -> None:
        """What the rows of a bundle do not share."""
        if prefix is not None:
            for row in bundle.rows:
                own = row.token_ids_T[prefix.length :]
                self.placed.append((row, self._append(own, prefix.start, prefix.length)))

    def _append(self, token_ids: Tensor, prefix: int = 0, prefix_length: int = 0) -> Segment:
        start = self.segments[-1].end if self.segments else 0
        segment = Segment(start, token_ids.numel(), prefix, prefix_length)
        self.segments.append(segment)
        self.pieces.append(token_ids)
        return segment


def _packed(positions: Tensor, segment: Segment) -> Tensor:
    """Packed positions of a row's own ones, where the row ends with `segment`."""
    own = positions - segment.prefix_length
    return torch.where(own < 0, positions + segment.prefix, own + segment.start)


def split(groups: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """`groups` in order, in `parts` parts that differ by at most one group.

    Example: 5 groups in 2 parts are 3 and 2; 1 group in 2 parts is 1 and none.
    """
    size, larger = divmod(len(groups), parts)
    ends = [part * size + min(part, larger) for part in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(ends)]
