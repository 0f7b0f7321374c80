"""Rollouts -> packed microbatches: one sequence after the other, without padding.

A sequence is a trajectory as tensors. Shapes: T all tokens of a microbatch, B its sequences, S its
sampled tokens, O a trajectory's own tokens; L layers of the model, K experts that a layer chooses
for a token, R positions with recorded experts. A microbatch of two sequences ``p p s s t s`` and
``p s s`` (p prompt, s sampled, t tool)::

    token_ids_T    p p s s t s | p s s
    segments       Segment(0, 6)  Segment(6, 3)
    targets_S        1 2   4   | 6 7        positions whose NEXT token was sampled
    sequence_S       0 0   0   | 1 1

Sequences that begin alike share a prefix (`agenttrain.training.prefixes`): its tokens occur once,
and those that follow attend to them. Three sequences with the prefix ``p p p``, two of which go on
with ``q q`` before 2 and 1 tokens of their own, and a fourth one that shares nothing::

    tokens       a a a a a | p p p | q q | s | s s | s
    segments     A = Segment(0, 5)  P = Segment(5, 3)  Q = Segment(8, 2, P)  Segment(10, 1, P)
                 Segment(11, 2, Q)  Segment(13, 1, Q)
    positions    0 1 2 3 4   0 1 2   3 4   3   5 6   5

Attention computes neighbouring segments of one parent and similar length in one call
(`make_blocks`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from agenttrain.engines.vision import Layout, Piece
from agenttrain.training.context_share import ContextShare
from agenttrain.training.prefixes import Branch, cut, grow
from agenttrain.training.segments import Segment, packed_positions
from agenttrain.training.selection import Repeats, make_repeats
from agenttrain.training.transfers import to_device
from agenttrain.types import AgenttrainError, LedgerError, Origin, Rollout, Task, Trajectory

Item = TypeVar("Item")


SequenceKey = tuple[str, int]
"""A rollout's id and the index of one of its trajectories."""


@dataclass(frozen=True, kw_only=True)
class SequenceRoutes:
    """Experts by which the tokens of a sequence were sampled.

    They are recorded at the positions whose next token was sampled, by this trajectory or in the
    context that it branches from. Shapes: R positions, L layers, K experts of a layer.
    """

    positions_R: Tensor
    """Positions in the sequence, in order."""
    experts_RLK: Tensor
    """Numbers of experts, int16."""

    @cached_property
    def keys_R(self) -> Tensor:
        """Hash of the experts chosen at each position, over all L layers, int64.

        Two different choices have the same hash with a probability of about 2**-64.
        """
        experts_RN = self.experts_RLK.flatten(1).numpy().astype(np.uint64)  # N = L x K
        # Random factors, the same in every process. Products and sums are modulo 2**64.
        generator = np.random.default_rng(0)
        factors_N = generator.integers(
            2**64, size=experts_RN.shape[1], dtype=np.uint64, endpoint=False
        )
        return torch.from_numpy((experts_RN @ factors_N).view(np.int64))


