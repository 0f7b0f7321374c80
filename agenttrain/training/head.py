"""Log-probabilities and entropies of labels under a linear head, tile by tile.

There is no [tokens x vocabulary] tensor in memory, unless `keep` keeps the logits for the backward
pass. Then they are the only one.

Shapes: S tokens, H hidden, V vocabulary, C tokens and N vocabulary entries of a tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agenttrain.training.compilation import compiled

CPU_TILE = (256, 2**19)
"""(tokens, logits) of a tile: 2 MiB in fp32, which fit into a CPU core's cache."""
GPU_TILE = (4096, 2**25)
"""128 MiB in fp32: large enough for a GPU's matrix products."""
ALIGNED = 64
"""On a GPU the vocabulary entries of a tile are a multiple of this: it multiplies matrices whose
rows begin at odd addresses without its fast kernels."""
LOWEST = -1e30
"""Below every logit, and far enough from infinity to subtract from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """Transform from the head's output y to the logits of the distribution sampled from.

    ``logits = scale * y``, then ``softcap * tanh(logits / softcap)``, then ``/ temperature``.
    """

    temperature: float = 1.0
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, output: Tensor) -> Tensor:
        """Return the logits, of the type of `output`."""
        if self.softcap is None:
            slope = self.scale / self.temperature
            return output if slope == 1 else output * slope
        bounded = torch.tanh(output * (self.scale / self.softcap))
        return bounded * (self.softcap / self.temperature)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return d logits / d output, from the logits."""
        slope = self.scale / self.temperature
        if self.softcap is None:
            return slope
        return slope * (1 - (logits * (self.temperature / self.softcap)).square())


