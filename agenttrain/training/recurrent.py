"""Recurrent mixers over packed trees of segments: nothing passes from one rollout to another.

A convolution of K taps runs once over an extended row, in which the K-1 tokens before each segment
in its own sequences (or zeros) stand before it. The example of `agenttrain.training.batch` with
K = 3, where ``.`` is a zero and small letters are copies::

    segments   A A A A A | P P P | Q Q | S | T T | U
    extended   . . A A A A A | . . P P P | p p Q Q | p p S | q q T T | q q U

A scan runs in waves: segments of one depth and similar length are the rows of one call, padded with
zeros, which leave a state exactly as it is. They start from the states in which their parents
ended. Above, with lengths too different to share a call::

    wave 0     P, then A               wave 1     Q, then S              wave 2     T, then U

Shapes: T packed tokens, C channels, K taps, U columns of the extended row, B segments of a wave, L
tokens of its longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from agenttrain.engines.mixers import Convolution, Scan, is_kernel, reference
from agenttrain.training.batch import PaddedRows, pad_rows
from agenttrain.training.segments import Segment
from agenttrain.training.selection import Select
from agenttrain.training.transfers import to_device

SHORTEST = 0.5
"""Least length of a segment relative to the longest of its wave."""
CPU_WAVE = 1024
"""Most padded tokens of a wave on a CPU, where larger calls leave its caches: 8 rollouts of 400
tokens, nothing shared, take 7.1 CPU seconds so, and 8.1 to 9.3 in waves of any size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Segments that are scanned in one call, as rows of a batch.

    Waves run one after the other, because a segment starts from the last state of its parent, which
    is in an earlier wave. Only states that children start from are kept: those of waves that
    `keeps`, wave by wave and in the order of `segments`.
    """

    segments: tuple[Segment, ...]
    length: int
    """Tokens of the longest segment."""
    rows: PaddedRows
    """How the segments' tokens are padded to rows of this length."""
    parents: tuple[int, ...]
    """For each segment the state that it starts from: the index among the states kept so far. In a
    chunk the states of earlier chunks' segments come first. Empty: all segments start from zeros.
    """
    keeps: bool
    """True if later segments start from the last states of these, which are then kept."""


