"""Rollouts -> packed microbatches: one sequence after the other, without padding.

A sequence is a trajectory as tensors. Shapes: T all tokens of a microbatch, B its sequences, S its
sampled tokens. A microbatch of two sequences ``p p s s t s`` and ``p s s`` (p prompt, s sampled,
t tool)::

    token_ids_T    p p s s t s | p s s
    segments       Segment(0, 6)  Segment(6, 3)
    targets_S        1 2   4   | 6 7        positions whose NEXT token was sampled
    sequence_S       0 0   0   | 1 1

Sequences of a group may share their prompt (`bundle_sequences`): its tokens then occur once, and
each sequence's own tokens attend to them. Two sequences of prompt ``p p p`` with 2 and 1 tokens of
their own, and a third one::

    tokens       a a a a a | p p p | s s | s
    segments     Segment(0, 5)  Segment(5, 3)  Segment(8, 2, 5, 3)  Segment(10, 1, 5, 3)
    positions    0 1 2 3 4   0 1 2   3 4   3

Attention computes neighbouring segments of one prefix and similar length in one call
(`make_blocks`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
    """One trajectory as tensors, all of them derived from the trajectory's spans."""

    rollout: Rollout
    trajectory: Trajectory
    token_ids_T: Tensor
    targets_S: Tensor
    """Positions whose next token was sampled."""
    behaviour_S: Tensor
    """The engine's logprobs of the sampled tokens."""
    ref_logprobs_S: Tensor | None = None
    """Logprobs under the reference; None until it has scored the sequence."""
    old_logprobs_S: Tensor | None = None
    """Logprobs under the policy before the step's first update; None if the algorithm does not
    use them."""
    old_entropy_S: Tensor | None = None
    """Entropies of the same distributions."""
    weight: float = 0.0
    """Weight of each sampled token in the loss; 0: this sequence has no gradient."""

    @property
    def key(self) -> SequenceKey:
        """Id of the sequence among those of all processes."""
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
    """Return a sequence for each trajectory that has a sampled token."""
    sequences = []
    for trajectory in rollout.trajectories:
        if not trajectory.sampled_length:
            continue
        mask_T = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
        if mask_T[0]:
            raise LedgerError(
                f"{trajectory.name} turn 0: the token at position 0 is sampled, but there "
                "is nothing before it that it was sampled from. Append the prompt first."
            )
        sequences.append(
            TrainingSequence(
                rollout=rollout,
                trajectory=trajectory,
                token_ids_T=torch.tensor(trajectory.token_ids),
                targets_S=mask_T.nonzero()[:, 0] - 1,
                behaviour_S=torch.tensor(trajectory.rollout_logprobs)[mask_T],
            )
        )
    return sequences


def stand_in() -> TrainingSequence:
    """Return a sequence without a sampled token, for a process that has no sequence of its own.

    Such a process still has to run as many forward and backward passes as the others, because
    these contain collectives. Its loss is an empty sum and adds nothing.
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
    """Sequences packed into one forward pass, the longest first."""

    sequences: tuple[TrainingSequence, ...]
    token_ids_T: Tensor
    segments: tuple[Segment, ...]
    """Layout of the tokens: one segment per sequence, and one per shared prompt."""
    targets_S: Tensor
    labels_S: Tensor
    """The sampled tokens."""
    behaviour_S: Tensor
    sequence_S: Tensor
    """Index in `sequences` of each sampled token's sequence."""
    advantages_B: Tensor
    weights_B: Tensor
    ref_logprobs_S: Tensor | None


@dataclass(frozen=True, slots=True)
class Bundle:
    """Sequences packed together because they share their first tokens; or a single one."""

    sequences: tuple[TrainingSequence, ...]
    """The longest first."""
    shared: int = 0
    """Length of the shared prefix, which every sequence includes."""


def pack(bundles: Sequence[Bundle], token_budget: int, device: torch.device) -> list[Microbatch]:
    """Pack bundles into microbatches of at most `token_budget` tokens.

    A sequence over the budget gets a microbatch of its own. Neighbours have similar lengths, which
    makes packed attention cheaper; sequences of equal length keep their order. The microbatch with
    the most tokens comes first, so that a run that will run out of memory does so at once.
    """
    fitting: list[Bundle] = []
    for bundle in bundles:
        own = [sequence.length - bundle.shared for sequence in bundle.sequences]
        for part in _cut(bundle.sequences, own, token_budget, bundle.shared):
            fitting.append(Bundle(part, bundle.shared if len(part) > 1 else 0))
    fitting.sort(key=lambda bundle: -bundle.sequences[0].length)
    # A shared prefix counts once.
    tokens = [b.shared + sum(s.length - b.shared for s in b.sequences) for b in fitting]
    microbatches = [_pack_one(part, device) for part in _cut(fitting, tokens, token_budget)]
    return sorted(microbatches, key=lambda microbatch: -microbatch.token_ids_T.numel())