def linear_logprobs(
    hidden_SH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    labels_S: Tensor,
    transform: LogitTransform,
    *,
    keep: bool,
    entropy_grad: bool = False,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(transform(hidden @ weight.T + bias)) at the labels, and entropies, [S].

    Products have the type of `hidden` (under autocast, autocast's). Everything else is at least
    fp32. With `keep` the logits are kept for the backward pass, which otherwise computes them
    again. The entropies carry a gradient only with `entropy_grad`. With `compile`, torch.compile
    fuses the arithmetic of a tile.
    """
    logprobs_S, entropy_S = _LinearLogprobs.apply(
        hidden_SH,
        weight_VH,
        bias_V,
        labels_S,
        transform,
        keep and torch.is_grad_enabled(),
        compiled if compile else _uncompiled,
    )
    return logprobs_S, entropy_S if entropy_grad else entropy_S.detach()


Prepare = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a function as it is to be called: itself, or compiled."""


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


class _LinearLogprobs(torch.autograd.Function):
    """`linear_logprobs` with a backward pass of its own, which works tile by tile as the forward.

    A tile is a block of the [S, V] logits: S tokens, V vocabulary entries, H hidden. Without `keep`
    only one tile is in memory, and the backward pass computes each again.

    `_Product` multiplies a tile, and `_Statistics` adds it to sums over the vocabulary. `transform`
    makes logits of the head's output, by scale, soft cap and temperature. Its `slope` is
    d logits / d output.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_S: Tensor,
        transform: LogitTransform,
        keep: bool,
        prepare: Prepare,
    ) -> tuple[Tensor, Tensor]:
        """Return logprobs and entropies, [S] each, tile by tile; with `keep`, save the logits.

        A tile is a block of the [S, V] logits, some tokens and some vocabulary entries. Sums over
        the vocabulary are added up from tile to tile, so that only one tile is in memory. `prepare`
        compiles the functions of a tile's arithmetic, or returns them as they are.
        """
        ctx.set_materialize_grads(False)  # the gradient of an output that nothing uses is None
        device = hidden_SH.device.type
        # As in torch's own layers, autocast leaves float64 alone.
        cast = torch.is_autocast_enabled(device) and hidden_SH.dtype is not torch.float64
        dtype = torch.get_autocast_dtype(device) if cast else hidden_SH.dtype
        product = _Product(hidden_SH, weight_VH, bias_V, dtype)
        # `exact`: fp32 at least, whatever the format of the products.
        statistics = _Statistics(labels_S, product.exact, prepare(_fold))
        logits_of_tiles = []
        for tokens, vocabulary in product.tiles():
            logits = transform(product(tokens, vocabulary))
            statistics.fold(logits, tokens, vocabulary)
            if keep:
                logits_of_tiles.append(logits)
        # With d = logit - highest the sums are exp_S = sum exp(d) and product_S = sum d exp(d), and
        # p = exp(d) / exp_S. So log p = d - log exp_S, and the entropy -sum p log p is
        # log exp_S - sum p d = log exp_S - product_S / exp_S.
        log_S = statistics.exp_S.log()
        normaliser_S = statistics.highest_S + log_S
        entropy_S = log_S - statistics.product_S / statistics.exp_S
        ctx.save_for_backward(
            hidden_SH, weight_VH, bias_V, labels_S, normaliser_S, entropy_S, *logits_of_tiles
        )
        ctx.transform, ctx.dtype, ctx.prepare = transform, dtype, prepare
        return statistics.label_S - normaliser_S, entropy_S

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs_S: Tensor | None, grad_entropy_S: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden states, weight and bias, summed tile by tile.

        For each tile: d loss / d logits, from that d loss / d output of the head, and from that the
        tile's parts of the three gradients. The tiles' logits were kept by `forward` (`keep`), or
        are computed again.
        """
        hidden_SH, weight_VH, bias_V, labels_S, normaliser_S, entropy_S, *logits_of_tiles = (
            ctx.saved_tensors
        )
        product = _Product(hidden_SH, weight_VH, bias_V, ctx.dtype)
        if grad_logprobs_S is None:
            grad_logprobs_S = torch.zeros_like(normaliser_S)
        # Sums over tiles, at least in fp32, or None for an input that needs no gradient. Autograd
        # casts each to the type of its input.
        inputs = (product.hidden_SH, weight_VH, bias_V)  # the first three of `forward`
        sums = [
            torch.zeros_like(tensor, dtype=product.exact)
            if needs_grad and tensor is not None
            else None
            for tensor, needs_grad in zip(inputs, ctx.needs_input_grad, strict=False)
        ]
        sum_hidden_SH, sum_weight_VH, sum_bias_V = sums
        kept_logits = iter(logits_of_tiles)  # empty unless `forward` kept them
        logits_gradient = ctx.prepare(_logits_gradient)  # compiled, if `forward` compiles
        for tokens, vocabulary in product.tiles():  # in the order of `forward`
            if logits_of_tiles:
                logits = next(kept_logits)
            else:
                logits = ctx.transform(product(tokens, vocabulary))
            gradient = logits_gradient(
                logits - normaliser_S[tokens, None],
                entropy_S[tokens, None],
                grad_logprobs_S[tokens, None],
                None if grad_entropy_S is None else grad_entropy_S[tokens, None],
            )
            # Add the 1 in d logprob / d logit = 1 - p, which only the label has.
            index, is_inside = _in_tile(labels_S[tokens], vocabulary)
            at_label = torch.where(is_inside, grad_logprobs_S[tokens], 0.0)
            gradient.scatter_add_(-1, index[:, None], at_label[:, None])
            # From d loss / d logits to d loss / d output of the head, which is before `transform`.
            gradient.mul_(ctx.transform.slope(logits))  # `slope`: d logits / d output
            product_gradient = gradient.to(product.dtype)
            if sum_hidden_SH is not None:
                _add_product(
                    sum_hidden_SH[tokens], product_gradient, weight_VH[vocabulary].to(product.dtype)
                )
            if sum_weight_VH is not None:
                _add_product(
                    sum_weight_VH[vocabulary], product_gradient.T, product.hidden_SH[tokens]
                )
            if sum_bias_V is not None:
                sum_bias_V[vocabulary] += gradient.sum(0)
            del product_gradient  # in 16 bits a copy; free it before the next tile is computed
        # Those of hidden states, weight and bias. The other four inputs of `forward` have none.
        return *sums, None, None, None, None


class _Product:
    """hidden @ weight.T + bias, tile by tile. Products are in `dtype`, results at least in fp32.

    S tokens, V vocabulary entries, H hidden; a tile has C of the tokens and N of the entries.
    """

    def __init__(
        self, hidden_SH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, dtype: torch.dtype
    ) -> None:
        """Choose the tokens and vocabulary entries of a tile for the device."""
        self.dtype = dtype
        """Format in which the factors are multiplied."""
        self.exact = torch.promote_types(torch.float32, dtype)
        """Format of the results."""
        self.hidden_SH, self.weight_VH, self.bias_V = hidden_SH.to(dtype), weight_VH, bias_V
        on_cpu = hidden_SH.device.type == "cpu"
        # Most tokens of a tile, and its logits in all (tokens x entries): with fewer tokens it gets
        # more vocabulary entries.
        tokens, logits = CPU_TILE if on_cpu else GPU_TILE
        self.tokens = max(1, min(tokens, hidden_SH.shape[0]))
        """Tokens of a tile."""
        entries = max(1, logits // self.tokens)
        # A GPU's fast kernels need aligned rows.
        self.entries = entries if on_cpu else entries - entries % ALIGNED
        """Vocabulary entries of a tile."""

    def tiles(self) -> Iterator[tuple[slice, slice]]:
        """Yield (tokens, vocabulary entries) of each tile, always in the same order."""
        tokens, entries = self.hidden_SH.shape[0], self.weight_VH.shape[0]
        for first_entry in range(0, entries, self.entries):
            for first_token in range(0, tokens, self.tokens):
                yield (
                    slice(first_token, min(first_token + self.tokens, tokens)),
                    slice(first_entry, min(first_entry + self.entries, entries)),
                )

    def __call__(self, tokens: slice, vocabulary: slice) -> Tensor:
        """Return the output of a tile, [C tokens, N vocabulary entries]."""
        weight_NH = self.weight_VH[vocabulary].to(self.dtype)
        output = _multiply(self.hidden_SH[tokens], weight_NH.T, self.exact)
        return output if self.bias_V is None else output + self.bias_V[vocabulary].to(self.exact)


class _Statistics:
    """Sums over the vocabulary entries of the tiles so far, for each token's softmax (`fold`).

    S tokens; a tile has C of them and N vocabulary entries. Of `exp_S` the softmax is made, and of
    `product_S` its entropy.
    """

    def __init__(self, labels_S: Tensor, dtype: torch.dtype, fold: Callable[..., None]) -> None:
        """Begin with sums over no vocabulary entry, in the format `dtype`.

        `fold` is the function `_fold`, perhaps compiled, which adds the logits of a tile.
        """
        self._fold = fold
        zeros_S = torch.zeros(labels_S.shape, dtype=dtype, device=labels_S.device)
        self.labels_S = labels_S
        self.highest_S = zeros_S + LOWEST
        """Highest logit."""
        self.exp_S = zeros_S
        """Sum of exp(d), with d = logit - highest_S."""
        self.product_S = zeros_S.clone()
        """Sum of exp(d) * d."""
        self.label_S = zeros_S.clone()
        """The label's logit."""

    def fold(self, logits: Tensor, tokens: slice, vocabulary: slice) -> None:
        """Add the logits [C, N] of a tile."""
        # Slices are views of the sums: `_fold` changes these in place.
        self._fold(logits, self.highest_S[tokens], self.exp_S[tokens], self.product_S[tokens])
        index, is_inside = _in_tile(self.labels_S[tokens], vocabulary)
        label = logits.gather(-1, index[:, None])[:, 0]
        self.label_S[tokens] += torch.where(is_inside, label, 0.0)


def _fold(logits: Tensor, highest: Tensor, exp: Tensor, product: Tensor) -> None:
    """Add the logits of a tile, [tokens, vocabulary entries], to its tokens' sums, in place.

    `exp` is the sum of exp(d) and `product` that of exp(d) d, with d = logit - highest so far. Of
    the first log sum exp is made, of both the entropy. The highest logit is subtracted so that exp
    cannot overflow.

    The former sums are first made relative to the new highest logit: with s = former highest -
    highest they become e^s exp and e^s (product + s exp).
    """
    # At the first tile `highest` is LOWEST, which is finite, and the former sums are 0 and stay so.
    # With -inf instead, `exp * shift` would be 0 * -inf, NaN.
    former_highest = highest.clone()
    torch.maximum(former_highest, logits.amax(-1), out=highest)
    shift = former_highest - highest
    distance = logits - highest[:, None]
    weight = distance.exp()
    # The former sums as above, each plus this tile's. `product` first: it reads the former `exp`.
    product.add_(exp * shift).mul_(shift.exp()).add_((distance.mul_(weight)).sum(-1))
    exp.mul_(shift.exp()).add_(weight.sum(-1))


def _in_tile(labels_C: Tensor, vocabulary: slice) -> tuple[Tensor, Tensor]:
    """Return each label's index among a tile's vocabulary entries, and True for those inside it.

    A label outside gets some valid index: the caller masks its value. Without a selection by mask
    the shapes do not depend on values, so nothing waits for the GPU.
    """
    local = labels_C - vocabulary.start
    size = vocabulary.stop - vocabulary.start
    return local.clamp(0, size - 1), (local >= 0) & (local < size)


def _logits_gradient(
    log_p: Tensor, entropy: Tensor, grad_logprob: Tensor, grad_entropy: Tensor | None
) -> Tensor:
    """Return d loss / d logits of a tile, [C, N], computed in place of `log_p`.

    The other arguments are [C, 1], for C tokens and N vocabulary entries.

    d logprob / d logit_j = [j is the label] - p_j, whose first term the caller adds.
    d entropy / d logit_j = -p_j * (log p_j + entropy)
    """
    if grad_entropy is None:
        return log_p.exp_().mul_(-grad_logprob)
    factor = grad_entropy * (log_p + entropy) + grad_logprob
    return log_p.exp_().mul_(factor.neg_())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left @ right to `total`, in place."""
    if total.dtype is left.dtype:
        total.addmm_(left, right)
    else:
        total += _multiply(left, right, total.dtype)


def _multiply(left: Tensor, right: Tensor, exact: torch.dtype) -> Tensor:
    """Return left @ right in `exact`. On a GPU the sums are not rounded to 16 bits before."""
    if left.dtype is not exact and left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=exact)
    return (left @ right).to(exact)
