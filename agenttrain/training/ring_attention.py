"""Attention of a packed tree over several processes: keys and values go round in a ring.

Each process keeps its queries. In n steps it sees the keys and values of all processes, and merges
its attention to each (https://arxiv.org/abs/2310.01889). The backward pass sends them round once
more, together with the sum of their gradients, which comes home after n steps.

Shapes: t tokens of this process, h heads (k of keys and values), d head size, e of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agenttrain.training.context_group import ContextGroup
from agenttrain.training.context_tree import ContextTree
from agenttrain.training.partial_attention import (
    Scoring,
    add_sinks,
    attend_partially,
    merge,
    nothing_yet,
    partial_gradients,
    sink_gradient,
)


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: ContextTree,
    group: ContextGroup,
    scoring: Scoring,
) -> Tensor:
    """Return the attention of this process's tokens to all keys of the tree, [t, h, e].

    Shapes: query [t, h, d], key [t, k, d], value [t, k, e].
    """
    output: Tensor = _RingAttention.apply(query, key, value, scoring.sinks, tree, group, scoring)
    return output


class _RingAttention(torch.autograd.Function):
    """`ring_attention`, which saves this process's own states alone."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        tree: ContextTree,
        group: ContextGroup,
        scoring: Scoring,
    ) -> Tensor:
        """Merge the attention to the keys of each process as they come round."""
        size = key.shape[-1]
        with torch.autocast(query.device.type, enabled=False):
            output, log = nothing_yet(query, value)
            states = torch.cat((key, value), dim=-1)
            for step in range(group.size):
                source = (group.rank - step) % group.size
                following = None
                sends, receives = {}, {}
                if step + 1 < group.size:
                    following = _buffer(tree, (source - 1) % group.size, states, states.dtype)
                    sends, receives = _round(group, states, following)
                with group.exchanging(sends, receives):
                    keys, values = states[..., :size], states[..., size:]
                    for call in tree.calls(source, scoring.window):
                        part = attend_partially(
                            *(query[call.queries], keys[call.keys], values[call.keys]),
                            *(scoring, call.shift),
                        )
                        merge(output[call.queries], log[call.queries], *part)
                states = states if following is None else following
            if sinks is not None:
                add_sinks(output, log, sinks)
            result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, log)
        ctx.tree, ctx.group, ctx.scoring = tree, group, scoring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values round again, and with them the sum of their gradients."""
        query, key, value, sinks, output, log = ctx.saved_tensors
        tree, group, scoring = ctx.tree, ctx.group, ctx.scoring
        size, exact = key.shape[-1], log.dtype
        with torch.autocast(query.device.type, enabled=False):
            of_query = torch.zeros(query.shape, dtype=exact, device=query.device)
            states = torch.cat((key, value), dim=-1)
            of_states = torch.zeros(states.shape, dtype=exact, device=query.device)
            for step in range(group.size):
                source = (group.rank - step) % group.size
                before = (source - 1) % group.size
                following = None
                sends, receives = {}, {}
                if step + 1 < group.size:
                    following = _buffer(tree, before, states, states.dtype)
                    sends, receives = _round(group, states, following)
                with group.exchanging(sends, receives):
                    keys, values = states[..., :size], states[..., size:]
                    for call in tree.calls(source, scoring.window):
                        q, k = call.queries, call.keys
                        parts = partial_gradients(
                            *(query[q], keys[k], values[k], scoring, call.shift),
                            *(output[q], log[q], gradient[q]),
                        )
                        of_query[q] += parts[0]
                        of_states[k] += torch.cat(parts[1:], dim=-1)
                if group.size > 1:
                    arriving = _buffer(tree, before, states, exact)
                    with group.exchanging(*_round(group, of_states, arriving)):
                        pass
                    of_states = arriving
                states = states if following is None else following
            of_sinks = None
            if sinks is not None:
                of_sinks = sink_gradient(output, log, gradient, sinks).to(sinks.dtype)
        of_key, of_value = of_states[..., :size], of_states[..., size:]
        return (
            *(of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)),
            *(of_sinks, None, None, None),
        )


def _buffer(tree: ContextTree, source: int, states: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory for the keys and values of process `source`."""
    return torch.empty(
        tree.counts[source], *states.shape[1:], dtype=dtype, device=states.device
    )


def _round(
    group: ContextGroup, tensor: Tensor, buffer: Tensor
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return what is sent to the next member of the ring, and received from the one before."""
    following, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return {following: tensor}, {before: buffer}


def ring_bytes(tokens: int, processes: int, width: int, *, state: int, gradient: int) -> int:
    """Return the bytes that n processes send in all, in an attention layer's two passes.

    `width` are the numbers that a token has in keys and values: heads x (d + e). `state` and
    `gradient` are the bytes of one number. Keys and values make n - 1 hops in each pass, their
    gradients n. Example: 8 tokens of width 4 in float32 over 2 processes are
    8 x 4 x (1 x 4 + 1 x 4 + 2 x 4) = 512 bytes.
    """
    hops = 2 * (processes - 1) * state + (processes * gradient if processes > 1 else 0)
    return tokens * width * hops
