"""Select packed tokens with gradients that are selections too, instead of scatter-adds.

A scatter-add sums in any order on several threads or a GPU, so that two runs differ in their last
bits. Here each selected token has one place whose gradient counts, known in advance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Select(torch.autograd.Function):
    """Select tokens by position.

    `sources` [selected] is the position of each selected token, `places` [tokens] the index at
    which each token was selected. `unselected` are the positions of tokens that were not, if any:
    their `places` may be any index. `blanks` are the indices of the result that are zero, if any.

    For a token that is selected several times, only the place in `places` contributes to its
    gradient. That is exact where the other places are padding, to which nothing attends and whose
    outputs are dropped, or blank.

    Example: of tokens a b c, `sources` 2 0 2 select c a c. With `places` 1 0 0 and `unselected` 1,
    c has the gradient of the first c, and b none.
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
        """Return the tokens at positions `sources`, [selected, …], and zeros at indices `blanks`.

        `places` and `unselected` are for the backward pass: for each token the one selected index
        whose gradient counts, and the positions of tokens without a gradient.
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
