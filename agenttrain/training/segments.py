"""Segments: the layout of packed sequences, which may share prefixes.

`agenttrain.training.batch` draws an example. T: all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """Neighbouring tokens that attend to each other causally, and to all of their prefix."""

    start: int
    """Packed position of the first token."""
    length: int
    parent: Segment | None = None
    """Earlier segment with which the prefix ends. None: this segment starts its sequences."""

    @property
    def end(self) -> int:
        """Packed position after the last token."""
        return self.start + self.length

    @property
    def prefix(self) -> tuple[Segment, ...]:
        """The segments before this one in its sequences, the first one first."""
        return () if self.parent is None else (*self.parent.prefix, self.parent)

    @property
    def prefix_length(self) -> int:
        """Number of tokens before this segment in its sequences."""
        return sum(segment.length for segment in self.prefix)


def one_after_the_other(lengths: Sequence[int]) -> tuple[Segment, ...]:
    """Return segments of these lengths, packed one after the other without a shared prefix."""
    segments, start = [], 0
    for length in lengths:
        segments.append(Segment(start, length))
        start += length
    return tuple(segments)


def positions(segments: Sequence[Segment]) -> Tensor:
    """Return each token's position in its own sequence, from 0, [T]."""
    starts = [segment.prefix_length for segment in segments]
    pairs = zip(segments, starts, strict=True)
    return torch.cat([torch.arange(start, start + segment.length) for segment, start in pairs])


def packed_positions(last: Segment) -> Tensor:
    """Return the packed position of each token of a sequence that ends with this segment, [T]."""
    return torch.cat([torch.arange(part.start, part.end) for part in (*last.prefix, last)])
