"""Rollouts -> packed microbatches: no padding, one rollout after the other.

Shapes: T all tokens of a microbatch, B its rollouts, S its sampled tokens. A microbatch of two
rollouts ``p p s s t s`` and ``p s s`` (p prompt, s sampled, t tool)::

    token_ids_T    p p s s t s | p s s
    segments       Segment(0, 6)  Segment(6, 3)
    targets_S        1 2   4   | 6 7        positions whose NEXT token was sampled
    row_S            0 0   0   | 1 1

A group's rollouts may share their prompt (`bundle_sequences`): its tokens then stand once, and each
rollout's own tokens attend to them. Two rollouts of prompt ``p p p`` with 2 and 1 tokens of their
own, and a third one::

    tokens       a a a a a | p p p | s s | s
    segments     Segment(0, 5)  Segment(5, 3)  Segment(8, 2, 5, 3)  Segment(10, 1, 5, 3)
    positions    0 1 2 3 4   0 1 2   3 4   3

Attention takes neighbouring segments of one prefix and like lengths in one call (`make_blocks`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from agenttrain.types import LedgerError, Rollout, Task, Trajectory

Item = TypeVar("Item")


SequenceKey = tuple[str, int]
"""A rollout's id and the index of one of its trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One trajectory as training sees it; everything of it comes from the trajectory's spans."""

    rollout: Rollout
    trajectory: Trajectory
    token_ids_T: Tensor
    targets_S: Tensor
    """Positions whose next token was sampled."""
    behaviour_S: Tensor
    """The engine's logprobs of the sampled tokens."""
    ref_logprobs_S: Tensor | None = None
    """Logprobs under the reference, once it has scored the rollout."""
    old_logprobs_S: Tensor | None = None
    """Logprobs under the policy before the step's first update, if the algorithm asks for them."""
    old_entropy_S: Tensor | None = None
    """Its entropies there, likewise."""
    weight: float = 0.0
    """Weight of each sampled token in the loss; 0: no gradient from this rollout."""

    @property
    def key(self) -> SequenceKey:
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


def make_sequences(rollout: Rollout) -> list[TrainingSequence]:
    """Return the tensors of each trajectory that has a sampled token."""
    return [_make_sequence(rollout, t) for t in rollout.trajectories if t.sampled_length]


def _make_sequence(rollout: Rollout, trajectory: Trajectory) -> TrainingSequence:
    mask_T = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
    if mask_T[0]:
        raise LedgerError(
            f"{trajectory.name} turn 0: the token at position 0 is sampled, but there "
            "is nothing before it that it was sampled from. Append the prompt first."
        )
    return TrainingSequence(
        rollout=rollout,
        trajectory=trajectory,
        token_ids_T=torch.tensor(trajectory.token_ids),
        targets_S=mask_T.nonzero()[:, 0] - 1,
        behaviour_S=torch.tensor(trajectory.rollout_logprobs)[mask_T],
    )