def _cut(
    items: Sequence[Item], lengths: Sequence[int], budget: int, shared: int = 0
) -> Iterator[tuple[Item, ...]]:
    """Cut `items` into runs of at most `budget` tokens each, `shared` ones of every run included.

    An item over the budget is a run by itself.
    """
    run: list[Item] = []
    tokens = shared
    for item, length in zip(items, lengths, strict=True):
        if run and tokens + length > budget:
            yield tuple(run)
            run, tokens = [], shared
        run.append(item)
        tokens += length
    if run:
        yield tuple(run)


def _pack_one(bundles: tuple[Bundle, ...], device: torch.device) -> Microbatch:
    """Lay out bundles one after the other: first the starts of sequences, then what follows."""
    layout = _Layout()
    # Sequences without a shared prefix, and shared prefixes, sorted together by length: attention
    # then takes those of similar length in one call.
    prefixes: dict[int, Segment] = {}
    lengths = [bundle.shared or bundle.sequences[0].length for bundle in bundles]
    for index in sorted(range(len(bundles)), key=lambda index: -lengths[index]):
        first = bundles[index].sequences[0]
        segment = layout.append(first.token_ids_T[: lengths[index]])
        if bundles[index].shared:
            prefixes[index] = segment
        else:
            layout.placed.append((first, segment))
    for index, bundle in enumerate(bundles):
        if prefix := prefixes.get(index):
            for sequence in bundle.sequences:
                own = sequence.token_ids_T[prefix.length :]
                segment = layout.append(own, prefix.start, prefix.length)
                layout.placed.append((sequence, segment))

    sequences = tuple(sequence for sequence, _ in layout.placed)
    targets = []
    for sequence, segment in layout.placed:
        # Positions before the prefix's end are the prefix's, wherever it stands.
        own = sequence.targets_S - segment.prefix_length
        in_prefix = sequence.targets_S + segment.prefix
        targets.append(torch.where(own < 0, in_prefix, own + segment.start))
    labels = [sequence.token_ids_T[sequence.targets_S + 1] for sequence in sequences]
    counts_B = torch.tensor([sequence.sampled_length for sequence in sequences])
    refs = [s.ref_logprobs_S for s in sequences if s.ref_logprobs_S is not None]
    return Microbatch(
        sequences=sequences,
        token_ids_T=torch.cat(layout.pieces).to(device),
        segments=tuple(layout.segments),
        targets_S=torch.cat(targets).to(device),
        labels_S=torch.cat(labels).to(device),
        behaviour_S=torch.cat([sequence.behaviour_S for sequence in sequences]).to(device),
        sequence_S=torch.repeat_interleave(torch.arange(len(sequences)), counts_B).to(device),
        advantages_B=torch.tensor([sequence.advantage for sequence in sequences]).to(device),
        weights_B=torch.tensor([sequence.weight for sequence in sequences]).to(device),
        ref_logprobs_S=torch.cat(refs).to(device) if refs else None,
    )


@dataclass(slots=True)
class _Layout:
    """Layout of a microbatch, to which segments are appended."""

    segments: list[Segment] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    """Token ids of each segment."""
    placed: list[tuple[TrainingSequence, Segment]] = field(default_factory=list)
    """Every sequence with its last segment."""

    def append(self, token_ids: Tensor, prefix: int = 0, prefix_length: int = 0) -> Segment:
        """Append a segment of these tokens after a prefix that stands earlier."""
        start = self.segments[-1].end if self.segments else 0
        segment = Segment(start, token_ids.numel(), prefix, prefix_length)
        self.segments.append(segment)
        self.pieces.append(token_ids)
        return segment


