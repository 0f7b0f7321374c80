"""Select packed tokens with gradients that are not scatter-adds.

A scatter-add sums in any order on several threads or a GPU, so that two runs differ in their last
bits, and in 16 bits it rounds after each addition. With `Select` each token has one place whose
gradient counts, known in advance. With `Repeat` a token may have several, whose order is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agenttrain.training.transfers import to_device


class Select(torch.autograd.Function):
    """Select tokens by position: ``result[i] = tokens[sources[i]]``.

    `places` is the way back, for the gradient: ``result[places[t]]`` is token t. Arguments:

    - `sources` [selected]: the position among the tokens of each row of the result.
    - `places` [tokens]: the row of the result whose gradient becomes the token's.
    - `unselected`: positions of tokens that are in no row, if any. Their gradient is 0, and their
      `places` may be any row.
    - `blanks`: rows of the result that are set to zero, if any.

    A token may be in several rows, but gets the gradient of one. That is exact if the others are
    padding: their outputs are dropped and nothing attends to them, so that their gradient is 0.

    Example: of tokens a b c, `sources` 2 0 2 select c a c. With `places` 1 0 0 and `unselected` 1,
    a has the gradient of row 1, c that of row 0, and b none.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        sources: Tensor,
        places: Tensor,
        unselected: Tensor | None,
        blanks: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens at positions `sources`, [selected, …], with zeros in rows `blanks`.

        `places` and `unselected` are for the backward pass: for each token the row of the result
        whose gradient it gets, and the positions of tokens that are in no row. Other rows with the
        same token are padding, whose gradient is zero.
        """
        ctx.places, ctx.unselected = places, unselected
        selected = tokens.index_select(0, sources)
        return selected if blanks is None else selected.index_fill_(0, blanks, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Return the gradient of every token, [tokens, …], from its one place that counts."""
        tokens = gradient.index_select(0, ctx.places)
        if ctx.unselected is not None:
            tokens = tokens.index_fill_(0, ctx.unselected, 0)
        return tokens, None, None, None, None


SUMMED_BYTES = 2**26
"""Most bytes of tokens' copies that the backward pass of `Repeat` lays out at once (64 MiB)."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Tokens that are selected equally often, c times each."""

    positions_N: Tensor
    """Positions of the tokens."""
    indices_CN: Tensor
    """Indices in the selection of each token's copies, in order."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Selection of tokens, each any number of times, for `Repeat`; `make_repeats` makes it."""

    sources: Tensor
    """[selected] Position of each selected token."""
    copies: tuple[Copies, ...]
    """The selected tokens, by how often they are."""


def make_repeats(sources: Tensor, device: torch.device) -> Repeats:
    """Return the selection of tokens at positions `sources` of the host, [selected].

    Example: of `sources` 4 6 4, token 6 is selected once, with index 1, and token 4 twice, with
    indices 0 and 2.
    """
    sorted_sources, order = sources.sort(stable=True)
    positions_M, counts_M = sorted_sources.unique_consecutive(return_counts=True)
    starts_M = counts_M.cumsum(0) - counts_M  # where each token begins in `order`
    copies = []
    for count in counts_M.unique().tolist():
        is_selected_M = counts_M == count
        indices_CN = order[starts_M[is_selected_M] + torch.arange(count)[:, None]]
        positions_N = positions_M[is_selected_M]
        copies.append(Copies(to_device(positions_N, device), to_device(indices_CN, device)))
    return Repeats(to_device(sources, device), tuple(copies))


class Repeat(torch.autograd.Function):
    """Select tokens by position, each any number of times.

    A token's gradient is the sum over its copies, in float32 at least and in a fixed order, and is
    rounded once. Beside the gradients the backward pass needs 3 x `SUMMED_BYTES` at most, or the
    copies of one token.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, repeats: Repeats) -> Tensor:
        """Return the selected tokens, [selected, …], of [tokens, …]."""
        ctx.tokens, ctx.repeats = len(tokens), repeats
        return tokens.index_select(0, repeats.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of every token, [tokens, …]; 0 where a token is not selected."""
        repeats: Repeats = ctx.repeats
        tokens = gradient.new_zeros(ctx.tokens, *gradient.shape[1:])
        row_bytes = gradient.element_size() * gradient.shape[1:].numel()
        for copies in repeats.copies:
            for positions_N, indices_CN in _chunks(copies, row_bytes):
                rows = gradient.index_select(0, indices_CN.flatten())
                if len(indices_CN) > 1:
                    exact = torch.promote_types(torch.float32, rows.dtype)
                    rows = rows.unflatten(0, indices_CN.shape).sum(0, dtype=exact).to(rows.dtype)
                tokens.index_copy_(0, positions_N, rows)
        return tokens, None


def _chunks(copies: Copies, row_bytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the positions and indices of copies of `SUMMED_BYTES` at most, or of one token."""
    size = max(1, SUMMED_BYTES // (row_bytes * len(copies.indices_CN)))
    return zip(copies.positions_N.split(size), copies.indices_CN.split(size, dim=1), strict=True)
