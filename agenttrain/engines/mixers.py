"""Recurrent token mixers of a model in this process, with a layout that the caller gives.

Gated delta rule, Kimi delta attention, Mamba2 and the short convolution carry something along the
sequence. In transformers each of them calls a convolution and a scan, functions of its modeling
module, and hands on keywords that it does not know. `layout_keywords` replaces those functions
once, by the names in `ADAPTERS`. A call with the keyword `recurrent` is then computed by that
layout; a call without it is the original one, so that a trainer and an engine share the classes.

Bodies of mixers are not copied: a copy breaks whenever transformers changes its cache.

Shapes: B sequences of L tokens, C channels, K taps of a convolution.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from transformers import PreTrainedModel

Function = Callable[..., Any]

IN_FLOAT32 = ("A_log", "D", "dt_bias")
"""Last names of recurrent layers' weights that are float32 in a model of any number format: decay
rates, skips and step sizes. In bfloat16 a decay would differ by up to 0.8 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """One call of a mixer's scan, the recurrence over tokens, as a function of its tensors.

    B sequences of L tokens.
    """

    function: Function
    """As the modeling module has it: a package's kernel, or transformers' own torch code."""
    apply: Callable[..., tuple[Tensor, Tensor | None]]
    """Maps (function, inputs, weights, state, keeps) to the output and, if `keeps`, the state after
    the last token."""
    inputs: tuple[Tensor, ...]
    """[B, L, …] each. A token whose inputs are all zero leaves the state exactly as it is."""
    weights: tuple[Tensor, ...] = ()
    state: Tensor | None = None
    """State before the first token, in float32. None: zeros."""
    keeps: bool = False
    """True if the state after the last token is wanted."""

    def __call__(
        self, inputs: Sequence[Tensor], state: Tensor | None, keeps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Scan other inputs with the same weights."""
        return self.apply(self.function, inputs, self.weights, state, keeps)

    def detached(self) -> Scan:
        """Return the call with copies of its tensors, which require a gradient.

        The trainer repeats a recorded call so, to compare a kernel with transformers' own code.
        """
        return replace(
            self,
            inputs=tuple(map(_detached, self.inputs)),
            weights=tuple(map(_detached, self.weights)),
        )

    def run(self, function: Function) -> tuple[tuple[Tensor, ...], Tensor]:
        """Call another function with the same tensors; return them and the output.

        The trainer compares the outputs of two functions, and the gradients of the tensors.
        """
        output, _ = self.apply(function, self.inputs, self.weights, self.state, keeps=False)
        return (*self.inputs, *self.weights), output


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One call of a mixer's causal convolution, as a function of its tensors.

    B sequences of L tokens, C channels, K taps.
    """

    function: Function
    """As the modeling module has it: a package's kernel, or transformers' own torch code."""
    states: Tensor
    """Inputs of the convolution, [B, C, L]."""
    weight: Tensor
    """[C, K]."""
    bias: Tensor | None
    activation: str | None

    def __call__(self, states: Tensor) -> Tensor:
        """Convolve other states with the same weights."""
        output: Tensor = self.function(states, self.weight, self.bias, activation=self.activation)
        return output

    def detached(self) -> Convolution:
        """Return the call with copies of its tensors, which require a gradient."""
        return replace(
            self,
            states=_detached(self.states),
            weight=_detached(self.weight),
            bias=None if self.bias is None else _detached(self.bias),
        )

    def run(self, function: Function) -> tuple[tuple[Tensor, ...], Tensor]:
        """Call another function with the same tensors; return them and the output."""
        output = function(self.states, self.weight, self.bias, activation=self.activation)
        tensors = (self.states, self.weight, self.bias)
        return tuple(tensor for tensor in tensors if tensor is not None), output


def _detached(tensor: Tensor) -> Tensor:
    """Return a copy that requires a gradient of its own."""
    return tensor.detach().clone().requires_grad_()


@runtime_checkable
class MixerLayout(Protocol):
    """Computes the convolutions and scans of recurrent mixers along the sequences of a pass.

    A mixer, such as Mamba2 or the gated delta rule, takes each row of its inputs for one sequence.
    The methods get the mixer's call with its inputs, and make it on rearranged ones. Example: the
    engine's rows are padded on the left, so its layout scans zeros in place of padding. The trainer
    packs several sequences into a row, so its layout scans them one by one.

    B rows of L tokens, C channels.
    """

    def convolve(self, convolution: Convolution) -> Tensor:
        """Return the convolution of its inputs, [B, C, L]."""

    def scan(self, scan: Scan) -> tuple[Tensor, Tensor | None]:
        """Return the output [B, L, …] and, if `scan.keeps`, the states after the last tokens."""


def reference(function: Function) -> Function:
    """Return transformers' torch code of a function that may be a package's kernel."""
    return inspect.unwrap(function)


def is_kernel(function: Function) -> bool:
    """Return True if transformers found a package with a kernel for this function.

    transformers looked for it when it imported the modeling module, and keeps the answer in a
    variable of the function that wraps both (hub_kernels.py)::

        is_new_implementation = implementation is not torch_function

        def wrapped(*args, **kwargs): ...

    A function without that variable in its closure counts as torch code.
    """
    code: Any = getattr(function, "__code__", None)
    closure: Any = getattr(function, "__closure__", None)
    cells = dict(zip(code.co_freevars, closure, strict=True)) if closure else {}
    cell = cells.get("is_new_implementation")
    return cell is not None and bool(cell.cell_contents)


def _convolve(
    function: Function,
    layout: MixerLayout,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Compute `causal_conv1d_fn` by the layout, which decides along which sequences it goes.

    Other keywords of the mixer are not needed.
    """
    return layout.convolve(
        Convolution(
            function=function,
            states=hidden_states,
            weight=weight,
            bias=bias,
            activation=activation,
        )
    )


def _scan_delta_rule(
    function: Function,
    layout: MixerLayout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **keywords: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute `torch_chunk_gated_delta_rule` or `chunk_kimi_delta_attention` by the layout.

    The mixer takes each row of its tensors for one sequence. The caller of the model feeds it other
    rows: padded ones, or rows of several packed sequences. So its `layout` gets the call as a
    `Scan`, rearranges the inputs, and calls `apply` on them, as often as it needs.
    """

    def apply(
        scan_function: Function,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Tensor | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Scan.apply`: return the output and, if `keeps`, the last state.

        `scan_function` is `function`, or another one that the trainer compares with it. `weights`
        is empty: all tensors of the rule have values for each token, and are inputs.
        """
        assert not weights
        query, key, value, g, beta = inputs
        output: tuple[Tensor, Tensor | None] = scan_function(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=state,
            output_final_state=keeps,
            **keywords,  # the mixer's other keywords, as they are
        )
        return output

    return layout.scan(
        Scan(
            function=function,
            apply=apply,
            inputs=(query, key, value, g, beta),
            state=initial_state,
            keeps=output_final_state,
        )
    )


def _scan_mamba2(
    function: Function,
    layout: MixerLayout,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    seq_idx: None = None,
    **keywords: Any,
) -> Any:
    """Compute `mamba2_chunk_scan` by the layout, which decides along which sequences it goes.

    The layout gets the call as a `Scan`: it rearranges the `inputs`, which have a value for each
    token, and calls `apply` with them and the same `weights`. `seq_idx`, transformers' own layout,
    is not used beside ours.

    A layout pads step sizes `dt` with zeros, which leave the state as it is. Softplus makes 0.69 of
    a 0, and a limit may raise it. So both are applied here, before the padding.
    """
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)

    def apply(
        function: Function,
        inputs: Sequence[Tensor],
        weights: Sequence[Tensor],
        state: Tensor | None,
        keeps: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Implement `Scan.apply`: return the output and, if `keeps`, the last state.

        The step sizes `dt` are final, so no bias or limit is passed.
        """
        hidden_states, dt, B, C = inputs
        # In the order of the `Scan` below: A, and D if the mixer has one.
        A, skip = weights if len(weights) == 2 else (weights[0], None)
        output: Any = function(
            hidden_states,
            dt,
            A,
            B,
            C,
            chunk_size=chunk_size,
            D=skip,
            initial_states=state,
            return_final_states=keeps,
            **keywords,
        )
        return output if keeps else (output, None)

    output, state = layout.scan(
        Scan(
            function=function,
            apply=apply,
            inputs=(hidden_states, dt, B, C),
            weights=(A,) if D is None else (A, D),
            state=initial_states,
            keeps=return_final_states,
        )
    )
    return (output, state) if return_final_states else output


def _decline(*_: Any, **__: Any) -> None:
    """Compute nothing of `mamba2_split_conv1d_scan_combined`, which cannot take a layout.

    The mixer then calls convolution and scan. The combined kernel would also ignore adapters of the
    output projection, whose weight it reads.
    """


ADAPTERS: dict[str, Function] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _scan_delta_rule,
    "chunk_kimi_delta_attention": _scan_delta_rule,
    "mamba2_chunk_scan": _scan_mamba2,
    "mamba2_split_conv1d_scan_combined": _decline,
}
"""Function of a modeling module -> the same with a layout, which takes the function first."""


class _WithLayout:
    """Replacement of a mixer's function in its modeling module, set by `layout_keywords`.

    A call with a layout in the keyword `recurrent` is computed by the `adapter`, which runs the
    original `function` on inputs that the layout has rearranged. A call without a layout is that of
    `function` alone.
    """

    def __init__(self, function: Function, adapter: Function) -> None:
        self.function, self.adapter = function, adapter

    def __call__(
        self, *arguments: Any, recurrent: MixerLayout | None = None, **keywords: Any
    ) -> Any:
        """Call the function by the caller's layout, or as it is if there is none.

        The caller gives the layout to the model as a keyword, which each module hands on until it
        comes here, to the mixer's function.
        """
        layout = recurrent
        # LFM2's mixer before transformers 5.22 drops `recurrent`, but hands on `seq_idx`. For such
        # a model the caller gives the layout under that name too (`layout_keywords`).
        if layout is None and isinstance(keywords.get("seq_idx"), MixerLayout):
            layout = keywords.pop("seq_idx")
        if layout is None:
            return self.function(*arguments, **keywords)
        return self.adapter(self.function, layout, *arguments, **keywords)


def stays_float32(name: str) -> bool:
    """Return True for the name of a weight in `IN_FLOAT32`."""
    return name.rpartition(".")[2] in IN_FLOAT32


def keep_float32(model: nn.Module) -> None:
    """Cast the weights in `IN_FLOAT32` of a model that was built in another format."""
    for name, weight in model.named_parameters():
        if stays_float32(name):
            weight.data = weight.data.float()


@contextmanager
def keeping_float32() -> Iterator[None]:
    """Load the weights in `IN_FLOAT32` of models as float32 within the block.

    transformers would load them in the model's number format, and round decay rates.
    """
    original_plan = PreTrainedModel._get_dtype_plan

    def plan_with_float32(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        # transformers reads the names in a plan as regular expressions.
        patterns = (rf"\.{name}$" for name in IN_FLOAT32)
        return {**original_plan(model, dtype), **dict.fromkeys(patterns, torch.float32)}

    PreTrainedModel._get_dtype_plan = plan_with_float32
    try:
        yield
    finally:
        PreTrainedModel._get_dtype_plan = original_plan


def _modeling_classes(model: nn.Module) -> set[type]:
    """Return the classes of a model's modules, and those that they extend."""
    return {cls for kind in {type(module) for module in model.modules()} for cls in kind.__mro__}


def _mixer_functions(model: nn.Module) -> list[tuple[ModuleType, str]]:
    """Return (module, name) of each function of `ADAPTERS` in the model's modeling modules."""
    names = {cls.__module__ for cls in _modeling_classes(model)}
    modules = [sys.modules[name] for name in names & sys.modules.keys()]
    return [(module, name) for module in modules for name in ADAPTERS.keys() & vars(module).keys()]


def has_mixers(model: nn.Module) -> bool:
    """Return True if a modeling module of the model has a function of `ADAPTERS`."""
    return bool(_mixer_functions(model))


def layout_keywords(model: nn.Module, layout: MixerLayout) -> dict[str, MixerLayout]:
    """Return the keywords that give a model's recurrent mixers this layout. Empty: it has none.

    The first call replaces the functions in transformers' modules by ones that take a layout. Later
    calls find them replaced.
    """
    functions = _mixer_functions(model)
    if not functions:
        return {}
    for module, name in functions:
        function = getattr(module, name)
        if not isinstance(function, _WithLayout):
            setattr(module, name, _WithLayout(function, ADAPTERS[name]))
    keywords = {"recurrent": layout}
    # Some mixers drop the keyword `recurrent`: they get the layout as `seq_idx`, which they keep.
    if any(map(_takes_only_seq_idx, _modeling_classes(model))):
        keywords["seq_idx"] = layout
    return keywords


@cache
def _takes_only_seq_idx(module_class: type) -> bool:
    """Return True for a mixer that hands on only `seq_idx`: LFM2 before transformers 5.22."""
    forward = getattr(module_class, "forward", None)
    parameters = inspect.signature(forward).parameters if callable(forward) else {}
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    return "seq_idx" in parameters and not takes_any