class RecurrentTree:
    """Layout of packed segments as recurrent mixers need it (a `MixerLayout`).

    Each recurrent layer of a forward pass calls `convolve` or `scan`:

    - A convolution runs over an extended row of U columns, the T packed tokens and before each
      segment a copy of the last tokens of its prefix. A `Halo` says which column is which.
    - A scan carries a state from token to token. It runs in waves: the segments of a `Wave` are
      the rows of one call, and start from the states in which their parents ended. Tokens are put
      in the order of the waves for it, and back.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        *,
        earlier_parents: Sequence[Segment] = (),
        needed_later: Collection[Segment] = (),
    ) -> None:
        """Take segments that follow each other in the packed row.

        The row may be one of several chunks, which are scanned one after the other. Then
        `earlier_parents` are the segments of earlier chunks from whose last states some `segments`
        start. `needed_later` are the `segments` from whose last states later chunks start.
        """
        self.segments, self.device = tuple(segments), device
        self.earlier_parents, self.needed_later = tuple(earlier_parents), frozenset(needed_later)
        self._halos: dict[int, Halo] = {}
        """Number of a convolution's taps -> the copies of tokens that it needs before segments."""

    @cached_property
    def waves(self) -> tuple[Wave, ...]:
        """Waves in the order in which they are scanned, parents before their children.

        A wave's segments are scanned in one call, as rows of a batch. Each starts from the last
        state of its parent. If this packed row is one of several chunks, the parents of some are in
        earlier chunks (`earlier_parents`), and later chunks start from the states of others
        (`needed_later`): these states come and go with `scan_waves`.
        """
        # Padded tokens of a wave. On a CPU a larger call leaves the caches and takes longer.
        max_tokens = CPU_WAVE if self.device.type == "cpu" else None
        return make_waves(
            self.segments,
            max_tokens,
            self.device,
            earlier_parents=self.earlier_parents,
            needed_later=self.needed_later,
        )

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor] | None:
        """The order in which a scan takes the T tokens, and its inverse, [T] each.

        A scan takes segments wave by wave: those of a `Wave` are scanned in one call. The first
        tensor has the packed position of each token in this order, the second the place in this
        order of each packed token. Example: segments of 1 and 2 tokens in two waves, the second one
        first: 1 2 0, and 2 0 1. None if the packed order is the same.
        """
        in_waves = [segment for wave in self.waves for segment in wave.segments]
        if in_waves == list(self.segments):
            return None
        packed_T = torch.cat([torch.arange(segment.start, segment.end) for segment in in_waves])
        packed_T -= self.segments[0].start  # the row may be a later chunk of a longer one
        places_T = torch.empty_like(packed_T)
        places_T[packed_T] = torch.arange(len(packed_T))
        return to_device(packed_T, self.device), to_device(places_T, self.device)

    # Left out of torch.compile: the layout changes with the microbatch.
    @torch.compiler.disable
    def convolve(self, convolution: Convolution) -> Tensor:
        """Return the convolved states of the packed row, [1, C, T].

        T tokens with the copies between them (or zeros) are the U columns of an extended row.
        Example with 3 taps, of tokens 0 1 and a segment 2 3 after them: ``. . 0 1 | 0 1 2 3``.
        """
        _record_first(convolution)  # so that the trial can check this layer's kernel
        taps = convolution.weight.shape[-1]
        if taps not in self._halos:
            self._halos[taps] = make_halo(self.segments, taps, self.device)
        # Copies of the last tokens of its prefix (or zeros) are put before each segment, and their
        # outputs are dropped again.
        halo = self._halos[taps]
        rows_TC = convolution.states[0].transpose(0, 1)
        extended_UC = _Extend.apply(rows_TC, halo)
        convolved_UC = convolution(extended_UC.transpose(0, 1)[None])[0].transpose(0, 1)
        # Take each token's own column, `column_T`. The other two are for the gradient: the token of
        # each column, and the columns whose outputs are dropped, which get none.
        own_TC = Select.apply(convolved_UC, halo.column_T, halo.token_U, halo.extra_columns)
        return own_TC.transpose(0, 1)[None]

    @torch.compiler.disable
    def scan(self, scan: Scan) -> tuple[Tensor, None]:
        """Return the output of the packed row, [1, T, …], and None as its last state.

        The segments are scanned wave by wave (`Wave`), each from the last state of its parent.
        Raises ValueError for a scan that starts from a cache's state, or keeps its last state for
        one.
        """
        if scan.state is not None or scan.keeps:
            raise ValueError("a packed tree starts its sequences: it takes no cache")
        _record_first(scan)  # for `recorded_calls`, which checks kernels
        scan_wave: Any = scan
        if torch.is_grad_enabled() and not is_kernel(scan.function):
            # transformers' torch code would keep about ten times its inputs for the backward pass.
            # With `checkpoint` that pass computes the scan again.
            scan_wave = partial(checkpoint, scan, use_reentrant=False, preserve_rng_state=False)
        inputs = [tensor[0] for tensor in scan.inputs]
        packed, _ = self.scan_waves(scan_wave, inputs, states=())  # no earlier chunks
        return packed[None], None

    def scan_waves(
        self, scan_wave: Any, tensors: Sequence[Tensor], states: Sequence[Tensor]
    ) -> tuple[Tensor, dict[Segment, Tensor]]:
        """Return the output of inputs [T, …], and the last states of segments `needed_later`.

        `scan_wave` maps (inputs, first states, keeps) of a wave's padded rows to their output and,
        if `keeps`, their last states. `states` are the last states of `earlier_parents`, in their
        order; those of the segments scanned here are appended to them. `Wave.parents` are indices
        in this growing list.

        Tokens are brought into the order of the waves, scanned wave by wave, and brought back.
        """
        order = self._order
        sizes = [wave.rows.scatter.numel() for wave in self.waves]  # tokens of each wave
        inputs = []
        for tensor in tensors:
            # To the order of the waves. `order` is (selected positions, their inverse). None: every
            # token is selected.
            tokens = tensor if order is None else Select.apply(tensor, *order, None)
            inputs.append(tokens.split(sizes))  # a piece for each wave
        # Last states of the segments so far, from which their children start.
        states = list(states)
        outputs: list[Tensor] = []
        last_states: dict[Segment, Tensor] = {}
        for wave, *wave_inputs in zip(self.waves, *inputs, strict=True):
            initial_states = None  # zeros
            if wave.parents:
                initial_states = torch.stack([states[parent] for parent in wave.parents])
            output, wave_states = scan_wave(
                [_pad(wave, tensor) for tensor in wave_inputs], initial_states, wave.keeps
            )
            if wave.keeps:
                rows = wave_states.unbind()
                states += rows
                last_states |= dict(zip(wave.segments, rows, strict=True))
            outputs.append(_unpad(wave, output.flatten(0, 1)))
        packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        if order is not None:  # back to the packed order, by the inverse
            packed = Select.apply(packed, *reversed(order), None)
        return packed, {
            segment: state for segment, state in last_states.items() if segment in self.needed_later
        }


def _pad(wave: Wave, tokens: Tensor) -> Tensor:
    """Lay out a wave's tokens [tokens, …] as rows [B, L, …], with zeros behind them."""
    rows = wave.rows
    if rows.padding.numel():
        # `gather` has the token of each padded position, `scatter` the position of each token.
        tokens = Select.apply(tokens, rows.gather, rows.scatter, None, rows.padding)
    return tokens.unflatten(0, (len(wave.segments), wave.length))


