"""Keys and values of many sequences in place: one row a sequence, no copy per decoded token.

The active sessions are on rows 0 … n-1, the idle ones behind, so that a forward pass reads one
stretch of rows and computes over no idle one.

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


@dataclass(slots=True)
class Window:
    """The part of the cache that the next forward pass reads and writes."""

    rows: int = 0
    """R, allocated."""
    capacity: int = 0
    """C, allocated."""
    first: int = 0
    """First row of the pass."""
    count: int = 0
    """N: rows first … first + count - 1 take part."""
    length: int = 0
    """L."""
    slots: Tensor | None = None
    """[N*T] Slots of the new keys and values, row * C + position; R * C takes the padding's."""


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, [R*C + 1, K, D] each; padding writes to the last slot.

    Allocated as zeros: masked slots are multiplied by zero, so they have to be finite.
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
        """Write the new states [N, K, T, D]; return views [N, K, L, D] of the rows."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
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
        """(L, offset 0)."""
        return self.window.length, 0

    def get_seq_length(self) -> int:
        """L."""
        return self.window.length

    def get_max_length(self) -> int:
        """-1: it grows."""
        return -1


class RowCache(Cache):
    """A transformers cache over rows; `window` is set before every forward pass.

    It grows as needed, in strides that stay within `max_rows` and `max_length`.
    """

    def __init__(self, layers: int, max_rows: int, max_length: int) -> None:
        self.window = Window()
        self.max_rows = max_rows
        self.max_length = max_length
        super().__init__(layers=[RowLayer(self.window) for _ in range(layers)])

    def _buffers(self) -> list[tuple[RowLayer, str]]:
        return [(x, name) for x in self.layers if x.is_initialized for name in ("keys", "values")]

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` rows of `length` tokens; cached ones stay."""
        window = self.window
        if rows <= window.rows and length <= window.capacity:
            return
        rows = _grown(window.rows, rows, self.max_rows)
        capacity = grown_capacity(window.capacity, length, self.max_length)
        for layer, name in self._buffers():
            old = getattr(layer, name)
            new = old.new_zeros(rows * capacity + 1, *old.shape[1:])
            grown = new[:-1].view(rows, capacity, *old.shape[1:])
            grown[: window.rows, : window.capacity] = layer.rows_of(old)
            setattr(layer, name, new)
        window.rows, window.capacity = rows, capacity

    def arrange(self, active: Sequence[Seat], seats: Collection[Seat]) -> None:
        """Put active[i] on row i and every other seat on some row behind, with `seat.row` set.

        Example: rows [A, B, C], A leaves and D joins, so active is [C, B, D] and A idles: C moves
        to row 0, A to row 3, D stands on row 2.
        """
        self.reserve(len(seats), 0)
        old = {seat: seat.row for seat in seats if seat.row is not None}
        for row, seat in enumerate(active):
            seat.row = row
        idle = [seat for seat in seats if seat.request is None]
        taken = {seat.row for seat in idle}
        free = iter([row for row in range(len(active), len(seats)) if row not in taken])
        for seat in idle:
            if seat.row is None or not len(active) <= seat.row < len(seats):
                seat.row = next(free)
        moved = [seat for seat in old if seat.row != old[seat] and seat.cached]
        if not moved:
            return
        # All rows move in one copy per layer: some trade places.
        sources = [old[seat] for seat in moved]
        targets = [seat.row for seat in moved if seat.row is not None]
        length = max(seat.cached for seat in moved)
        for layer, name in self._buffers():
            rows = layer.rows_of(getattr(layer, name))
            source = torch.tensor(sources, device=rows.device)
            rows[torch.tensor(targets, device=rows.device), :length] = rows[source, :length]

    def copy_prefixes(self, seats: Sequence[Seat]) -> int:
        """Copy to each seat's row what it shares with its source; return the number of ids.

        A source that has lost its row's contents is left out: its seat is then fed whole.
        """
        pairs = [(s, s.source) for s in seats if s.source and s.source.cached >= s.shared]
        for seat, _ in pairs:
            seat.cached = seat.shared
        if pairs:
            length = max(seat.shared for seat, _ in pairs)  # what lies behind is overwritten
            for layer, name in self._buffers():
                rows = layer.rows_of(getattr(layer, name))
                targets = torch.tensor([seat.row for seat, _ in pairs], device=rows.device)
                sources = torch.tensor([source.row for _, source in pairs], device=rows.device)
                rows[targets, :length] = rows[sources, :length]
        for seat in seats:
            seat.source, seat.wave = None, 0
        return sum(seat.shared for seat, _ in pairs)

    def wipe(self) -> None:
        """Zero everything, after numbers that are not finite were written."""
        for layer, name in self._buffers():
            getattr(layer, name).zero_()


def _grown(size: int, wanted: int, limit: int) -> int:
    return size if wanted <= size else max(wanted, min(2 * size, limit))


def grown_capacity(capacity: int, length: int, max_length: int) -> int:
    """Return the tokens of a row that had `capacity` and is to hold `length`.

    Example: rows of 64 tokens that are to hold 65, of at most 1024, get 128.
    """
    # Rows start at multiples of 64 bytes whatever the growth, so that kernels keep their bits.
    return -(-_grown(capacity, length, max_length) // CAPACITY_STEP) * CAPACITY_STEP


def final_capacity(first: int, longest: int, max_length: int) -> int:
    """Return the tokens of a row that began with `first` and has grown to `longest`, one by one.

    Example: from 100 to 300 of at most 1024: 128, then 256, then 512.
    """
    capacity = grown_capacity(0, first, max_length)
    while capacity < longest:
        capacity = grown_capacity(capacity, capacity + 1, max_length)
    return capacity
