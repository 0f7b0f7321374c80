"""Recurrent mixers of a packed tree over several processes: states go from chunk to chunk.

A scan computes one chunk after the other, whoever holds it. A process waits for the last states of
the segments before its chunk, and sends on those of its own. A convolution needs the last K-1
tokens before each piece, which their owners send at once. Both backward passes go the other way.

Shapes: t tokens of this process, C channels, K taps, f tokens that others hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from agenttrain.engines.mixers import Convolution, Scan
from agenttrain.training.context_group import ContextGroup
from agenttrain.training.context_tree import ContextTree, TreePiece
from agenttrain.training.recurrent import RecurrentTree
from agenttrain.training.segments import Segment
from agenttrain.training.transfers import to_device


class HandedTree:
    """Runs recurrent layers on the tokens of a packed tree that this process holds.

    The packed row of all tokens is cut into chunks, two for each process, and segments are cut into
    pieces where a chunk ends (`ContextTree`). A layer calls `convolve` or `scan` in its forward
    pass (it is a `MixerLayout`). All members of the group call them together:

    - A convolution of K taps needs the K-1 tokens before each piece. If another process holds
      them, it sends them; such tokens are called a tail.
    - A scan computes the chunks in order. Before a chunk its process receives the states in which
      the chunk's first segments start, from the processes with the chunks before.

    t tokens of this process, C channels, f fetched tokens.
    """

    def __init__(self, tree: ContextTree, group: ContextGroup, device: torch.device) -> None:
        self.tree, self.group, self.device = tree, group, device
        self.chunks = _make_chunks(tree, device)
        """Chunks of all processes, in the order of their scans."""
        self._tails: dict[int, Tails] = {}
        """Cached by the number of tokens that a convolution reaches back."""
        self._state_shapes: dict[tuple[Any, ...], Tensor] = {}
        """Results of `state_like`: tensors whose shape and format count, not their values. Cached
        by the scan's function and the shapes of its inputs."""

    # Left out of torch.compile: the layout changes with the microbatch.
    @torch.compiler.disable
    def convolve(self, convolution: Convolution) -> Tensor:
        """Return the convolved states of this process's t tokens, [1, C, t].

        A convolution reaches back to the tokens before a piece in its sequences. Those that other
        processes hold, f in all, are fetched and put behind this process's own in one row.
        `tails.layout` is a tree of segments over this row. In it the fetched tokens are parents of
        the pieces that they precede, so that its `convolve` puts them before these. Outputs of
        fetched tokens are dropped.
        """
        reach = convolution.weight.shape[-1] - 1  # tokens that a convolution reaches back
        if reach not in self._tails:
            self._tails[reach] = make_tails(self.tree, reach, self.device)
        tails = self._tails[reach]
        rows_tC = convolution.states[0].transpose(0, 1)
        fetched_fC = _FetchTails.apply(rows_tC, tails, self.group)
        extended = torch.cat((rows_tC, fetched_fC)).transpose(0, 1)[None]
        local = Convolution(
            function=convolution.function,
            states=extended,
            weight=convolution.weight,
            bias=convolution.bias,
            activation=convolution.activation,
        )
        convolved = tails.layout.convolve(local)  # [1, C, t + f]
        return convolved[..., : len(rows_tC)]

    # Left out of torch.compile, as `convolve`.
    @torch.compiler.disable
    def scan(self, scan: Scan) -> tuple[Tensor, None]:
        """Return the output of this process's tokens, [1, t, …], and None as their last state.

        `scan` is a layer's recurrence over tokens. The processes hand each other the states in
        which their chunks start. Raises ValueError for a scan that starts from a cache's state, or
        keeps its last state for one.
        """
        if scan.state is not None or scan.keeps:
            raise ValueError("a packed tree starts its sequences: it takes no cache")
        inputs = [tensor[0] for tensor in scan.inputs]
        # A flat list, because autograd sees only tensors that are arguments themselves.
        output: Tensor = _HandedScan.apply(self, scan, len(inputs), *inputs, *scan.weights)
        return output[None], None

    def state_like(self, scan: Scan) -> Tensor:
        """Return a tensor of the shape and format of one segment's state, such as [heads, d, d].

        A scan of one token shows it. Processes need it to receive states.
        """
        # An input is [1, tokens, …]. The number of tokens does not change a state's shape.
        key = (scan.function, *(tensor.shape[2:] for tensor in scan.inputs))
        if key not in self._state_shapes:
            with torch.no_grad():
                tokens = [tensor[:, :1].detach() for tensor in scan.inputs]
                _, state = scan(tokens, state=None, keeps=True)
            assert state is not None
            self._state_shapes[key] = state[0]  # of [1, …]: that of the only sequence
        return self._state_shapes[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One chunk of the tree, a part of the packed row that one process scans.

    A chunk consists of pieces of segments. A piece starts from the last state of the piece before
    it. If that one is in an earlier chunk, its state is kept, or sent by the process that holds it.
    """

    owner: int
    """Rank of the process that holds the chunk."""
    tokens: slice
    """Indices of its tokens among those of the owner."""
    layout: RecurrentTree
    """Its pieces, as the `Segment`s of a packed row. `layout.earlier_parents` are the pieces of
    earlier chunks from whose last states some start. `layout.needed_later` are those of its pieces
    whose last states later chunks need."""
    sent: dict[int, tuple[Segment, ...]]
    """By rank of another process: the pieces whose last states the owner sends it."""


def _make_chunks(tree: ContextTree, device: torch.device) -> list[Chunk]:
    """Return the chunks of a tree, with the states that go from one to another.

    A piece starts from the last state of its parent, which may be in an earlier chunk of the same
    or of another process. So for each chunk this lists the pieces whose states come from earlier
    chunks, those whose states later chunks need, and the other processes that need them.
    """
    pieces_by_chunk: dict[int, list[TreePiece]] = defaultdict(list)
    for piece in tree.pieces:
        pieces_by_chunk[piece.chunk].append(piece)
    # Chunk -> its pieces whose last states other chunks need -> the processes that need them.
    needed: dict[int, dict[TreePiece, set[int]]] = defaultdict(dict)
    for piece in tree.pieces:
        parent = piece.parent
        if parent is not None and parent.chunk != piece.chunk:
            needed[parent.chunk].setdefault(parent, set()).add(piece.owner)
    chunks = []
    for number, pieces in sorted(pieces_by_chunk.items()):
        # Pieces of earlier chunks from whose last states this one starts, each once and in order: a
        # dictionary without values, because several pieces may have one parent.
        starting_pieces = {p.parent: None for p in pieces if p.parent and p.parent.chunk != number}
        owner = pieces[0].owner
        # Other processes that need a state of this chunk. The owner needs none sent to itself.
        receivers = sorted({rank for ranks in needed[number].values() for rank in ranks} - {owner})
        chunks.append(
            Chunk(
                owner=owner,
                # The owner holds its pieces in packed order: those of a chunk follow each other.
                tokens=slice(pieces[0].offset, pieces[-1].offset + pieces[-1].length),
                layout=RecurrentTree(
                    [piece.segment for piece in pieces],
                    device,
                    earlier_parents=[piece.segment for piece in starting_pieces],
                    needed_later=[piece.segment for piece in needed[number]],
                ),
                sent={
                    rank: tuple(p.segment for p, ranks in needed[number].items() if rank in ranks)
                    for rank in receivers
                },
            )
        )
    return chunks


class _HandedScan(torch.autograd.Function):
    """Scan of one chunk after the other; the backward pass computes each chunk again.

    The packed row is cut into chunks, each of which one process holds, its owner. Segments are cut
    into pieces where a chunk ends. A piece starts from the last state of the piece before it in its
    sequences, its parent. If that is in another process's chunk, its owner sends the state. Example
    of two processes, a segment A over chunks 0 and 1, and after it B in chunk 2::

        chunk   0     1     2
        owner   0     1     1
        piece   A0 ── A1 ── B      rank 0 sends the state of A0, rank 1 keeps that of A1

    The backward pass goes from the last chunk to the first, and sends gradients of states the other
    way. The initial states of this process's chunks are saved in one list, in the order of the
    chunks, and the backward pass takes them from its end.
    """

    @staticmethod
    def forward(ctx: Any, handed: HandedTree, scan: Scan, count: int, *tensors: Tensor) -> Tensor:
        """Return the output of this process's tokens.

        `tensors` are `count` inputs of the scan, and then its weights. Every process goes through
        all chunks of the packed row in order. A chunk consists of pieces, parts of segments. Of
        another process's chunk it receives the last states of the pieces that its own chunks go
        on from. It scans its own chunks, and sends last states to the processes that need them.
        """
        inputs, group = tensors[:count], handed.group
        like = handed.state_like(scan)
        states: dict[Segment, Tensor] = {}  # last states of pieces, received or computed here
        # Sends in progress, each with its tensor, which has to live until the send is done.
        sending = []
        outputs: list[Tensor] = []
        all_initial_states: list[Tensor] = []  # those of this process's chunks
        for chunk in handed.chunks:
            # `chunk.sent` says what the chunk's owner sends to each process: here, to this one.
            awaited_segments = chunk.sent.get(group.rank)
            if awaited_segments:
                rows = group.receive((len(awaited_segments), *like.shape), like, chunk.owner)
                states |= dict(zip(awaited_segments, rows.unbind(), strict=True))
            if chunk.owner != group.rank:
                continue
            initial_states = [states[segment] for segment in chunk.layout.earlier_parents]
            all_initial_states += initial_states
            output, last_states = chunk.layout.scan_waves(
                scan, [tensor[chunk.tokens] for tensor in inputs], initial_states
            )
            outputs.append(output)
            states |= last_states
            for rank, segments in chunk.sent.items():  # this process is the owner
                rows = torch.stack([last_states[segment] for segment in segments]).to(like.dtype)
                sending.append((group.send(rows, rank), rows))
        for work, _ in sending:
            work.wait()
        ctx.save_for_backward(*tensors, *all_initial_states)
        ctx.handed, ctx.scan, ctx.count = handed, scan, count
        ctx.start_count = len(all_initial_states)
        device = inputs[0].device.type
        # The backward pass computes in the formats of this one.
        ctx.autocast = {
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        return torch.cat(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of inputs and weights, chunk by chunk from the last to the first.

        For each of its chunks a process receives the gradients of the last states that it sent, and
        computes the chunk again for its gradients. Those of states that it received it sends back
        when it comes to the chunk that they are from: by then all later chunks are done.
        """
        handed, scan, count, group = ctx.handed, ctx.scan, ctx.count, ctx.handed.group
        saved = ctx.saved_tensors
        # `forward` has saved inputs, weights, and the initial states of this process's chunks, of
        # which there are `start_count`.
        end = len(saved) - ctx.start_count
        tensors, initial_states = saved[:end], saved[end:]
        inputs, weights = tensors[:count], tensors[count:]
        like = handed.state_like(scan)  # shape and format of a state, to receive gradients
        total_gradients = [torch.zeros_like(tensor) for tensor in tensors]
        state_gradients: dict[Segment, Tensor] = {}  # gradient of each segment's last state
        # Sends in progress, each with its tensor, which has to live until the send is done.
        sending = []
        # The initial states of the chunks that are still to be computed are the first `remaining`:
        # the last of them are those of the next chunk.
        remaining = len(initial_states)

        def add(segments: Sequence[Segment], rows: Sequence[Tensor]) -> None:
            """Add rows to the gradients of these segments' last states."""
            for segment, row in zip(segments, rows, strict=True):
                state_gradients[segment] = (
                    state_gradients[segment] + row if segment in state_gradients else row
                )

        for chunk in reversed(handed.chunks):
            # Segments of earlier chunks, from whose last states this chunk starts.
            earlier_segments = chunk.layout.earlier_parents
            if chunk.owner == group.rank:
                for rank, segments in chunk.sent.items():  # the processes that got the states
                    rows = group.receive((len(segments), *like.shape), like, rank)
                    add(segments, rows.unbind())
                remaining -= len(earlier_segments)
                input_parts, weight_parts, state_parts = _compute_chunk_gradients(
                    chunk,
                    scan,
                    inputs,
                    weights,
                    initial_states[remaining : remaining + len(earlier_segments)],
                    autocast=torch.autocast(inputs[0].device.type, **ctx.autocast),
                    gradient=gradient[chunk.tokens],
                    state_gradients=state_gradients,
                )
                for total, part in zip(total_gradients[:count], input_parts, strict=True):
                    total[chunk.tokens] += part
                for total, part in zip(total_gradients[count:], weight_parts, strict=True):
                    total += part
                add(earlier_segments, state_parts)
            elif group.rank in chunk.sent:
                # Later chunks of this process started from these states and are done: the complete
                # gradients of the states go back.
                segments = chunk.sent[group.rank]
                rows = torch.stack([state_gradients[segment] for segment in segments]).to(
                    like.dtype
                )
                sending.append((group.send(rows, chunk.owner), rows))
        for work, _ in sending:
            work.wait()
        return None, None, None, *total_gradients


def _compute_chunk_gradients(
    chunk: Chunk,
    scan: Scan,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    received_states: Sequence[Tensor],
    *,
    autocast: AbstractContextManager[Any],
    gradient: Tensor,
    state_gradients: Mapping[Segment, Tensor],
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Scan a chunk again; return the gradients of its inputs, the weights and its initial states.

    `gradient` is that of the chunk's output. `state_gradients` has those of last states from which
    later chunks start.
    """
    with torch.enable_grad(), autocast:
        # Detached: leaves of a new graph, which holds the activations of this chunk alone.
        chunk_inputs = [t[chunk.tokens].detach().requires_grad_() for t in inputs]
        chunk_weights = [t.detach().requires_grad_() for t in weights]
        initial_states = [t.detach().requires_grad_() for t in received_states]
        output, last_states = chunk.layout.scan_waves(
            _with_weights(scan, chunk_weights), chunk_inputs, initial_states
        )
    leaves = [*chunk_inputs, *chunk_weights, *initial_states]
    with_gradient = [segment for segment in last_states if segment in state_gradients]
    gradients = torch.autograd.grad(
        (output, *(last_states[segment] for segment in with_gradient)),
        leaves,
        (gradient, *(state_gradients[segment] for segment in with_gradient)),
        allow_unused=True,
    )
    parts = [
        torch.zeros_like(leaf) if part is None else part
        for leaf, part in zip(leaves, gradients, strict=True)
    ]
    first_weight, first_state = len(inputs), len(inputs) + len(weights)
    return parts[:first_weight], parts[first_weight:first_state], parts[first_state:]


def _with_weights(scan: Scan, weights: Sequence[Tensor]) -> Any:
    """Return a call of a scan with other weights."""

    def call(inputs: Sequence[Tensor], state: Tensor | None, keeps: bool) -> Any:
        return scan.apply(scan.function, inputs, weights, state, keeps)

    return call


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails:
    """Tokens of other processes that this one's convolutions reach.

    A tail is the end of another process's piece: the last tokens before a piece of this process in
    its sequences, to which a causal convolution reaches back. They are fetched, and put behind this
    process's own tokens in one row.
    """

    layout: RecurrentTree
    """Tree of segments over this row: this process's pieces, and behind them the tails."""
    sent: dict[int, Tensor]
    """Rank of another process -> indices, among this process's tokens, of those that it fetches."""
    fetched: dict[int, int]
    """Rank of another process -> number of tokens that come from it. They lie in the row in this
    order."""


def make_tails(tree: ContextTree, reach: int, device: torch.device) -> Tails:
    """Return what a convolution that reaches `reach` tokens back fetches, and its layout.

    It fetches tails: the last tokens of other processes' pieces. They are put behind the tokens of
    this process's own pieces in one row. The layout is a tree over that row: own pieces and tails
    are segments, and a segment's parent is the one that comes before it in its sequences. So the
    layout's `convolve` finds the tokens before each piece.

    Example: this process holds 4 tokens, a piece b whose predecessor a is held by another one. With
    a reach of 2 the row is ``b b b b a a``: a is Segment(4, 2), and b is Segment(0, 4, parent=a).
    """
    # needed[a][b]: tails that process a fetches from process b, as {piece: number of tokens}.
    needed = [_needed_tails(tree, rank, reach) for rank in range(tree.processes)]
    # (first index, length) of this process's pieces, and of the tails behind them.
    places = {piece: (piece.offset, piece.length) for piece in tree.held[tree.rank]}
    fetched: dict[int, int] = {}  # number of tokens from each process
    start = tree.counts[tree.rank]
    for owner, tails in enumerate(needed[tree.rank]):
        for piece, length in tails.items():
            places[piece] = (start, length)
            start += length
        if tails:
            fetched[owner] = sum(tails.values())
    segment_of: dict[TreePiece, Segment] = {}
    for piece in tree.pieces:  # parents before their children
        if piece in places:
            first, length = places[piece]
            # A tail that lacks its piece's first tokens is `reach` long, so that no convolution
            # reaches beyond it: it needs no parent.
            is_whole = length == piece.length
            parent = segment_of.get(piece.parent) if is_whole and piece.parent else None
            segment_of[piece] = Segment(first, length, parent)
    layout = sorted(segment_of.values(), key=lambda segment: segment.start)
    sent = {}  # indices of this process's tokens that each other process fetches
    for rank in range(tree.processes):
        tails = needed[rank][tree.rank] if rank != tree.rank else {}
        if tails:
            # (index after the last token, number of tokens) of each tail.
            ends = [(p.offset + p.length, length) for p, length in tails.items()]
            indices = torch.cat([torch.arange(end - n, end) for end, n in ends])
            sent[rank] = to_device(indices, device)
    return Tails(layout=RecurrentTree(layout, device), sent=sent, fetched=fetched)


def _needed_tails(tree: ContextTree, rank: int, reach: int) -> list[dict[TreePiece, int]]:
    """Return the tails that process `rank` fetches, by their owner: piece -> number of last tokens.

    A tail is the end of another process's piece. The convolutions of `rank` reach `reach` tokens
    back from each of its pieces. The owner sends a tail's tokens in the order of the dict, and
    `rank` expects them in this order.
    """
    tails: list[dict[TreePiece, int]] = [{} for _ in range(tree.processes)]
    for piece in tree.held[rank]:
        missing = reach  # tokens before the piece that are not found yet
        for ancestor in piece.ancestors:  # backwards from the piece, the nearest first
            if missing <= 0:
                break
            length = min(missing, ancestor.length)
            if ancestor.owner != rank:
                longest = tails[ancestor.owner].get(ancestor, 0)
                tails[ancestor.owner][ancestor] = max(longest, length)
            missing -= length
    # In packed order, the same for both sides. `segment.start` is a piece's packed position.
    return [dict(sorted(part.items(), key=lambda pair: pair[0].segment.start)) for part in tails]


class _FetchTails(torch.autograd.Function):
    """Fetch tokens [f, C] of other processes; the backward pass sends their gradients back.

    They are tails: the last tokens before this process's pieces, which its convolutions reach.
    `tails.sent` has indices of this process's t tokens that each other process fetches.
    `tails.fetched` has the number of tokens that come from each process. C channels.
    """

    @staticmethod
    def forward(ctx: Any, rows_tC: Tensor, tails: Tails, group: ContextGroup) -> Tensor:
        """Return the fetched tokens, [f, C]."""
        ctx.tails, ctx.group, ctx.tokens = tails, group, len(rows_tC)
        sends = {rank: rows_tC.index_select(0, index) for rank, index in tails.sent.items()}
        receives = {
            rank: rows_tC.new_empty(count, *rows_tC.shape[1:])
            for rank, count in tails.fetched.items()
        }
        with group.exchanging(sends, receives):
            pass  # `receives` are filled when the block ends; there is nothing to compute meanwhile
        # `cat` needs a tensor even if nothing was fetched.
        return torch.cat((rows_tC[:0], *receives.values()))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_fC: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this process's tokens, [t, C], from those that fetched them.

        It is 0 for tokens that no process fetched. The gradients `gradient_fC` of the tokens that
        this process fetched go to their owners. t tokens of this process, f fetched ones, C
        channels. `tails.fetched` has the number of the f tokens by the rank of their owner, and
        `tails.sent` the indices of the t tokens by the rank of the process that fetched them.
        """
        tails: Tails = ctx.tails
        parts = gradient_fC.split(list(tails.fetched.values())) if tails.fetched else ()
        sends = {rank: part.contiguous() for rank, part in zip(tails.fetched, parts, strict=True)}
        receives = {
            rank: gradient_fC.new_empty(len(index), *gradient_fC.shape[1:])
            for rank, index in tails.sent.items()
        }
        with ctx.group.exchanging(sends, receives):
            pass  # `receives` are filled when the block ends; there is nothing to compute meanwhile
        rows_tC = gradient_fC.new_zeros(ctx.tokens, *gradient_fC.shape[1:])
        for rank, index in tails.sent.items():  # a token occurs once in each index
            rows_tC.index_add_(0, index, receives[rank])
        return rows_tC, None, None
