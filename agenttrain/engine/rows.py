"""Rows of sessions in the cache: the active ones on rows 0 … n-1, the idle ones behind.

So a forward pass reads one stretch of rows and computes over no idle one. What has to move for that
moves in one copy per layer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from agenttrain.engine.cache import RowCache
from agenttrain.engine.scheduler import Seat


class Rows:
    """Keeps `seat.row` and the cache's rows in agreement."""

    def __init__(self, cache: RowCache) -> None:
        self.cache = cache

    def arrange(self, active: Sequence[Seat], seats: Collection[Seat]) -> None:
        """Put active[i] on row i and every other seat on some row behind.

        Example: rows [A, B, C], A leaves and D joins, so active is [C, B, D] and A idles: C moves
        to row 0, A to row 3, D stands on row 2.
        """
        self.cache.reserve(len(seats), 0)
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
        if moved:
            sources = [old[seat] for seat in moved]
            targets = [seat.row for seat in moved if seat.row is not None]
            self.cache.move(sources, targets, max(seat.cached for seat in moved))
