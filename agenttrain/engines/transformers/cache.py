"""Cache of many sequences, written in place: one row per sequence, no copy per decoded token.

The active sessions are on rows 0 … n-1 and the idle ones behind them. So a forward pass reads
consecutive rows, and computes over no idle one.

A row is a state and a position: keys and values (of all tokens, or of a window), and the states of
recurrent mixers. It is moved, copied and continued as one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers.cache_utils import Cache

from agenttrain.engines.transformers.layers import Layer, LayerKind, Pass, make_layer
from agenttrain.engines.transformers.scheduler import Seat

CAPACITY_STEP = 64
"""The capacity of a row is a multiple of this number of tokens."""


class RowCache(Cache):
    """A transformers cache with a row for each sequence. The scheduler's `Seat` knows its row.

    When the batch changes, `arrange` gives each seat its row: first the active seats, which decode,
    then the idle ones. `copy_prefixes` copies the beginnings of rows between seats. Before a pass
    `reserve` makes room and `next_pass` is set. The model's layers then read and write the rows of
    the pass.
    """

    def __init__(self, kinds: Sequence[LayerKind], max_rows: int, max_length: int) -> None:
        """`kinds` says what each layer keeps of a sequence."""
        self.next_pass = Pass()
        self.max_rows = max_rows
        self.max_length = max_length
        self.has_states = any(kind.state_count for kind in kinds)
        self.copies_exactly = self.has_states or any(
            kind.window is not None and kind.window < max_length for kind in kinds
        )
        """True if a row cannot be cut back to fewer tokens: it is copied with all of its tokens. A
        state has no earlier value, and a window has lost the earliest keys."""
        self._kinds = kinds
        super().__init__(layers=self._make_layers())

    def _make_layers(self) -> list[Layer]:
        return [make_layer(kind, self.next_pass) for kind in self._kinds]

    def free(self) -> None:
        """Drop all rows and their memory."""
        self.next_pass.rows = self.next_pass.capacity = 0
        self.layers = self._make_layers()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of the longest row after the pass."""
        return self.next_pass.length

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens. Cached tokens stay."""
        next_pass = self.next_pass
        if rows <= next_pass.rows and length <= next_pass.capacity:
            return
        rows = _grow(next_pass.rows, rows, self.max_rows)
        capacity = grow_capacity(next_pass.capacity, length, self.max_length)
        for layer in self.layers:
            layer.resize(rows, capacity)
        next_pass.rows, next_pass.capacity = rows, capacity

    def arrange(self, active: Sequence[Seat], seats: Collection[Seat]) -> None:
        """Move active[i] to row i, and every idle seat to a row behind the active ones.

        `seats` are all seats: those in `active`, and idle ones, which have no request. Example: A,
        B and C are in rows 0 to 2. A becomes idle and D joins, so `active` is [C, B, D]. C moves
        from row 2 to 0, B stays, D gets row 2, and A moves to row 3, behind them.
        """
        self.reserve(len(seats), 0)  # rows alone: a pass reserves the length that it needs
        former_rows = {seat: seat.row for seat in seats if seat.row is not None}
        for row, seat in enumerate(active):
            seat.row = row
        self._place_idle([seat for seat in seats if seat.request is None], len(active), len(seats))
        sources, targets, longest = [], [], 0
        for seat, former_row in former_rows.items():
            if seat.row is not None and seat.row != former_row and seat.cached:
                sources.append(former_row)
                targets.append(seat.row)
                longest = max(longest, seat.cached)
        if sources:
            self._copy_rows(sources, targets, longest)

    def _place_idle(self, idle: Sequence[Seat], begin: int, end: int) -> None:
        """Give each idle seat a row from `begin` to `end` - 1. Seats that have one of them stay."""
        taken_rows = {seat.row for seat in idle}
        free_rows = iter([row for row in range(begin, end) if row not in taken_rows])
        for seat in idle:
            if seat.row is None or not begin <= seat.row < end:
                seat.row = next(free_rows)

    def copy_prefixes(self, seats: Sequence[Seat]) -> int:
        """Copy to the rows of seats the prefixes that the rows of their sources hold by now.

        Return the number of ids copied. A seat's `source` is the seat whose row begins with the
        same `shared` ids. A seat is skipped if its source does not hold these ids yet or, where a
        row is only copied whole, holds more. The seat keeps its `source` then.
        """
        # All pairs first: a seat that gets its prefix here cannot be copied in the same operation.
        pairs = [(s, s.source) for s in seats if s.source and self._can_copy(s.source, s.shared)]
        sources, targets = [], []
        for seat, source in pairs:
            assert source.row is not None and seat.row is not None  # `arrange` has set them
            sources.append(source.row)
            targets.append(seat.row)
            seat.cached, seat.source = seat.shared, None
        if pairs:
            # All are copied up to the longest prefix, in one operation. What is copied too much
            # behind a shorter prefix is overwritten when the seat is fed.
            self._copy_rows(sources, targets, max(seat.shared for seat, _ in pairs))
        return sum(seat.shared for seat, _ in pairs)

    def _can_copy(self, source: Seat, length: int) -> bool:
        """Return True if the first `length` ids of a seat can be copied from its row."""
        return source.cached == length if self.copies_exactly else source.cached >= length

    def _copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy rows of up to `length` tokens. All at once, because some rows swap."""
        for layer in self.layers:
            for tensor in layer.by_row(length):
                source = torch.tensor(sources, device=tensor.device)
                tensor[torch.tensor(targets, device=tensor.device)] = tensor[source]

    def clear_fresh_rows(self) -> None:
        """Zero the states of the pass's rows that have no tokens yet."""
        rows = self.next_pass.fresh_rows
        if rows and self.has_states:
            for layer in self.layers:
                layer.clear(rows)

    def wipe(self) -> None:
        """Zero all tensors, after numbers that are not finite were written."""
        for layer in self.layers:
            layer.wipe()


def _grow(size: int, needed: int, limit: int) -> int:
    """Return a size that holds `needed`: twice the old one, up to `limit`, if that is enough."""
    return size if needed <= size else max(needed, min(2 * size, limit))


def grow_capacity(capacity: int, length: int, max_length: int) -> int:
    """Return the capacity in tokens of rows that had `capacity` and have to hold `length`.

    Example: rows of 64 tokens that have to hold 65, of at most 1024, get 128.
    """
    # Whole steps: every row starts at a multiple of 64 bytes, so that kernels keep their bits.
    return -(-_grow(capacity, length, max_length) // CAPACITY_STEP) * CAPACITY_STEP


def final_capacity(first: int, longest: int, max_length: int) -> int:
    """Return the capacity of rows that began with `first` tokens and grew one by one to `longest`.

    Example: from 100 to 300 of at most 1024: 128, then 256, then 512.
    """
    capacity = grow_capacity(0, first, max_length)
    while capacity < longest:
        capacity = grow_capacity(capacity, capacity + 1, max_length)
    return capacity
