"""KV cache of many sequences, written in place: one row per sequence, no copy per decoded token.

The active sessions are on rows 0 … n-1 and the idle ones behind them. So a forward pass reads
consecutive rows, and computes over no idle one.

R rows, C capacity (tokens of a row), N rows of a forward pass, T its tokens, L the longest row's
tokens after it, K key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from agenttrain.engines.transformers.scheduler import Seat

CAPACITY_STEP = 64
"""The capacity of a row is a multiple of this number of tokens."""


@dataclass(slots=True)
class Window:
    """The part of the cache that the next forward pass reads and writes."""

    rows: int = 0
    """Allocated rows, R."""
    capacity: int = 0
    """Allocated tokens of a row, C."""
    first: int = 0
    """First row of the pass."""
    count: int = 0
    """Rows of the pass, N: first … first + count - 1."""
    length: int = 0
    """Tokens of the longest row after the pass, L."""
    slots: Tensor | None = None
    """[N*T] Slots of the new keys and values: row * C + position, or R * C for padding."""


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, [R*C + 1, K, D] each. Padding writes to the last slot.

    Allocated as zeros: a masked slot gets weight 0, and 0 times NaN would still be NaN.
    """

    is_sliding = False

    def __init__(self, window: Window) -> None:
        super().__init__()
        self.window = window

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states shaped [N, K, T, D]."""
        size = self.window.rows * self.window.capacity + 1
        self.keys, self.values = (
            states.new_zeros(size, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new states [N, K, T, D], and return views [N, K, L, D] of the rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write states [N, K, T, D] to the window's slots; return the rows as [N, K, L, D]."""
        window = self.window
        assert window.slots is not None
        flat = states.transpose(1, 2).reshape(-1, *buffer.shape[1:])
        buffer.index_copy_(0, window.slots, flat)
        rows = self.rows_of(buffer)[window.first : window.first + window.count, : window.length]
        return rows.transpose(1, 2)

    def rows_of(self, buffer: Tensor) -> Tensor:
        """Return the buffer as [R, C, K, D]."""
        return buffer[:-1].view(self.window.rows, self.window.capacity, *buffer.shape[1:])

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length L and offset 0."""
        return self.window.length, 0

    def get_seq_length(self) -> int:
        """Return L."""
        return self.window.length

    def get_max_length(self) -> int:
        """Return -1: no limit, the cache grows."""
        return -1


class RowCache(Cache):
    """A transformers cache over rows. `window` is set before every forward pass."""

    def __init__(self, layers: int, max_rows: int, max_length: int) -> None:
        self.window = Window()
        self.max_rows = max_rows
        self.max_length = max_length
        super().__init__(layers=[RowLayer(self.window) for _ in range(layers)])

    def _buffers(self) -> list[tuple[RowLayer, str]]:
        """Return where the allocated buffers are: layer and name of its attribute."""
        return [
            (layer, name)
            for layer in self.layers
            if layer.is_initialized
            for name in ("keys", "values")
        ]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens. Cached tokens stay."""
        window = self.window
        if rows <= window.rows and length <= window.capacity:
            return
        rows = _grow(window.rows, rows, self.max_rows)
        capacity = grow_capacity(window.capacity, length, self.max_length)
        for layer, name in self._buffers():
            old = getattr(layer, name)
            new = old.new_zeros(rows * capacity + 1, *old.shape[1:])
            new_rows = new[:-1].view(rows, capacity, *old.shape[1:])
            new_rows[: window.rows, : window.capacity] = layer.rows_of(old)
            setattr(layer, name, new)
        window.rows, window.capacity = rows, capacity

    def arrange(self, active: Sequence[Seat], seats: Collection[Seat]) -> None:
        """Move active[i] to row i, and every idle seat to a row behind the active ones.

        Example: rows [A, B, C]. A becomes idle and D joins, so `active` is [C, B, D]. C moves to
        row 0, A to row 3, and D gets row 2.
        """
        self.reserve(len(seats), 0)
        former_rows = {seat: seat.row for seat in seats if seat.row is not None}
        for row, seat in enumerate(active):
            seat.row = row
        idle = [seat for seat in seats if seat.request is None]
        idle_rows = {seat.row for seat in idle}
        free_rows = iter([row for row in range(len(active), len(seats)) if row not in idle_rows])
        for seat in idle:
            if seat.row is None or not len(active) <= seat.row < len(seats):
                seat.row = next(free_rows)
        moved = [s for s, row in former_rows.items() if s.row != row and s.cached]
        if not moved:
            return
        # One copy per layer moves all rows at once, because some rows swap.
        sources = [former_rows[seat] for seat in moved]
        targets = [seat.row for seat in moved if seat.row is not None]
        length = max(seat.cached for seat in moved)
        for layer, name in self._buffers():
            rows = layer.rows_of(getattr(layer, name))
            source = torch.tensor(sources, device=rows.device)
            rows[torch.tensor(targets, device=rows.device), :length] = rows[source, :length]

    def copy_prefixes(self, seats: Sequence[Seat]) -> int:
        """Copy each seat's shared prefix from its source's row. Return the number of ids copied."""
        # A source has less if the cache was wiped meanwhile: then nothing is copied.
        pairs = [(s, s.source) for s in seats if s.source and s.source.cached >= s.shared]
        for seat, _ in pairs:
            seat.cached = seat.shared
        if pairs:
            # One length for all: behind a shorter prefix the prefill overwrites what was copied.
            length = max(seat.shared for seat, _ in pairs)
            for layer, name in self._buffers():
                rows = layer.rows_of(getattr(layer, name))
                targets = torch.tensor([seat.row for seat, _ in pairs], device=rows.device)
                sources = torch.tensor([source.row for _, source in pairs], device=rows.device)
                rows[targets, :length] = rows[sources, :length]
        for seat in seats:
            seat.source, seat.wave = None, 0
        return sum(seat.shared for seat, _ in pairs)

    def wipe(self) -> None:
        """Zero all buffers, after numbers that are not finite were written."""
        for layer, name in self._buffers():
            getattr(layer, name).zero_()


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
