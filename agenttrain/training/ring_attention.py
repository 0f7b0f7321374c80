"""Attention of a packed tree over several processes: keys and values go round in a ring.

Each process keeps its queries. In n steps it sees the keys and values of all processes, and merges
its attention to each (https://arxiv.org/abs/2310.01889). The backward pass sends them round once
more, together with the sum of their gradients, which comes home after n steps.

Shapes: t tokens of this process, h heads (k of keys and values), d head size, e of values.
"""

from __future__ import annotations

from collections.abc import Iterator
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

    `key` and `value` are those of this process's tokens. They go round in a ring, so that each
    process sees those of all. All members of `group` call this together.

    Shapes: query [t, h, d], key [t, k, d], value [t, k, e], for t tokens, h heads, k heads of keys
    and values, d head size, e head size of values.
    """
    # Sinks apart from `scoring`: autograd sees only tensors that are arguments themselves.
    output: Tensor = _RingAttention.apply(query, key, value, scoring.sinks, tree, group, scoring)
    return output


class _RingAttention(torch.autograd.Function):
    """`ring_attention` with a backward pass of its own: only this process's states are saved.

    Keys and values go from process to process in a ring, in both passes. `attend_partially`
    attends to some keys, and `merge` adds that to the attention to the keys before.
    """

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
        """Merge the attention to the keys of each process as they come round.

        `tree.calls` says which of this process's queries attend to which keys of the process
        `source`, as slices: query a of a slice attends to key b of the other if b <= a + `shift`,
        or to all keys if `shift` is None.
        """
        size = key.shape[-1]  # keys and values travel as one tensor, and are cut apart here
        # Autocast would cast the sums over processes to 16 bits.
        with torch.autocast(query.device.type, enabled=False):
            # Output, and log sum exp of the scores, over the keys so far.
            output, lse = nothing_yet(query, value)
            states = torch.cat((key, value), dim=-1)
            for source, received in _circulate(states, tree, group):
                keys, values = received[..., :size], received[..., size:]
                for call in tree.calls(source, scoring.window):
                    part = attend_partially(
                        query[call.queries],
                        keys[call.keys],
                        values[call.keys],
                        scoring,
                        call.shift,
                    )
                    # In place: slices are views of `output` and `lse`.
                    merge(output[call.queries], lse[call.queries], *part)
            if sinks is not None:
                add_sinks(output, lse, sinks)
            result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, result, lse)
        ctx.tree, ctx.group, ctx.scoring = tree, group, scoring
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Send keys and values round again, and with them the sum of their gradients.

        In each round this process has the keys and values of the process `source`, and the sum of
        their gradients so far. It adds the gradients that come from its own queries. `tree.calls`
        are as in `forward`.
        """
        query, key, value, sinks, output, lse = ctx.saved_tensors
        tree, group, scoring = ctx.tree, ctx.group, ctx.scoring
        size, exact, gradient = key.shape[-1], lse.dtype, gradient.contiguous()
        with torch.autocast(query.device.type, enabled=False):
            grad_query = torch.zeros(query.shape, dtype=exact, device=query.device)
            states = torch.cat((key, value), dim=-1)
            grad_states = torch.zeros(states.shape, dtype=exact, device=query.device)
            for source, received in _circulate(states, tree, group):
                keys, values = received[..., :size], received[..., size:]
                for call in tree.calls(source, scoring.window):
                    q, k = call.queries, call.keys
                    parts = partial_gradients(
                        query[q],
                        keys[k],
                        values[k],
                        scoring,
                        call.shift,
                        output[q],
                        lse[q],
                        gradient[q],
                    )
                    grad_query[q] += parts[0]
                    grad_states[k] += torch.cat(parts[1:], dim=-1)
                # The sum for the keys of `source` goes on to the process that gets them next. After
                # the last of n rounds that is `source` itself. The sum for the keys of the next
                # round comes from the other neighbour.
                grad_states = _send_on(grad_states, tree, group, source)
            grad_sinks = None
            if sinks is not None:
                grad_sinks = sink_gradient(output, lse, gradient, sinks).to(sinks.dtype)
        grad_key, grad_value = grad_states[..., :size], grad_states[..., size:]
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
            *(None, None, None),  # tree, group and scoring have no gradient
        )


def _send_on(states: Tensor, tree: ContextTree, group: ContextGroup, source: int) -> Tensor:
    """Send states, those of process `source`, to the next process; return the previous one's."""
    # One hop yields twice: the states that are sent, then those that were received.
    *_, (_, received) = _circulate(states, tree, group, source, hops=1)
    return received


def _circulate(
    states: Tensor,
    tree: ContextTree,
    group: ContextGroup,
    source: int | None = None,
    hops: int | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """Yield the states of each process as they come round: (process, states).

    They begin with `states`, those of process `source` (None: this one). `hops` is the number of
    times that they are sent on (None: until this process has seen all). They travel while the
    caller computes. Example: rank 2 of 3 yields the states of 2, then of 1, then of 0.
    """
    source = group.rank if source is None else source  # process whose states are here
    next_rank, previous_rank = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    if hops is None or group.size == 1:  # a process alone sends nothing
        hops = group.size - 1
    for _ in range(hops):
        # Whose states the previous process sends in this hop.
        next_source = (source - 1) % group.size
        shape = (tree.counts[next_source], *states.shape[1:])
        buffer = torch.empty(shape, dtype=states.dtype, device=states.device)
        with group.exchanging({next_rank: states}, {previous_rank: buffer}):
            yield source, states
        source, states = next_source, buffer
    yield source, states