def split(groups: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Split `groups` in order into `parts` lists whose lengths differ by at most one.

    Example: 5 groups in 2 parts are 3 and 2; 1 group in 2 parts is 1 and none.
    """
    size, larger = divmod(len(groups), parts)
    ends = [part * size + min(part, larger) for part in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(ends)]


CALL_FLOPS = 18e6
"""Cost of one more attention call per layer, forward and backward, as the arithmetic that a CPU
core could do in that time. Measured at hidden size 128 with groups of 6 and 90 tokens after the
prompt: sharing a prompt of 10 / 20 / 40 tokens takes 1.08 / 0.92 / 0.83 times as long as not."""
TOKEN_FLOPS = 72
"""Operations of a token in a layer per squared hidden size: 12 H^2 weights, for each 2 operations
forward and 4 backward."""


def bundle_sequences(
    sequences: Sequence[TrainingSequence], *, share: bool, least: int = 1
) -> list[Bundle]:
    """Bundle the sequences of a group that share a prompt of at least `least` tokens.

    All others are bundles of one. Bundles come in the order of their first sequences.
    """
    alike: dict[tuple[object, ...], list[TrainingSequence]] = {}
    for index, sequence in enumerate(sequences):
        key: tuple[object, ...] = (index,)
        length = sequence.trajectory.prompt_length
        if share and length >= least:
            key = (sequence.rollout.group_id, *sequence.token_ids_T[:length].tolist())
        alike.setdefault(key, []).append(sequence)
    return [
        Bundle(
            tuple(sorted(bundle, key=lambda sequence: -sequence.length)),
            bundle[0].trajectory.prompt_length if len(bundle) > 1 else 0,
        )
        for bundle in alike.values()
    ]


def least_prompt(hidden_size: int) -> int:
    """Return the length of the shortest prompt that is worth sharing.

    In every layer, a sequence that shares its prompt saves the prompt's tokens and costs one more
    attention call. Example: 4 tokens at hidden size 256, 62 at 64.
    """
    return 1 + int(CALL_FLOPS / (TOKEN_FLOPS * hidden_size**2))


SHORTEST = 0.85
"""Least length of a segment relative to the longest of its block. Measured on CPU with 96 sequences
of 80 to 250 tokens: 0.8 to 0.95 differ little, one call per sequence is 4 % slower."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that attend to each other causally, and to all of their prefix."""

    start: int
    """Packed position of the first token."""
    length: int
    prefix: int = 0
    """Packed position at which the prefix starts."""
    prefix_length: int = 0
    """0: the segment starts its sequence."""

    @property
    def end(self) -> int:
        """Packed position after the last token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring segments of one prefix and similar length, computed in one padded call.

    Padding is at the end of each segment, where causal attention never sees it; the outputs of its
    queries are dropped.
    """

    start: int
    """Packed position of the first token."""
    tokens: int
    segments: int
    length: int
    """Tokens of the longest segment."""
    prefix_block: int
    """Index of the block that holds the prefix."""
    prefix: int
    """Token of that block at which the prefix starts."""
    prefix_length: int
    gather: Tensor
    """[segments x length] Token of the block at every padded position; padding repeats the last."""
    scatter: Tensor
    """[tokens] Padded position of each token of the block."""
    padding: Tensor
    """Padded positions without a token."""


def make_blocks(segments: Sequence[Segment], device: torch.device) -> tuple[Block, ...]:
    """Make blocks of segments that stand one after the other from packed position 0."""
    # Segments of one block, the longest first.
    alike: list[list[Segment]] = []
    for segment in segments:
        longest = alike[-1][0] if alike else segment
        prefixes = [(s.prefix, s.prefix_length) for s in (longest, segment)]
        similar = SHORTEST * longest.length <= segment.length <= longest.length
        if alike and prefixes[0] == prefixes[1] and similar:
            alike[-1].append(segment)
        else:
            alike.append([segment])

    blocks: list[Block] = []
    for own in alike:
        longest, start = own[0], own[0].start
        prefix_block, prefix = 0, 0
        if longest.prefix_length:
            prefix_block = bisect_right(blocks, longest.prefix, key=lambda block: block.start) - 1
            prefix = longest.prefix - blocks[prefix_block].start
            end = prefix + longest.prefix_length
            assert end <= blocks[prefix_block].tokens, "a prefix is one earlier segment"
        steps_L = torch.arange(longest.length, device=device)
        lengths_B1 = torch.tensor([segment.length for segment in own], device=device)[:, None]
        starts_B1 = torch.tensor([segment.start - start for segment in own], device=device)[:, None]
        real = (steps_L < lengths_B1).flatten()
        blocks.append(
            Block(
                start=start,
                tokens=own[-1].end - start,
                segments=len(own),
                length=longest.length,
                prefix_block=prefix_block,
                prefix=prefix,
                prefix_length=longest.prefix_length,
                gather=(starts_B1 + torch.minimum(steps_L, lengths_B1 - 1)).flatten(),
                scatter=real.nonzero()[:, 0],
                padding=(~real).nonzero()[:, 0],
            )
        )
    return tuple(blocks)


def one_after_the_other(lengths: Sequence[int]) -> tuple[Segment, ...]:
    """Return the segments of sequences of these lengths that share nothing."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, length))
        start += length
    return tuple(segments)


def positions(segments: Sequence[Segment]) -> Tensor:
    """Return each token's position in its own sequence, from 0, [T]."""
    return torch.cat([torch.arange(s.prefix_length, s.prefix_length + s.length) for s in segments])