def stand_in() -> TrainingSequence:
    """A row without a sampled token, for a process that has no row and must not stay away.

    Its loss is an empty sum: the backward pass meets the other processes' and adds nothing.
    """
    task = Task(task_id="stand-in", messages=())
    rollout = Rollout(task=task, rollout_id="stand-in", group_id="stand-in", sample=0)
    return TrainingSequence(
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

    sequences: tuple[TrainingSequence, ...]
    token_ids_T: Tensor
    segments: tuple[Segment, ...]
    """The tokens' layout: one segment per rollout, and one per shared prompt."""
    targets_S: Tensor
    labels_S: Tensor
    """The sampled tokens."""
    behaviour_S: Tensor
    sequence_S: Tensor
    """Index of the token's rollout in `sequences`."""
    advantages_B: Tensor
    weights_B: Tensor
    ref_logprobs_S: Tensor | None


@dataclass(frozen=True, slots=True)
class Bundle:
    """Rows that are packed together because they share their first tokens; or one row alone."""

    sequences: tuple[TrainingSequence, ...]
    """The longest first."""
    shared: int = 0
    """Tokens of the shared prefix, a part of every row."""

    @property
    def tokens(self) -> int:
        """Tokens when the prefix stands once."""
        return self.shared + sum(sequence.length - self.shared for sequence in self.sequences)


def pack(bundles: Sequence[Bundle], token_budget: int, device: torch.device) -> list[Microbatch]:
    """Microbatches of at most `token_budget` tokens; a longer row is a microbatch alone.

    Neighbours are of similar length, which the packed attention profits from. The microbatch with
    the most tokens comes first, so that memory runs out at once if it does. Rows of one length
    keep the order in which they were given.
    """
    fitting = [part for bundle in bundles for part in _fit(bundle, token_budget)]
    by_length = sorted(fitting, key=lambda bundle: -bundle.sequences[0].length)
    microbatches = [_pack_one(part, device) for part in _within(by_length, token_budget)]
    return sorted(microbatches, key=lambda microbatch: -microbatch.token_ids_T.numel())


def _fit(bundle: Bundle, token_budget: int) -> Iterator[Bundle]:
    """The bundle in parts of at most `token_budget` tokens each, as far as rows allow."""
    part: list[TrainingSequence] = []
    tokens = bundle.shared
    for sequence in bundle.sequences:
        own = sequence.length - bundle.shared
        if part and tokens + own > token_budget:
            yield _bundle(part, bundle.shared)
            part, tokens = [], bundle.shared
        part.append(sequence)
        tokens += own
    yield _bundle(part, bundle.shared)


def _bundle(sequences: list[TrainingSequence], shared: int) -> Bundle:
    return Bundle(tuple(sequences), shared if len(sequences) > 1 else 0)


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
    sequences = tuple(sequence for sequence, _ in layout.placed)
    counts_B = torch.tensor([sequence.sampled_length for sequence in sequences])
    refs = [
        sequence.ref_logprobs_S for sequence in sequences if sequence.ref_logprobs_S is not None
    ]
    labels = [sequence.token_ids_T[sequence.targets_S + 1] for sequence in sequences]
    return Microbatch(
        sequences=sequences,
        token_ids_T=torch.cat(layout.pieces).to(device),
        segments=tuple(layout.segments),
        targets_S=torch.cat([_packed(sequence.targets_S, at) for sequence, at in layout.placed]).to(
            device
        ),
        labels_S=torch.cat(labels).to(device),
        behaviour_S=torch.cat([sequence.behaviour_S for sequence in sequences]).to(device),
        sequence_S=torch.repeat_interleave(torch.arange(len(sequences)), counts_B).to(device),
        advantages_B=torch.tensor([sequence.advantage for sequence in sequences]).to(device),
        weights_B=torch.tensor([sequence.weight for sequence in sequences]).to(device),
        ref_logprobs_S=torch.cat(refs).to(device) if refs else None,
    )


class _Layout:
    """A microbatch that grows segment by segment: starts of rollouts, then what follows them."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.pieces: list[Tensor] = []
        self.placed: list[tuple[TrainingSequence, Segment]] = []
        """Every row with its last segment."""

    def add_roots(self, bundles: Sequence[Bundle]) -> list[Segment | None]:
        """Rows alone and shared prefixes, the longest first; each bundle's prefix, if it has one.

        Together, so that attention takes those of similar length in one call.
        """
        found: dict[int, Segment] = {}
        lengths = [bundle.shared or bundle.sequences[0].length for bundle in bundles]
        for index in sorted(range(len(bundles)), key=lambda index: -lengths[index]):
            bundle = bundles[index]
            first = bundle.sequences[0]
            segment = self._append(first.token_ids_T[: lengths[index]])
            if bundle.shared:
                found[index] = segment
            else:
                self.placed.append((first, segment))
        return [found.get(index) for index in range(len(bundles))]

    def add_continuations(self, bundle: Bundle, prefix: Segment | None) -> None:
        """Append the tokens that the rows of a bundle do not share."""
        if prefix is not None:
            for sequence in bundle.sequences:
                own = sequence.token_ids_T[prefix.length :]
                self.placed.append((sequence, self._append(own, prefix.start, prefix.length)))

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


CALL_FLOPS = 18e6
"""Cost of one more attention call per layer, forward and backward, in the arithmetic that a CPU
core does meanwhile. Measured at hidden size 128, groups of 6 and 90 tokens after the prompt: shared
prompts of 10 / 20 / 40 tokens take 1.08 / 0.92 / 0.83 times as long as prompts that are not."""
TOKEN_FLOPS = 72
"""Cost of a token in a layer, forward and backward, per squared hidden size: 12 H^2 weights, 2 each
forward and 4 backward."""


def bundle_sequences(
    sequences: Sequence[TrainingSequence], *, share: bool, least: int = 1
) -> list[Bundle]:
    """`sequences` in bundles: groups that share a prompt of at least `least` tokens, and rows alone.

    Rows of a group whose prompts differ are apart. Bundles stand in the order of their first rows.
    """
    alike: dict[tuple[object, ...], list[TrainingSequence]] = {}
    for index, sequence in enumerate(sequences):
        long = share and sequence.trajectory.prompt_length >= least
        alike.setdefault(_prompt(sequence) if long else (index,), []).append(sequence)
    return [_prefix_bundle(found) for found in alike.values()]


def _prompt(sequence: TrainingSequence) -> tuple[object, ...]:
    ids = sequence.token_ids_T[: sequence.trajectory.prompt_length]
    return sequence.rollout.group_id, *ids.tolist()


def _prefix_bundle(sequences: Sequence[TrainingSequence]) -> Bundle:
    by_length = tuple(sorted(sequences, key=lambda sequence: -sequence.length))
    return Bundle(by_length, sequences[0].trajectory.prompt_length if len(sequences) > 1 else 0)


def least_prompt(hidden_size: int) -> int:
    """Tokens of the shortest prompt that is worth sharing.

    Each rollout that does not compute its prompt saves its tokens in every layer, and costs an
    attention call of its own there. Example: 4 tokens at hidden size 256, 62 at 64.
    """
    return 1 + int(CALL_FLOPS / (TOKEN_FLOPS * hidden_size**2))


SHORTEST = 0.85
"""Rollouts at least this long, relative to a block's longest, share its call. Measured on CPU with
96 rollouts of 80-250 tokens: 0.8 to 0.95 differ little, one call per rollout is 4 % slower."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that see each other causally, and all of their prefix."""

    start: int
    """Packed position of the first token."""
    length: int
    prefix: int = 0
    """Packed position at which the prefix starts."""
    prefix_length: int = 0
    """0: the segment is the start of its rollout."""

    @property
    def end(self) -> int:
        """Packed position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring segments of one prefix and similar length, attended to in one padded call.

    Padding stands at the end, where causal attention never sees it, and its queries are dropped.
    """

    start: int
    """Packed position of the first token; the block's tokens are neighbours."""
    tokens: int
    segments: int
    length: int
    """Tokens of the longest segment."""
    prefix_block: int
    """Which of all blocks holds the prefix, and at which of its tokens it starts."""
    prefix: int
    prefix_length: int
    gather: Tensor
    """[segments x length] The block's token at every padded position; padding repeats the last."""
    scatter: Tensor
    """[tokens] Padded position of each of the block's tokens."""
    padding: Tensor
    """Padded positions that are no token's."""


def make_blocks(segments: Sequence[Segment], device: torch.device) -> tuple[Block, ...]:
    """Blocks of the segments, which stand one after the other from packed position 0."""
    blocks: list[Block] = []
    first = 0
    for index in range(1, len(segments) + 1):
        if index < len(segments) and _alike(segments[first], segments[index]):
            continue
        blocks.append(_make_block(segments[first:index], blocks, device))
        first = index
    return tuple(blocks)


def _alike(longest: Segment, other: Segment) -> bool:
    same_prefix = (longest.prefix, longest.prefix_length) == (other.prefix, other.prefix_length)
    return same_prefix and SHORTEST * longest.length <= other.length <= longest.length


def _make_block(
    segments: Sequence[Segment], before: Sequence[Block], device: torch.device
) -> Block:
    longest = segments[0]
    start = longest.start
    prefix_block, prefix = _place_of_prefix(longest, before)
    steps_L = torch.arange(longest.length, device=device)
    lengths_B1 = torch.tensor([segment.length for segment in segments], device=device)[:, None]
    starts_B1 = torch.tensor([s.start - start for s in segments], device=device)[:, None]
    real = (steps_L < lengths_B1).flatten()
    return Block(
        start=start,
        tokens=segments[-1].end - start,
        segments=len(segments),
        length=longest.length,
        prefix_block=prefix_block,
        prefix=prefix,
        prefix_length=longest.prefix_length,
        gather=(starts_B1 + torch.minimum(steps_L, lengths_B1 - 1)).flatten(),
        scatter=real.nonzero()[:, 0],
        padding=(~real).nonzero()[:, 0],
    )


def _place_of_prefix(segment: Segment, before: Sequence[Block]) -> tuple[int, int]:
    """Which block holds the prefix, and at which of its tokens it starts; 0, 0 without one."""
    if not segment.prefix_length:
        return 0, 0
    index = bisect_right(before, segment.prefix, key=lambda block: block.start) - 1
    first = segment.prefix - before[index].start
    assert first + segment.prefix_length <= before[index].tokens, "a prefix is one earlier segment"
    return index, first


def one_after_the_other(lengths: Sequence[int]) -> tuple[Segment, ...]:
    """Segments of rollouts that share nothing."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, length))
        start += length
    return tuple(segments)


def positions(segments: Sequence[Segment]) -> Tensor:
    """[T] Each token's place in its own rollout, from 0."""
    return torch.cat([torch.arange(s.prefix_length, s.prefix_length + s.length) for s in segments])