class MissingRoutes(AgenttrainError):
    """Rollouts lack the experts that `algorithm.router_replay` needs, or have impossible ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSequence:
    """One trajectory as tensors, all of them derived from the trajectory's spans.

    Shapes: T all tokens, S sampled tokens, R positions with recorded experts.
    """

    rollout: Rollout
    trajectory: Trajectory
    token_ids_T: Tensor
    """Placeholders of images are replaced by the key of their image (`image_key`)."""
    targets_S: Tensor
    """Positions whose next token was sampled."""
    behaviour_S: Tensor
    """The engine's logprobs of the sampled tokens."""
    layout: Layout | None = None
    """Positions and images. None: it has no images."""
    routes: SequenceRoutes | None = None
    """Experts that the policy's forward passes use. None: its routers choose everywhere."""
    ref_logprobs_S: Tensor | None = None
    """Logprobs under the reference. None until it has scored the sequence."""
    old_logprobs_S: Tensor | None = None
    """Logprobs under the policy before the step's first update. None if the algorithm does not
    use them."""
    old_entropy_S: Tensor | None = None
    """Entropies of the same distributions."""
    teacher_logprobs_S: Tensor | None = None
    """Logprobs under the teacher, which may read another prompt than the policy. None until it has
    scored the sequence."""
    weight: float = 0.0
    """Weight in the loss, the same for all sampled tokens. 0: this sequence has no gradient."""

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
    def shared_ids_T(self) -> Tensor:
        """The numbers by which sequences are compared to share a prefix: token ids, or hashes.

        Only sequences that replay the same experts may share a position. So at the R positions with
        recorded experts the number is a hash of the token id and the experts. Two different pairs
        have the same 63 bits too rarely to matter. A hash is negative, so that it is no token id.
        """
        if self.routes is None:
            return self.token_ids_T
        shared_ids_T, positions_R = self.token_ids_T.clone(), self.routes.positions_R
        # The factor spreads ids over 64 bits: ids alone would change only the lowest bits.
        id_hashes_R = shared_ids_T[positions_R] * ID_FACTOR
        expert_hashes_R = self.routes.keys_R
        shared_ids_T[positions_R] = (expert_hashes_R ^ id_hashes_R) | SIGN_BIT
        return shared_ids_T

    @property
    def advantages_S(self) -> Tensor:
        """Advantage of each sampled token. 0 where the rollout has none.

        Read from the trajectory, because advantages are assigned after sequences are made.
        """
        advantages = self.trajectory.advantages
        return torch.zeros(self.sampled_length) if advantages is None else torch.tensor(advantages)


ID_FACTOR = 0x9E3779B97F4A7C15 - 2**64
"""Spreads token ids over 64 bits: an odd number."""
SIGN_BIT = -(2**63)


def make_sequences(rollout: Rollout, *, replays_routes: bool = False) -> list[TrainingSequence]:
    """Return a sequence for each trajectory that has a sampled token of its own.

    With `replays_routes` they have the experts by which the tokens were sampled. Raises
    MissingRoutes if these were not recorded.

    A sequence has all tokens of its trajectory: the context that it branches from (none for most
    trajectories), then O tokens of its own. Example with a context of 2 tokens::

        token_ids   c c p p s s     T = 6
        loss_mask       0 0 1 1     O = 4
        targets_S         3 4       the positions before the S = 2 sampled tokens
    """
    sequences = []
    for trajectory in rollout.trajectories:
        if not trajectory.sampled_length:
            continue
        # The mask and the logprobs are of the trajectory's own tokens, without the context.
        sampled_O = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
        context_length = trajectory.context_length
        if sampled_O[0] and not context_length:
            raise LedgerError(
                f"{trajectory.name} turn 0: the token at position 0 is sampled, but there "
                "is nothing before it that it was sampled from. Append the prompt first."
            )
        ids, layout = torch.tensor(trajectory.token_ids), None
        if trajectory.images:
            layout = Layout(trajectory.images)
            # Placeholders become a key of their image, a hash, so that prefixes with different
            # images are not taken for the same.
            ids = torch.from_numpy(layout.keyed(ids.numpy()))
        sequences.append(
            TrainingSequence(
                rollout=rollout,
                trajectory=trajectory,
                token_ids_T=ids,
                layout=layout,
                routes=_recorded_routes(rollout, trajectory) if replays_routes else None,
                # Positions in the whole sequence, each one before its sampled token.
                targets_S=sampled_O.nonzero()[:, 0] + (context_length - 1),
                behaviour_S=torch.tensor(trajectory.rollout_logprobs)[sampled_O],
            )
        )
    return sequences


