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
    """Compile the layers at their first call in the block.

    Only there, because a sampling engine calls them in other ways.
    """
    modules: list[Any] = layers(model)
    for layer in modules:
        # On the instance, where it hides the method of the class; deleting it restores that one.
        layer.forward = partial(_forward_compiled, layer)
    try:
        yield
    finally:
        for layer in modules:
            del layer.forward


def _forward_compiled(layer: Any, *states: Any, **keywords: Any) -> Any:
    """Call a layer's forward pass in its compiled form."""
    function = type(layer).forward
    # From transformers 5.23 on, `forward` may checkpoint, and torch compiles nothing inside of
    # that. `recomputing` checkpoints the compiled function instead.
    if function.__code__.co_name == "forward_with_checkpointing":
        function = function.__wrapped__
    return compiled(function)(layer, *states, **keywords)