def _unpad(wave: Wave, padded: Tensor) -> Tensor:
    """Return the tokens of a wave's padded positions [B x L, …]."""
    rows = wave.rows
    if not rows.padding.numel():
        return padded
    return Select.apply(padded, rows.scatter, rows.gather, rows.padding)


def make_waves(
    segments: Sequence[Segment],
    max_tokens: int | None,
    device: torch.device,
    *,
    earlier_parents: Sequence[Segment] = (),
    needed_later: Collection[Segment] = (),
) -> tuple[Wave, ...]:
    """Divide segments into waves of at most `max_tokens` padded tokens. None: of any size.

    A wave is scanned in one call, each of its segments as a row that starts from its parent's last
    state. So parents are in earlier waves, and the segments of a wave:

    - have equally many ancestors
    - have similar lengths, for little padding: at least the share SHORTEST of the longest
    - either all have children, for which the call returns the last states, or none has

    The packed row may be one of several chunks. Then `earlier_parents` are the segments of earlier
    chunks from whose states some segments start: their states come first in the list that
    `Wave.parents` indexes. The segments `needed_later`, by later chunks, count as having children.
    """
    # None is among them, as the parent of segments that start a sequence: it does not matter.
    with_children = {*needed_later, *(segment.parent for segment in segments)}
    levels: dict[int, list[Segment]] = defaultdict(list)
    for segment in segments:
        levels[len(segment.prefix)].append(segment)
    runs: list[list[Segment]] = []
    for _, level in sorted(levels.items()):
        runs.append([])
        # Segments with children first: only their calls have to return a state.
        for segment in sorted(level, key=lambda s: (s not in with_children, -s.length)):
            run = runs[-1]
            if run:
                longest = run[0].length
                same_use = (run[0] in with_children) == (segment in with_children)
                fits = max_tokens is None or (len(run) + 1) * longest <= max_tokens
                is_similar = segment.length >= SHORTEST * longest
                if not (same_use and fits and is_similar):
                    runs.append([])
            runs[-1].append(segment)
    waves: list[Wave] = []
    # Index among the last states of the earlier parents and all waves so far.
    state_index: dict[Segment | None, int] = {
        segment: index for index, segment in enumerate(earlier_parents)
    }
    for run in runs:
        keeps = run[0] in with_children
        waves.append(
            Wave(
                segments=tuple(run),
                length=run[0].length,
                rows=pad_rows([segment.length for segment in run], device),
                parents=tuple(state_index[segment.parent] for segment in run if segment.parent),
                keeps=keeps,
            )
        )
        if keeps:  # behind all states so far: `len` is that of before the update
            state_index |= {segment: len(state_index) + row for row, segment in enumerate(run)}
    return tuple(waves)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halo:
    """Columns of an extended row, in which each segment follows the last tokens of its prefix.

    A convolution of K taps needs the K-1 tokens before a segment's own. Several segments may have
    the same prefix, so the row has a copy of its last tokens before each. `make_halo` makes it.

    Example with 3 taps: T = 4 tokens, 0 1 and a segment 2 3 after them, are U = 8 columns
    ``. . 0 1 | 0 1 2 3``, where ``.`` is blank. `column_T` is 2 3 6 7, `blank_columns` 0 1,
    `copy_columns` 4 5, `copied_tokens` 0 1, and `copies_of_tokens` [[0], [1]].
    """

    token_U: Tensor
    """Packed position of every column's token; any where the column is blank."""
    column_T: Tensor
    """Each token's own column."""
    blank_columns: Tensor
    """Columns of zeros, before segments with a shorter prefix."""
    copy_columns: Tensor
    """[copies] Columns with a copy of a token before the segment."""
    extra_columns: Tensor
    """Columns that are blank or copies, whose outputs are dropped."""
    copied_tokens: Tensor
    """[tokens] Packed positions of the tokens that are copied, each once."""
    copies_of_tokens: Tensor
    """[tokens, most copies of one] Indices in `copy_columns` of the copies of each of these tokens,
    whose gradients the backward pass adds to the token's. Shorter rows are filled up with the
    length of `copy_columns`, the index of a row of zeros there."""