def _recorded_routes(rollout: Rollout, trajectory: Trajectory) -> SequenceRoutes:
    """Return the experts recorded in a trajectory and in the context that it branches from.

    The experts of position p computed the distribution from which the token at p + 1 was sampled.
    They are recorded with that token: R positions, L layers, K experts of a layer.
    """
    positions: list[Tensor] = []
    experts: list[Tensor] = []
    if trajectory.parent is not None:
        parent, context_length = trajectory.parent
        inherited = _recorded_routes(rollout, rollout.trajectories[parent])
        # The context has positions up to context_length - 1. If the first own token was sampled,
        # its record below has the experts of this last position: leave it to that record.
        spans = trajectory.spans
        begins_sampled = bool(spans) and spans[0].origin is Origin.sampled
        end = context_length - 1 if begins_sampled else context_length
        is_kept_R = inherited.positions_R < end
        positions.append(inherited.positions_R[is_kept_R])
        experts.append(inherited.experts_RLK[is_kept_R])
    start = trajectory.context_length
    for span in trajectory.spans:
        if span.origin is Origin.sampled:
            if span.routes is None:
                raise MissingRoutes(
                    f"algorithm.router_replay=rollout: {trajectory.name} turn {span.turn} was "
                    "sampled by an engine that returned no experts. Set "
                    "algorithm.router_replay=off, or choose another engine."
                )
            routes = span.routes
            shape = (routes.tokens, routes.layers, routes.top_k)
            recorded = np.frombuffer(routes.experts, dtype="<u2").reshape(shape)
            experts.append(torch.from_numpy(recorded.astype(np.int16)))
            sampled_positions = torch.arange(start, start + routes.tokens)
            positions.append(sampled_positions - 1)
        start += len(span.token_ids)
    return SequenceRoutes(positions_R=torch.cat(positions), experts_RLK=torch.cat(experts))


def stand_in() -> TrainingSequence:
    """Return a sequence without a sampled token, for a process that has no sequence of its own.

    Forward and backward passes contain collectives, so every process has to run as many as the
    others. The loss of a stand-in is an empty sum and adds nothing.
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
    """Sequences packed into one forward pass.

    Shapes: T all tokens, S sampled tokens, B sequences.
    """

    sequences: tuple[TrainingSequence, ...]
    token_ids_T: Tensor
    segments: tuple[Segment, ...]
    """Layout of the tokens: one segment per branch of the prefix trees."""
    targets: Repeats
    """Packed positions whose next token was sampled. Sequences that branch there share one."""
    labels_S: Tensor
    """The sampled tokens."""
    behaviour_S: Tensor
    """The engine's logprobs."""
    sequence_S: Tensor
    """Index in `sequences` of each sampled token's sequence."""
    advantages_S: Tensor
    weights_B: Tensor
    """Weight in the loss of each token of a sequence."""
    ref_logprobs_S: Tensor | None
    """Logprobs under the reference. None without a reference."""
    images: PackedImages | None = None
    """Positions and images of the tokens. None: no sequence has an image."""
    routes_TLK: Tensor | None = None
    """Experts that the policy's forward pass uses, int16; -1 where its routers choose. None: they
    choose everywhere."""
    context: ContextShare | None = None
    """Part of a forward pass of several processes. Then `token_ids_T` and `routes_TLK` are those of
    this process's tokens. None: this process computes all tokens."""

    @property
    def targets_S(self) -> Tensor:
        """Packed positions whose next token was sampled, in the order of `sequences`."""
        return self.targets.sources


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedImages:
    """Images among packed tokens."""

    positions_3T: Tensor
    """Position of each token in its own sequence, in time, height and width."""
    pieces: tuple[Piece, ...]
    """Runs of placeholders by packed position."""


