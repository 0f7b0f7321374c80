"""A packed tree cut over n processes.

The packed row is cut into 2n chunks of equal length, and process r holds the chunks r and
2n - 1 - r: late tokens attend to many keys, early ones to few, so that all processes have about as
much to attend to. A segment that crosses the end of a chunk becomes a chain of pieces, each the
parent of the next. So the pieces are a tree of segments that computes the same, and each piece has
one owner. Two processes, a prompt P and two answers::

    packed   P P P P P P P P | A A A | B B B B B
    chunk    0 0 0 0 1 1 1 1   2 2 2   2 3 3 3 3      owner of chunks 0 1 2 3: 0 1 1 0
    pieces   P0 ───── P1 ─┬─── A
                          └──────────  B0 ── B1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from agenttrain.training.context_group import ContextGroup
from agenttrain.training.segments import Segment

QUERIES = 256
"""Most queries of a call within a window, whose keys are then few more."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TreePiece:
    """Neighbouring tokens of a segment in one chunk, a part of the packed row with one owner.

    Example: process 0 of two holds the first and the last four of 16 tokens. A prompt of 8 tokens
    has two answers of 3 and 5, so that its pieces belong to two sequences. The last piece of the
    second answer is packed at 12 to 15 (`segment.start` 12). It comes after four other tokens of
    its owner (`offset` 4), and in its sequence after the prompt and a token (`position` 9).
    """

    segment: Segment
    """The piece by its packed positions. Its parent is `parent.segment`."""
    parent: TreePiece | None
    """Piece before this one in its sequences: the same for siblings. None: it starts them."""
    chunk: int
    owner: int
    """Process that holds the chunk."""
    offset: int
    """Index of the first token among all tokens that the owner holds."""
    position: int
    """Position of the first token in its sequences, the same in all of them."""

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.segment.length

    @property
    def ancestors(self) -> Iterator[TreePiece]:
        """Pieces before this one in its sequences, the nearest first."""
        piece = self.parent
        while piece is not None:
            yield piece
            piece = piece.parent


class Call(NamedTuple):
    """Queries and keys that attend in one call, by their indices among those of their owners."""

    queries: slice
    keys: slice
    shift: int | None
    """Query a of `queries` attends to key b of `keys`, both from 0, if b <= a + shift, within the
    window. 0 with equally many of both: causal. None: every query attends to all keys."""


