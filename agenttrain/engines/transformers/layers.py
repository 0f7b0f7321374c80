"""Layers of a row cache: keys and values of attention, and states of recurrent mixers.

Every tensor has a part for each row. Keys and values of full attention grow with the longest row.
Those of a sliding window grow up to the window, and are a ring from then on: the token at position
p is at slot p % window. States have one size: the last inputs of a convolution, and the recurrent
state, in float32 whatever the model's number format. A row without tokens has states of zeros.

R rows, C capacity (slots of a row), N rows of a forward pass, T its tokens (padded on the left), L
the longest row's tokens after it, W window, K key/value heads, D head dimension, M channels of a
convolution, Q its taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import (
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from agenttrain.engines.mixers import Convolution, Scan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """Things that a layer keeps of a sequence in the cache: keys and values, states, or neither.

    A layer keeps nothing if it is an MLP alone, or reads the keys of another layer.
    """

    keys: bool = False
    window: int | None = None
    """A query reads the keys of the last `window` tokens, its own included. None: of all tokens."""
    state_count: int = 0
    """Number of states that its recurrent mixer keeps: each is the last inputs of a convolution
    with, in most mixers, a recurrent state. 0: no mixer."""


def layer_kinds(config: Any) -> tuple[list[LayerKind], list[str]]:
    """Return what each layer of a text model keeps, and the types of layers that are not known.

    If a type is not known, the first list is empty. `KINDS` says which types keep keys or states
    and have a window. The length of the window and the number of states are the config's.
    """
    names, settings = get_layer_types_and_kwargs(config)
    if isinstance(settings, dict):  # of all layers, in transformers 5.16
        settings = [settings] * len(names)
    if unknown := sorted(set(names) - KINDS.keys()):
        return [], unknown
    kinds = [
        LayerKind(
            keys=KINDS[name].keys,
            window=layer["sliding_window"] if KINDS[name].window else None,
            state_count=layer.get("number_of_states", 1) if KINDS[name].state_count else 0,
        )
        for name, layer in zip(names, settings, strict=True)
    ]
    return kinds, []


KINDS = {
    "full_attention": LayerKind(keys=True),
    "sliding_attention": LayerKind(keys=True, window=1),
    "linear_attention": LayerKind(state_count=1),
    "conv": LayerKind(state_count=1),
    "hybrid": LayerKind(keys=True, state_count=1),
    "hybrid_sliding": LayerKind(keys=True, window=1, state_count=1),
    **dict.fromkeys(("dummy", "moe", "mlp"), LayerKind()),
}
"""By `layer_types` of a config. `window=1` and `state_count=1` only mark the types that have them:
their values are read from the config."""


@dataclass(slots=True)
class Pass:
    """Rows and tokens of the next forward pass, which `begin` sets and the cache's layers read.

    It is the `MixerLayout` of the recurrent mixers too: `convolve` and `scan` compute along the
    rows of the pass. Tensors that all layers need are computed once per pass.

    R allocated rows, N rows of the pass, T tokens of each (padded on the left), L tokens of the
    longest row after the pass, M channels of a convolution, Q its taps.
    """

    rows: int = 0
    """Allocated rows, R."""
    capacity: int = 0
    """Allocated slots of a row in full attention."""
    first: int = 0
    """First row of the pass."""
    count: int = 0
    """Rows of the pass, N: first … first + N - 1."""
    width: int = 0
    """Tokens of each row, padding included, T."""
    length: int = 0
    """Tokens of the longest row after the pass, L."""
    starts: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """[N] Tokens of each row before the pass."""
    padding_NT: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=bool))
    """True where a row has padding in place of a token."""
    position_NT: np.ndarray = field(default_factory=lambda: np.empty((0, 0), dtype=np.int64))
    """Position of each token in its sequence; any number at padding."""
    device: torch.device | None = None
    _on_device: dict[object, Tensor] = field(default_factory=dict)
    """Tensors that several layers use, each computed at its first use in the pass."""

    def begin(
        self, first: int, starts: Sequence[int], lengths: np.ndarray, device: torch.device
    ) -> None:
        """Set the rows of the next pass, from row `first` on.

        A row has `starts` tokens in the cache and gets `lengths` new ones. Rows with fewer new
        tokens than the longest are padded on the left. Example: starts (2, 3) and lengths (1, 2)
        give two columns; the first row has padding, then position 2, the second positions 3 and 4.
        """
        self._on_device.clear()
        self.first, self.count, self.width = first, len(starts), int(lengths.max())
        self.starts, self.device = np.array(starts), device
        self.length = int((self.starts + lengths).max())
        pad_N1 = (self.width - lengths)[:, None]
        self.position_NT = self.starts[:, None] + np.arange(self.width) - pad_N1
        self.padding_NT = np.arange(self.width) < pad_N1

    @property
    def is_padded(self) -> bool:
        """True if some row gets fewer tokens than another one."""
        return bool(self.padding_NT.any())

    @property
    def fresh_rows(self) -> list[int]:
        """Rows that have no tokens yet."""
        return [self.first + int(row) for row in np.flatnonzero(self.starts == 0)]

    def slots(self, capacity: int, window: int | None) -> Tensor:
        """Return the slots [N * T] to which the pass writes its new keys.

        The cache has R rows of C = `capacity` slots. A token's slot is row * C + position; with a
        window, position modulo the window. Slot R * C lies behind the rows and is never read. It is
        for padding, and for tokens that a window has left by the end of the pass: with window 4 and
        new tokens at positions 0 to 5, those at 0 and 1, whose slots the last two get.
        """
        key = ("slots", capacity, window)
        if key not in self._on_device:
            is_kept = ~self.padding_NT
            position = self.position_NT
            if window is not None:
                last_N1 = position[:, -1:]  # padding is on the left
                is_kept = is_kept & (position > last_N1 - window)
                position = position % window
            row_N1 = np.arange(self.first, self.first + self.count)[:, None]
            slots_NT = np.where(is_kept, row_N1 * capacity + position, self.rows * capacity)
            self._on_device[key] = self.tensor(slots_NT.reshape(-1))
        return self._on_device[key]

    def behind_padding(self, taps: int) -> Tensor | None:
        """Return the indices [N, 1, Q + T] that move a convolution's states behind the padding.

        A state holds the inputs of the last Q = `taps` tokens before the pass. It has to stand next
        to the row's first new token. The indices select from a row's columns
        ``[state | padding | tokens]``; -1 stands for a zero. Example: with Q = 2, state s t, one
        column of padding and one token a, the columns ``s t . a`` become ``0 s t a``: indices
        -1 0 1 3. None: no row is padded.
        """
        key = ("behind padding", taps)
        if key not in self._on_device:
            if not self.is_padded:
                return None
            pad_N1 = self.padding_NT.sum(1, keepdims=True)
            column = np.arange(taps + self.width)
            is_token = column >= taps + pad_N1
            # Tokens stay. What is before them comes from as many columns earlier as there is
            # padding: first from negative ones, which stand for zeros, then from the state.
            source = np.where(is_token, column, column - pad_N1)
            self._on_device[key] = self.tensor(np.maximum(source, -1))[:, None]
        return self._on_device[key]

    def convolve(self, convolution: Convolution) -> Tensor:
        """Return the convolved inputs, [N, M, Q + T].

        They need no rearranging: `StateLayer.update_conv_state` has joined each row's state and its
        new tokens, and moved the padding in front of both.
        """
        return convolution(convolution.states)

    def scan(self, scan: Scan) -> tuple[Tensor, Tensor | None]:
        """Run a mixer's recurrence over the rows, with inputs of zero at padding.

        Such inputs leave a state as it is. Return the outputs [N, T, …] and, if the mixer wants
        them (`scan.keeps`), the states after the last tokens.
        """
        if "padding" not in self._on_device:
            self._on_device["padding"] = self.tensor(self.padding_NT)
        padding_NT = self._on_device["padding"]
        inputs = []
        for tensor in scan.inputs:  # [N, T, …]
            further_dimensions = [1] * (tensor.ndim - 2)
            inputs.append(
                tensor.masked_fill(padding_NT.view(*padding_NT.shape, *further_dimensions), 0)
            )
        # The mixer's own call, with these inputs in place of its own.
        return scan(inputs, scan.state, scan.keeps)

    def tensor(self, values: np.ndarray) -> Tensor:
        """Return an array on the device of the pass."""
        return torch.from_numpy(values).to(self.device)


class KeyLayer(CacheLayerMixin):
    """Keys and values of one layer, [R*C + 1, K, D] each. Padding writes to the last slot.

    R rows of C slots, K heads of D numbers. A pass feeds T new tokens to each of N rows, and the
    longest has L tokens after it. The model's attention calls `update` with the new keys of a pass,
    and reads what it returns. `RowCache` calls the other methods between passes.

    With a window of W tokens a row has at most W slots. The token at position p has slot p % W, so
    that new keys overwrite the oldest ones: the row is a ring once it is longer than W. Attention
    may read slots in any order, because keys carry their positions, and `ring_mask` hides slots
    that are outside of a query's window.

    Allocated as zeros: a masked slot gets weight 0, and 0 times NaN would still be NaN.
    """

    def __init__(self, next_pass: Pass, window: int | None = None) -> None:
        super().__init__()
        self.next_pass = next_pass
        self.window = window

    @property
    def is_sliding(self) -> bool:
        """True if the layer has a window."""
        return self.window is not None

    def _capacity(self, capacity: int) -> int:
        """Return the slots of a row of this layer, if rows of full attention have `capacity`."""
        return capacity if self.window is None else min(capacity, self.window)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for states shaped [N, K, T, D]."""
        size = self.next_pass.rows * self._capacity(self.next_pass.capacity) + 1
        self.keys, self.values = (
            states.new_zeros(size, states.shape[1], states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [N, K, T, D]; return those that the queries read.

        Without a window, or while no row is longer than it: [N, K, L, D], in the order of
        positions. Afterwards the W slots of the window, [N, K, W, D]. But several new tokens would
        overwrite keys that the first queries still read. Then the old slots are returned, followed
        by the new ones: [N, K, W + T, D].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._write(self.keys, key_states), self._write(self.values, value_states)

    def _write(self, buffer: Tensor, states: Tensor) -> Tensor:
        """Write new keys or values [N, K, T, D] to their slots; return what the queries read.

        The buffer has a slot for each token, [R*C + 1, K, D], so the heads K change places with the
        tokens. Slots of a ring are returned in their order: `ring_mask` knows their positions.
        """
        next_pass, window = self.next_pass, self.window
        rows_NCKD = self._rows(buffer)[next_pass.first : next_pass.first + next_pass.count]
        capacity = rows_NCKD.shape[1]
        old_and_new = None
        # Joined before the write, which overwrites keys that the first queries still read.
        if is_ring(window, next_pass) and next_pass.width > 1:
            old_and_new = torch.cat([rows_NCKD.transpose(1, 2), states], 2)
        new_slots = states.transpose(1, 2).reshape(-1, *buffer.shape[1:])  # [N * T, K, D]
        buffer.index_copy_(0, next_pass.slots(capacity, window), new_slots)
        if old_and_new is not None:
            return old_and_new
        return rows_NCKD[:, : next_pass.length].transpose(1, 2)

    def _rows(self, buffer: Tensor) -> Tensor:
        """Return the buffer as [R, C, K, D], without the last slot, which is for padding."""
        capacity = self._capacity(self.next_pass.capacity)
        return buffer[:-1].view(self.next_pass.rows, capacity, *buffer.shape[1:])

    def by_row(self, length: int) -> list[Tensor]:
        """Return what rows of up to `length` tokens hold, with rows as the first dimension."""
        if not self.is_initialized:
            return []
        return [self._rows(buffer)[:, :length] for buffer in (self.keys, self.values)]

    def resize(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` tokens, neither less than before. Content stays.

        A window bounds the slots of a row.
        """
        if not self.is_initialized:
            return
        capacity = self._capacity(capacity)
        for name in ("keys", "values"):
            old_rows = self._rows(getattr(self, name))
            old_row_count, old_capacity, *shape_of_slot = old_rows.shape
            buffer = old_rows.new_zeros(rows * capacity + 1, *shape_of_slot)  # + 1 for padding
            new_rows = buffer[:-1].view(rows, capacity, *shape_of_slot)
            new_rows[:old_row_count, :old_capacity] = old_rows
            setattr(self, name, buffer)

    def clear(self, rows: Sequence[int]) -> None:
        """Do nothing: keys are read up to a row's length, and a row without tokens has none."""

    def wipe(self) -> None:
        """Zero everything, after numbers that are not finite were written."""
        if self.is_initialized:
            self.keys.zero_()
            self.values.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length L and offset 0."""
        return self.next_pass.length, 0

    def get_seq_length(self) -> int:
        """Return L."""
        return self.next_pass.length

    def get_max_length(self) -> int:
        """Return -1: no limit, the cache grows."""
        return -1


def is_ring(window: int | None, next_pass: Pass) -> bool:
    """Return True if slots of a window are not in the order of positions in this pass."""
    return window is not None and next_pass.length > window


class StateLayer(LinearAttentionCacheLayerMixin):
    """Convolution states [R, M, Q] and recurrent states [R, …] of one layer.

    R rows, M channels, Q taps: a convolution needs the last Q inputs of each channel. `next_pass`
    says which N of the rows a forward pass is about, and how their T tokens are padded. Mixers read
    and write those rows: methods that give states return views of them.
    """

    record_past = False  # for transformers: no states of earlier tokens are kept

    def __init__(self, next_pass: Pass, states: int) -> None:
        """The layer has `states` states of each kind, which mixers name by `state_idx`."""
        self.next_pass = next_pass
        self._convolutions: list[Tensor | None] = [None] * states
        self._recurrences: list[Tensor | None] = [None] * states

    @property
    def conv_states(self) -> list[Tensor | None]:
        """Inputs of each convolution's last taps, [N, M, Q]."""
        return [self._rows_of_pass(tensor) for tensor in self._convolutions]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        """Recurrent states, [N, …]."""
        return [self._rows_of_pass(tensor) for tensor in self._recurrences]

    @property
    def has_previous_state(self) -> dict[int, bool]:
        """True for states that are allocated: a row without tokens continues from zeros."""
        return {
            index: pair != (None, None)
            for index, pair in enumerate(zip(self._convolutions, self._recurrences, strict=True))
        }

    def _rows_of_pass(self, tensor: Tensor | None) -> Tensor | None:
        first = self.next_pass.first
        return None if tensor is None else tensor[first : first + self.next_pass.count]

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: states are allocated by the first update."""

    def update_conv_state(
        self, conv_states: Tensor, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: object
    ) -> Tensor:
        """Return each row's stored inputs of a convolution and its new ones, [N, M, Q + T].

        `conv_states` are the new inputs, [N, M, T], padded on the left. The last Q of the result
        are stored for the next pass. Example with Q = 2: a row has stored s t, and its new inputs
        are one column of padding and a. The result is 0 s t a: the convolution sees t before a.
        """
        if self._convolutions[state_idx] is None:
            shape = self.next_pass.rows, conv_states.shape[1], conv_kernel_size
            self._convolutions[state_idx] = conv_states.new_zeros(shape)
        last_inputs = self.conv_states[state_idx]
        assert last_inputs is not None
        taps = last_inputs.shape[2]
        extended = torch.cat([last_inputs, conv_states], -1)
        # A padded row is [state | padding | tokens]. Make it [zeros | state | tokens].
        source_columns = self.next_pass.behind_padding(taps)  # -1 where a zero comes
        if source_columns is not None:
            extended = extended.gather(2, source_columns.clamp(min=0).expand_as(extended))
            extended = extended.masked_fill(source_columns < 0, 0)
        last_inputs.copy_(extended[:, :, -taps:])
        return extended

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Store the states of the pass's N rows after it, [N, …]: called by the model's mixer.

        The first call allocates those of all R rows of the cache. Other keywords are not needed.
        """
        if self._recurrences[state_idx] is None:
            shape = self.next_pass.rows, *recurrent_states.shape[1:]
            self._recurrences[state_idx] = recurrent_states.new_zeros(shape, dtype=torch.float32)
        stored = self.recurrent_states[state_idx]  # a view of the pass's rows
        assert stored is not None
        return stored.copy_(recurrent_states)

    def by_row(self, length: int) -> list[Tensor]:
        """Return all states, with rows as the first dimension. Their size has no `length`."""
        return self._states()

    def _states(self) -> list[Tensor]:
        """Return the states that are allocated."""
        return [t for t in (*self._convolutions, *self._recurrences) if t is not None]

    def resize(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows. What is held stays."""
        for tensors in (self._convolutions, self._recurrences):
            for index, old in enumerate(tensors):
                if old is not None and len(old) < rows:
                    new = old.new_zeros(rows, *old.shape[1:])
                    new[: len(old)] = old
                    tensors[index] = new

    def clear(self, rows: Sequence[int]) -> None:
        """Zero the states of rows."""
        for tensor in self._states():
            tensor[rows] = 0

    def wipe(self) -> None:
        """Zero everything, after numbers that are not finite were written."""
        for tensor in self._states():
            tensor.zero_()


class HybridLayer(StateLayer, KeyLayer):
    """States and keys of a layer that has a recurrent mixer beside attention.

    `next_pass` says which rows of the cache a forward pass is about. `window` is that of attention.
    """

    def __init__(self, next_pass: Pass, window: int | None, states: int) -> None:
        KeyLayer.__init__(self, next_pass, window)
        StateLayer.__init__(self, next_pass, states)

    def lazy_initialization(self, *args: Any, **kwargs: object) -> None:
        """Allocate keys and values. States are allocated when the mixer first updates them."""
        KeyLayer.lazy_initialization(self, *args)

    def by_row(self, length: int) -> list[Tensor]:
        """Return what rows of up to `length` tokens hold, with rows as the first dimension."""
        return KeyLayer.by_row(self, length) + StateLayer.by_row(self, length)

    def resize(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` tokens. What is held stays."""
        KeyLayer.resize(self, rows, capacity)
        StateLayer.resize(self, rows, capacity)

    def wipe(self) -> None:
        """Zero everything, after numbers that are not finite were written."""
        KeyLayer.wipe(self)
        StateLayer.wipe(self)


class EmptyLayer(KeyLayer):
    """A layer that keeps nothing of a sequence."""

    def update(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        """Raise TypeError: nothing may be written."""
        raise TypeError("a layer without keys of its own was given keys")


Layer = KeyLayer | StateLayer


def make_layer(kind: LayerKind, next_pass: Pass) -> Layer:
    """Return a layer of a kind, still without memory."""
    if kind.keys and kind.state_count:
        return HybridLayer(next_pass, kind.window, kind.state_count)
    if kind.state_count:
        return StateLayer(next_pass, kind.state_count)
    return KeyLayer(next_pass, kind.window) if kind.keys else EmptyLayer(next_pass)