def pack(
    sequences: Sequence[TrainingSequence],
    token_budget: int,
    device: torch.device,
    *,
    least: int | None = None,
) -> list[Microbatch]:
    """Pack sequences into microbatches of at most `token_budget` tokens.

    Common prefixes of at least `least` tokens are shared and count once. With `least` None no
    prefix is shared. A sequence over the budget gets a microbatch of its own. Sequences of similar
    length are packed together, which makes attention cheaper: `grow` sorts them, and keeps the
    order of those of equal length. The microbatch with the most tokens comes first, so that a run
    that will run out of memory does so at once.
    """
    # Prefix trees of the sequences, those with the longest sequence first.
    trees = grow([sequence.shared_ids_T for sequence in sequences], least)
    # Each run has neighbouring trees, or a part of a large one, that fit into the budget together.
    runs = cut(trees, token_budget) if trees else []
    microbatches = [_pack_trees(sequences, run, device) for run in runs]
    return sorted(microbatches, key=lambda microbatch: -microbatch.token_ids_T.numel())


def _pack_trees(
    candidates: Sequence[TrainingSequence], trees: tuple[Branch, ...], device: torch.device
) -> Microbatch:
    """Pack the sequences of some prefix trees. A tree's indices are those of `candidates`.

    Each branch, tokens that several sequences may share, becomes a segment, level by level from the
    roots. So a prefix comes before all segments that attend to it. The sequences of the microbatch
    are in the order of their last segments.

    Example: a tree whose root A has the children B of 2 tokens and C of 3, where C has a child D.
    The levels are A, then B and C, then D. Siblings are packed the longest first: A | C | B | D.

    Letters as in `Microbatch`: T packed tokens, S sampled ones, B sequences.
    """
    segments: list[Segment] = []
    pieces: list[Tensor] = []
    sources: list[tuple[TrainingSequence, Branch]] = []  # each branch with a sequence that has it
    leaves: list[tuple[TrainingSequence, Segment]] = []  # each sequence with its last segment
    # A level of the trees: each parent's segment with the branches that follow it.
    level: list[tuple[Segment | None, Sequence[Branch]]] = [(None, trees)]
    while level:
        next_level: list[tuple[Segment | None, Sequence[Branch]]] = []
        for parent, siblings in level:
            segment_of: dict[int, Segment] = {}
            # Attention takes neighbours of similar length in one call.
            lengths = [branch.end - branch.start for branch in siblings]
            for index in sorted(range(len(siblings)), key=lambda index: -lengths[index]):
                branch = siblings[index]
                start = segments[-1].end if segments else 0
                segment_of[index] = Segment(start, lengths[index], parent)
                segments.append(segment_of[index])
                # All sequences of a branch have the same tokens there: take those of the first.
                pieces.append(candidates[branch.first].token_ids_T[branch.start : branch.end])
                sources.append((candidates[branch.first], branch))
                leaves += [(candidates[ending], segment_of[index]) for ending in branch.ending]
            # In the order of the tree: the next round sorts the children of each parent.
            next_level += [(segment_of[i], branch.children) for i, branch in enumerate(siblings)]
        level = [(parent, siblings) for parent, siblings in next_level if siblings]

    sequences = tuple(sequence for sequence, _ in leaves)
    # `targets_S` are positions in the sequence: look up where these tokens are packed.
    targets = [packed_positions(segment)[sequence.targets_S] for sequence, segment in leaves]
    labels = [sequence.token_ids_T[sequence.targets_S + 1] for sequence in sequences]
    counts_B = torch.tensor([sequence.sampled_length for sequence in sequences])
    sequence_S = torch.repeat_interleave(torch.arange(len(sequences)), counts_B)
    # Without a reference no sequence has these. In context parallel those of other processes lack
    # them, and `_own_share` reads what is left as this process's alone.
    refs = [s.ref_logprobs_S for s in sequences if s.ref_logprobs_S is not None]
    return Microbatch(
        sequences=sequences,
        token_ids_T=to_device(torch.cat(pieces), device),
        segments=tuple(segments),
        targets=make_repeats(torch.cat(targets), device),
        labels_S=to_device(torch.cat(labels), device),
        behaviour_S=to_device(torch.cat([s.behaviour_S for s in sequences]), device),
        sequence_S=to_device(sequence_S, device),
        advantages_S=to_device(torch.cat([s.advantages_S for s in sequences]), device),
        weights_B=to_device(torch.tensor([s.weight for s in sequences]), device),
        ref_logprobs_S=to_device(torch.cat(refs), device) if refs else None,
        images=_packed_images(sources, device) if any(s.layout for s, _ in sources) else None,
        routes_TLK=_packed_routes(sources, device),
    )