def make_halo(segments: Sequence[Segment], taps: int, device: torch.device) -> Halo:
    """Return the extended row of segments for a convolution of that many taps.

    Each segment gets taps - 1 columns before its own: copies of the last tokens of its prefix, and
    blank ones where there are fewer. U columns in all.

    Example: with 3 taps, tokens 0 1 and a segment 2 3 after them become the columns
    ``. . 0 1 | 0 1 2 3``, where ``.`` is blank. Columns 4 and 5 are copies, of tokens 0 and 1.
    """
    tokens: list[int] = []  # the token of each column
    blank_columns: list[int] = []
    own_columns: list[int] = []
    copy_columns: list[int] = []
    copies: dict[int, list[int]] = defaultdict(list)  # token -> indices in `copy_columns`
    for segment in segments:
        before: list[int] = []  # the tokens before the segment, as many as a tap reaches
        part = segment.parent
        # Go back through the prefix until there are taps - 1 tokens.
        while part is not None and (missing := taps - 1 - len(before)):
            before = [*range(max(part.start, part.end - missing), part.end), *before]
            part = part.parent
        missing = taps - 1 - len(before)  # not even the whole prefix has so many: blank columns
        blank_columns += range(len(tokens), len(tokens) + missing)
        tokens += [0] * missing
        for token in before:
            copies[token].append(len(copy_columns))
            copy_columns.append(len(tokens))
            tokens.append(token)
        own_columns += range(len(tokens), len(tokens) + segment.length)
        tokens += range(segment.start, segment.end)
    # By this table the backward pass adds the gradients of a token's copies. Rows of one length,
    # filled up with the index behind the last of `copy_columns`, where it puts zeros.
    most_copies = max(map(len, copies.values()), default=0)
    table = [
        [*indices, *[len(copy_columns)] * (most_copies - len(indices))]
        for indices in copies.values()
    ]

    def on_device(values: Sequence[Any]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.long), device)

    return Halo(
        token_U=on_device(tokens),
        column_T=on_device(own_columns),
        blank_columns=on_device(blank_columns),
        copy_columns=on_device(copy_columns),
        extra_columns=on_device([*blank_columns, *copy_columns]),
        copied_tokens=on_device(list(copies)),
        copies_of_tokens=on_device(table).reshape(len(copies), most_copies),
    )


class _Extend(torch.autograd.Function):
    """Lay out tokens [T, C] as the U columns of an extended row, [U, C]. C channels.

    The extended row has copies of the last tokens of its prefix before each segment, so that a
    convolution finds them there. `Halo` says which column is what, with an example.

    The gradient of a token is that of its own column, plus a sum over its copies in a fixed order.
    """

    @staticmethod
    def forward(ctx: Any, rows_TC: Tensor, halo: Halo) -> Tensor:
        """Return the columns: each token, copies of tokens before its segment, and zeros."""
        ctx.halo = halo
        return rows_TC.index_select(0, halo.token_U).index_fill_(0, halo.blank_columns, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_UC: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the T tokens, [T, C], from that of the U columns, [U, C].

        A token's gradient is that of its own column (`column_T`), plus those of its copies, which
        stand before the segments that follow it. The i-th of `copied_tokens` has the copies that
        row i of `copies_of_tokens` selects among `copy_columns`.
        """
        halo: Halo = ctx.halo
        rows_TC = gradient_UC.index_select(0, halo.column_T)
        if halo.copy_columns.numel():
            # A row of zeros at the end, for the indices that fill up `halo.copies_of_tokens`.
            copy_gradients = pad(gradient_UC.index_select(0, halo.copy_columns), (0, 0, 0, 1))
            by_token = copy_gradients.index_select(0, halo.copies_of_tokens.flatten()).unflatten(
                0, halo.copies_of_tokens.shape
            )
            # No position occurs twice, so that the order of additions is fixed.
            rows_TC.index_add_(0, halo.copied_tokens, by_token.sum(1))
        return rows_TC, None


MixerCall = Convolution | Scan
_calls: dict[str, MixerCall] | None = None
"""First call of each function in the block of `recorded_calls`. None outside one."""


def _record_first(call: MixerCall) -> None:
    """Keep a function's first call inside `recorded_calls`."""
    if _calls is not None:
        _calls.setdefault(reference(call.function).__name__, call.detached())


@contextmanager
def recorded_calls() -> Iterator[dict[str, MixerCall]]:
    """Record the first call of each mixer's function in the block, by its name."""
    global _calls
    outer, _calls = _calls, {}  # `_record_first` writes into `_calls`
    try:
        yield _calls
    finally:
        _calls = outer


@torch.enable_grad()
def kernel_gap(call: MixerCall) -> float | None:
    """Return how much a kernel's output and gradients differ from transformers' own code.

    This is the largest relative difference (`relative_gap`), or None if the call is no package's
    kernel but transformers' own code.
    """
    if not is_kernel(call.function):
        return None
    results = []
    for function in (call.function, reference(call.function)):
        tensors, output = call.detached().run(function)
        weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
        gradients = torch.autograd.grad((output * weights).sum(), tensors)
        results.append((output.detach(), *gradients))
    return max(relative_gap(*pair) for pair in zip(*results, strict=True))


def relative_gap(tensor: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of `expected`, or 0 if both are zero."""
    difference, size = (tensor.float() - expected.float()).norm(), expected.float().norm()
    return (difference / size).item() if difference else 0.0