class ContextTree:
    """The pieces of a packed tree of segments, as process `rank` of `processes` computes them.

    The packed row is cut into two chunks for each process, an early and a late one, because late
    tokens attend to more keys. Segments are cut into pieces at the ends of chunks. A process holds
    the tokens of its pieces one after the other: `TreePiece.offset` counts them.

    For attention the keys of every process come round to this one. `calls` then lists the calls of
    its queries over them, as slices. `positions` are those of its tokens in their sequences.
    """

    def __init__(self, segments: Sequence[Segment], *, rank: int, processes: int) -> None:
        """Cut segments into pieces.

        They have at least two tokens for each process in all, so that each chunk has one: `fill`
        adds what is missing.
        """
        self.rank, self.processes = rank, processes
        self._calls: dict[tuple[int, int | None], list[Call]] = {}
        """Results of `calls`, cached by its arguments (source, window): layers ask for the same."""
        chunks = 2 * processes  # an early one and a late one for each, which balances attention
        tokens = segments[-1].end
        self.bounds = [tokens * chunk // chunks for chunk in range(chunks + 1)]
        """Packed position at which each chunk starts, and the end."""
        self.pieces = self._cut(segments)
        """All pieces in packed order."""
        self.held: list[list[TreePiece]] = [[] for _ in range(processes)]
        """Pieces of each process, in packed order."""
        for piece in self.pieces:
            self.held[piece.owner].append(piece)
        self.counts = [sum(piece.length for piece in pieces) for pieces in self.held]
        """Tokens of each process."""

    def owner(self, chunk: int) -> int:
        """Return the process that holds a chunk."""
        return min(chunk, 2 * self.processes - 1 - chunk)

    def _cut(self, segments: Sequence[Segment]) -> tuple[TreePiece, ...]:
        """Cut segments at the ends of chunks; the pieces of a segment are a chain of parents.

        Chunk c has the packed positions `bounds[c]` to `bounds[c + 1]` - 1, and one process owns
        it. A piece's `offset` counts the tokens before it that its owner holds, its `position`
        those before it in its sequences.
        """
        pieces: list[TreePiece] = []
        # Last piece of each segment, from which children go on. A segment's start identifies it.
        last_pieces: dict[int, TreePiece] = {}
        counts = [0] * self.processes  # tokens of each process's pieces so far
        for segment in segments:
            # The piece before the next one: of this segment, or at first of its parent.
            previous = None if segment.parent is None else last_pieces[segment.parent.start]
            start = segment.start
            while start < segment.end:
                chunk = bisect_right(self.bounds, start) - 1
                end = min(segment.end, self.bounds[chunk + 1])
                owner = self.owner(chunk)
                parent_segment = None if previous is None else previous.segment
                previous = TreePiece(
                    segment=Segment(start, end - start, parent_segment),
                    parent=previous,
                    chunk=chunk,
                    owner=owner,
                    offset=counts[owner],
                    position=0 if previous is None else previous.position + previous.length,
                )
                pieces.append(previous)
                counts[owner] += end - start
                start = end
            assert previous is not None  # a segment has tokens
            last_pieces[segment.start] = previous
        return tuple(pieces)

    def calls(self, source: int, window: int | None) -> list[Call]:
        """Return the attention calls of this process's queries over the keys of process `source`.

        `window` is the layer's sliding window in tokens; None: full attention.
        """
        if (source, window) not in self._calls:
            self._calls[source, window] = list(self._make_calls(source, window))
        return self._calls[source, window]

    def _make_calls(self, source: int, window: int | None) -> Iterator[Call]:
        """Yield the attention calls of this process's queries over the keys of process `source`.

        A call is a slice of the queries that this process holds and a slice of the keys that
        `source` holds, which have come here. Siblings, pieces with the same prefix, attend to it in
        one call: in packed order they are neighbours. With a window each piece has its own calls.
        """
        own_pieces = self.held[self.rank]
        if window is not None:
            for piece in own_pieces:
                for key_piece in (piece, *piece.ancestors):
                    if key_piece.owner == source:
                        yield from _window_calls(piece, key_piece, window)
            return
        for siblings in _sibling_runs(own_pieces):
            first, last = siblings[0], siblings[-1]
            queries = slice(first.offset, last.offset + last.length)
            # Siblings attend to all of their prefix, without a mask, so that they are one call.
            prefix = sorted((p.offset, p.length) for p in first.ancestors if p.owner == source)
            for keys in _join_neighbours(prefix):
                yield Call(queries, keys, shift=None)  # every query to all keys
        if source == self.rank:  # each piece attends to itself, causally: shift 0
            for piece in own_pieces:
                tokens = slice(piece.offset, piece.offset + piece.length)
                yield Call(tokens, tokens, shift=0)

    def packed_positions(self) -> Tensor:
        """Return the packed position of each token of this process."""
        chunks = (self.rank, 2 * self.processes - 1 - self.rank)
        return torch.cat([torch.arange(*self.bounds[c : c + 2]) for c in chunks])

    def positions(self) -> Tensor:
        """Return the position in its sequences of each token of this process."""
        pieces = self.held[self.rank]
        return torch.cat([torch.arange(p.position, p.position + p.length) for p in pieces])


class Split(NamedTuple):
    """A packed tree with the processes that compute it together."""

    tree: ContextTree
    group: ContextGroup


def fill(segments: Sequence[Segment], processes: int) -> tuple[Segment, ...]:
    """Return segments of at least two tokens for each process, so that every chunk has one.

    Missing tokens are a last segment of their own. Example: after 5 tokens, for 4 processes, it has
    3.
    """
    missing = 2 * processes - segments[-1].end
    return (*segments, Segment(segments[-1].end, missing)) if missing > 0 else tuple(segments)


def split_tree(segments: Sequence[Segment], group: ContextGroup) -> Split:
    """Return packed segments as a group computes them."""
    return Split(ContextTree(segments, rank=group.rank, processes=group.size), group)


def _sibling_runs(pieces: Sequence[TreePiece]) -> Iterator[list[TreePiece]]:
    """Yield runs of neighbours with the same parent."""
    run: list[TreePiece] = []
    for piece in pieces:
        if run and run[-1].parent is not piece.parent:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


def _join_neighbours(parts: Sequence[tuple[int, int]]) -> list[slice]:
    """Return parts of (start, length) as slices, in which neighbours are joined.

    Example: (0, 2) (2, 3) (7, 1) are 0:5 and 7:8.
    """
    slices: list[slice] = []
    for start, length in parts:
        if slices and slices[-1].stop == start:
            slices[-1] = slice(slices[-1].start, start + length)
        else:
            slices.append(slice(start, start + length))
    return slices


def _window_calls(query: TreePiece, key: TreePiece, window: int) -> Iterator[Call]:
    """Yield calls of a piece's queries over the keys of another one, or of itself, in a window.

    A query sees the last `window` keys up to its own position. Example: queries at positions 4 and
    5, keys at 0 to 3, window 3. Query 4 sees keys 2 and 3, query 5 key 3 alone: the call is over
    keys 2 and 3, and its `shift` is 4 - 2. Positions count in the sequences; the slices of a call
    count among the tokens that each owner holds (`offset`).
    """
    for start in range(0, query.length, QUERIES):
        stop = min(start + QUERIES, query.length)
        count = stop - start
        # Queries 0 to count - 1 of this call, counted from the piece's query `start`. Query a is
        # distance + a positions after key 0 of the piece, and sees key b if this is b to
        # b + window - 1.
        distance = query.position + start - key.position
        # Keys `low` to `high` - 1 are seen by at least one of these queries.
        low = max(0, distance - window + 1)  # by the first
        high = min(key.length, distance + count)  # by the last
        if low >= high:
            continue
        shift = distance - low  # positions from key `low` to the first query
        first_sees_last_key = high - low - 1 <= shift
        last_sees_first_key = shift + count - 1 < window
        sees_all = first_sees_last_key and last_sees_first_key
        yield Call(
            slice(query.offset + start, query.offset + stop),
            slice(key.offset + low, key.offset + high),
            shift=None if sees_all else shift,  # None: no mask is needed
        )