def _packed_routes(
    sources: Sequence[tuple[TrainingSequence, Branch]], device: torch.device
) -> Tensor | None:
    """Return the recorded experts of branches that are packed one after the other, [T, L, K].

    `sources` are branches, each with a sequence that contains it. All sequences of a branch have
    the same experts there. None if no sequence has any.
    """
    with_routes = [sequence.routes for sequence, _ in sources if sequence.routes is not None]
    if not with_routes:
        return None
    tokens = sum(branch.end - branch.start for _, branch in sources)
    # -1: the policy's routers choose.
    routes_TLK = torch.full((tokens, *with_routes[0].experts_RLK.shape[1:]), -1, dtype=torch.int16)
    start = 0
    for sequence, branch in sources:
        if sequence.routes is not None:
            positions_R = sequence.routes.positions_R
            in_branch_R = (positions_R >= branch.start) & (positions_R < branch.end)
            packed_R = positions_R[in_branch_R] + (start - branch.start)
            routes_TLK[packed_R] = sequence.routes.experts_RLK[in_branch_R]
        start += branch.end - branch.start
    return to_device(routes_TLK, device)


def _packed_images(
    sources: Sequence[tuple[TrainingSequence, Branch]], device: torch.device
) -> PackedImages:
    """Return the images and positions of branches that are packed one after the other.

    `sources` are branches, each with a sequence that contains it.
    """
    positions: list[Tensor] = []
    pieces: list[Piece] = []
    start = 0
    for sequence, branch in sources:
        layout = sequence.layout or Layout(())
        positions.append(torch.from_numpy(layout.positions(branch.start, branch.end).copy()))
        pieces += layout.pieces(branch.start, branch.end, start)
        start += branch.end - branch.start
    positions_3T = to_device(torch.cat(positions, dim=1), device)
    return PackedImages(positions_3T=positions_3T, pieces=tuple(pieces))


def split(groups: Sequence[Item], parts: int) -> list[Sequence[Item]]:
    """Split `groups` in order into `parts` lists whose lengths differ by at most one.

    Example: 5 groups in 2 parts are 3 and 2. 1 group in 2 parts is 1 and none.
    """
    size, larger = divmod(len(groups), parts)
    ends = [part * size + min(part, larger) for part in range(parts + 1)]
    return [groups[a:b] for a, b in pairwise(ends)]


SHORTEST = 0.85
"""Least length of a segment relative to the longest of its block. Measured on CPU with 96 sequences
of 80 to 250 tokens: 0.8 to 0.95 differ little, one call per sequence is 4 % slower."""


