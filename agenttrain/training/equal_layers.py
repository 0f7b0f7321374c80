"""Trace a model of many equal layers by running two layers of each kind.

A hybrid model of 48 layers has two kinds, and a trace of its recurrent layers runs a Python loop
over the tokens of a chunk: a trace of two layers of each kind gives the same sizes in a twelfth of
the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

RUNS = 2
"""Layers of a kind that run. The first may differ: the tensors that all layers share, like the
rotary embeddings, are saved by the layer that uses them first."""
POSITION = "layer_idx"
"""The attribute of a layer's modules that tells equal layers apart."""


@dataclass(slots=True)
class EqualLayers:
    """Layers that were skipped, and the bytes that they would have saved for the backward pass."""

    twins: dict[int, int] = field(default_factory=dict)
    """Position of a skipped layer -> position of the equal layer that ran, its twin. A caller that
    records something for each layer copies it from the twin."""
    saved_bytes: Counter[Hashable] = field(default_factory=Counter)
    """By the names that `equal_layers_run_twice` was given."""


@dataclass(slots=True)
class _Kind:
    """State of one kind of equal layers. The first `RUNS` of them run, the others are skipped.

    Equal layers save as many bytes for the backward pass. A trace that measures these bytes is
    faster if it counts a skipped layer as the last of its kind that ran.
    """

    position: int = -1
    """Position of the last one that ran."""
    runs: int = 0
    saved_bytes: Counter[Hashable] = field(default_factory=Counter)
    """Bytes that the last run saved, by names that the caller chooses, such as levels."""
    keeps_shape: bool = False
    """Its output is one tensor, of the shape and format of its input. Only then can a skipped layer
    return a copy of its input instead."""


@contextmanager
def equal_layers_run_twice(
    layers: Sequence[nn.Module],
    saved_bytes: Callable[[], Mapping[Any, int]] = dict,
) -> Iterator[EqualLayers]:
    """Run two layers of each kind of equal layers in the block, and skip the others of the kind.

    For traces that measure sizes: equal layers save as many bytes, so that running all of them
    would only take time. A skipped layer returns a copy of its input. It counts for as many bytes
    as the second layer of its kind: the first one may also save tensors that all layers share, like
    rotary embeddings.

    `saved_bytes` returns the bytes that autograd holds so far, by names that the caller chooses,
    e.g. ``{"none": 4096, "layers": 512}``; the default, `dict`, returns none. The yielded
    `EqualLayers` has, by the same names, the bytes of the skipped layers alone, and `twins`, which
    maps a skipped layer to an equal one that ran.
    """
    skipped, kinds = EqualLayers(), dict[Hashable, _Kind]()

    def total_bytes() -> Counter[Hashable]:
        """Return the bytes so far, with those that skipped layers would have saved."""
        return Counter(saved_bytes()) + skipped.saved_bytes

    def forward_of(layer: nn.Module, position: int) -> Callable[..., Any]:
        """Return a forward pass that runs the layer, or skips it after `RUNS` equal ones.

        Layers of one `_signature` are equal, and share a `_Kind`. It counts those that ran, and
        has the position of the last of them and the bytes that it saved for the backward pass. A
        skipped layer is counted as this one, its twin, in the result `skipped`.
        """
        kind = kinds.setdefault(_signature(layer), _Kind())
        forward = layer.forward

        def run_or_skip(*args: Any, **kwargs: Any) -> Any:
            """Stand in for the layer's `forward`: run it, or return a copy of its input.

            A layer that runs measures the bytes that autograd saves meanwhile. One that is skipped
            adds those of its kind's last run to `skipped`, with that layer's position as its twin.
            """
            hidden = args[0] if args else kwargs.get("hidden_states")
            # Skip only where a copy of the input can stand in for the output.
            if kind.runs >= RUNS and kind.keeps_shape and isinstance(hidden, Tensor):
                skipped.twins[position] = kind.position
                skipped.saved_bytes += kind.saved_bytes
                # A copy: returned itself, the input would be one tensor that two layers save, and
                # that counts once.
                return hidden.clone()
            before = total_bytes()
            output = forward(*args, **kwargs)
            kind.runs, kind.position = kind.runs + 1, position
            kind.saved_bytes = total_bytes() - before  # by this layer; of the last run in the end
            kind.keeps_shape = _have_same_form(hidden, output)
            return output

        return run_or_skip

    for position, layer in enumerate(layers):
        layer.forward = forward_of(layer, position)
    try:
        yield skipped
    finally:
        for layer in layers:
            del layer.forward  # the instance's, so that the method of the class is called again


def _have_same_form(hidden: Any, output: Any) -> bool:
    """Return True for two tensors of one shape and format."""
    if not isinstance(hidden, Tensor) or not isinstance(output, Tensor):
        return False
    return (hidden.shape, hidden.dtype) == (output.shape, output.dtype)


def _signature(layer: nn.Module) -> Hashable:
    """Return a value that is equal for layers of equal modules, settings and weights."""
    modules = [(name, type(m), _settings(m)) for name, m in layer.named_modules()]
    named = (*layer.named_parameters(), *layer.named_buffers())
    tensors = [(name, t.shape, t.dtype, t.requires_grad) for name, t in named]
    return (*modules, *tensors)


def _settings(module: nn.Module) -> Hashable:
    """Return the numbers and texts among a module's attributes, its position excepted."""
    plain = (int, float, str, bool, type(None))
    values = [(k, v) for k, v in vars(module).items() if isinstance(v, plain) and k != POSITION]
    return tuple(sorted(values, key=lambda pair: pair[0]))
