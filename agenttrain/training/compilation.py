"""torch.compile for the layers of the policy and the arithmetic of its head.

A layer's elementwise work (norms, rotary positions, gates, residuals) is then a few fused kernels:
on a GPU a step takes less time and memory. Attention is left as it is. Code is made once for all
layers of a class and all lengths, at the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from transformers import PreTrainedModel

from agenttrain.training.sharding import layers


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for any shape."""
    return torch.compile(function, dynamic=True)


@contextmanager
def compiled_layers(model: PreTrainedModel) -> Iterator[None]:
    """Compile the layers in the block only: a sampling engine calls them in other ways."""
    modules: list[Any] = layers(model)
    for layer in modules:
        # On the instance, where it hides the method of the class; deleting it restores that one.
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in modules:
            del layer.forward


def _forward(layer: Any, *states: Any, **keywords: Any) -> Any:
    """Call a layer's forward pass in its compiled form."""
    function = type(layer).forward
    # Before transformers 5.23, checkpointing is around `forward`.
    if function.__code__.co_name != "forward_with_checkpointing":
        return compiled(function)(layer, *states, **keywords)
    # From 5.23 on it is part of `forward`, and torch compiles nothing inside a checkpoint. Compile
    # the function inside, then checkpoint it.
    layer_forward = compiled(function.__wrapped__)
    if layer.gradient_checkpointing and layer.training:
        call = partial(layer_forward, layer, **keywords)
        return layer._gradient_checkpointing_func(call, *states)
    return layer_forward(layer, *states, **keywords)