class BlockSlice(NamedTuple):
    """Tokens `start` to `end` - 1 of the block with this index."""

    block: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Neighbouring segments of one parent and similar length, padded at their ends.

    Attention gathers the block's tokens as rows [segments, length], one for each segment, and takes
    the tokens out of the rows again afterwards. Positions in the rows are counted flat, row after
    row. Example: segments of 3 and 1 tokens, 0 1 2 and 3, become the rows 0 1 2 | 3 3 3. `gather`
    is 0 1 2 3 3 3, `scatter` 0 1 2 3, and `padding` 4 5.
    """

    start: int
    """Packed position of the first token."""
    tokens: int
    """Number of tokens, without padding."""
    segments: int
    """Number of segments."""
    length: int
    """Tokens of the longest segment."""
    prefix: tuple[BlockSlice, ...]
    """Segments of the shared prefix, as slices of earlier blocks, in order."""
    gather: Tensor
    """[segments x length] Index, among the block's tokens, of the token at every position of the
    rows. Padding repeats the last token of its segment."""
    scatter: Tensor
    """[tokens] Position in the rows of each token of the block."""
    padding: Tensor
    """[segments x length - tokens] Positions in the rows without a token."""


class PaddedRows(NamedTuple):
    """Rows of tokens that follow each other, padded to the length L of the longest of N rows."""

    gather: Tensor
    """[N x L] Index of the token at every padded position. Padding repeats the last token of its
    row."""
    scatter: Tensor
    """[tokens] Padded position of each token."""
    padding: Tensor
    """Padded positions without a token."""


def pad_rows(lengths: Sequence[int], device: torch.device) -> PaddedRows:
    """Return the layout of rows of these lengths, each padded to the longest one.

    Example: rows of 3 and 1 tokens are packed as 0 1 2 3 and padded as 0 1 2 | 3 3 3. `gather` is
    0 1 2 3 3 3, `scatter` 0 1 2 3 (padded places of tokens), and `padding` 4 5.
    """
    longest = max(lengths)
    lengths_N = torch.tensor(lengths)
    starts_N = lengths_N.cumsum(0) - lengths_N
    padded_starts_N = longest * torch.arange(len(lengths))
    # `minimum`: padding repeats the last token of its row.
    in_row_NL = torch.minimum(torch.arange(longest), lengths_N[:, None] - 1)
    return PaddedRows(
        gather=to_device((starts_N[:, None] + in_row_NL).flatten(), device),
        scatter=to_device(_ranges(padded_starts_N, lengths_N), device),
        padding=to_device(_ranges(padded_starts_N + lengths_N, longest - lengths_N), device),
    )


def _ranges(starts_N: Tensor, lengths_N: Tensor) -> Tensor:
    """Return the numbers of ranges, one range after the other.

    Example: ranges of 2 and 1 from 5 and 9 are 5 6 9.
    """
    # The number that the range adds to each index of the result.
    offsets_N = starts_N - (lengths_N.cumsum(0) - lengths_N)
    offsets = torch.repeat_interleave(offsets_N, lengths_N)
    return offsets + torch.arange(len(offsets))


def make_blocks(segments: Sequence[Segment], device: torch.device) -> tuple[Block, ...]:
    """Divide segments that are packed one after the other from position 0 into blocks.

    `segments` come with siblings, segments of one parent, next to each other, the longest first. A
    block is computed by one call of the attention kernel: siblings of similar length as rows,
    padded to the longest. The shortest has at least the share SHORTEST of the longest.

    The segments of a block have the same prefix, the earlier segments that they attend to. It is
    given as slices of earlier blocks, because attention has the keys of each block in a tensor.
    """
    # Each run of similar siblings becomes a block.
    runs: list[list[Segment]] = []
    for segment in segments:
        longest = runs[-1][0] if runs else segment
        is_similar = SHORTEST * longest.length <= segment.length <= longest.length
        if runs and longest.parent == segment.parent and is_similar:
            runs[-1].append(segment)
        else:
            runs.append([segment])

    blocks: list[Block] = []
    for run in runs:
        longest, start = run[0], run[0].start
        prefix = []
        for ancestor in longest.prefix:  # segments of earlier blocks
            # The last block that begins at or before the ancestor contains it.
            index = bisect_right(blocks, ancestor.start, key=lambda block: block.start) - 1
            start_in_block = ancestor.start - blocks[index].start
            prefix.append(BlockSlice(index, start_in_block, start_in_block + ancestor.length))
        padded = pad_rows([segment.length for segment in run], device)
        blocks.append(
            Block(
                start=start,
                tokens=run[-1].end - start,
                segments=len(run),
                length=longest.length,
                prefix=tuple(prefix),
                # Indices that pad the block's tokens, and that take the tokens from padded rows.
                gather=padded.gather,
                scatter=padded.scatter,
                padding=padded.padding,
            )
        )
    return tuple(blocks)
