"""Activation checkpointing: modules whose activations are computed again in the backward pass.

A recomputed module keeps its inputs alone. Its forward pass runs once more when the backward pass
reaches it, with the same inputs and weights, so that gradients are the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agenttrain.engines.language_model import language_model
from agenttrain.training.config import LEVELS, ActivationCheckpointing
from agenttrain.training.sharding import layers
from agenttrain.types import ConfigError


def recomputed_modules(model: PreTrainedModel, level: ActivationCheckpointing) -> list[nn.Module]:
    """Return the modules that `level` recomputes; none of them is in another.

    `all`: the layers, those of encoders included. `blocks`: the feed-forward blocks of the decoder
    layers, and the norms beside them. `none`, and `auto` before a level is chosen: no modules.
    Raises ConfigError.
    """
    name = type(model).__name__
    if level is ActivationCheckpointing.all:
        modules = _outermost_layers(model) if model.supports_gradient_checkpointing else []
        if not modules:
            raise ConfigError(
                f"training.activation_checkpointing=all: the layers of {name} cannot be computed "
                "again; set training.activation_checkpointing=none"
            )
        return modules
    if level is ActivationCheckpointing.blocks:
        blocks = feed_forward_blocks(model)
        if not blocks:
            raise ConfigError(
                f"training.activation_checkpointing=blocks: the layers of {name} have no "
                "feed-forward block that is called with hidden states alone; set "
                "training.activation_checkpointing=all or none"
            )
        return [*blocks, *_norms(model, blocks)]
    return []


def possible_levels(model: PreTrainedModel, *, compiled: bool) -> list[ActivationCheckpointing]:
    """Return the levels that can be chosen for a model, the one that keeps most first.

    Blocks of `compiled` layers cannot be recomputed: they are part of the layer's code.
    """
    levels = []
    for level in LEVELS:
        if level is ActivationCheckpointing.blocks and compiled:
            continue
        try:
            recomputed_modules(model, level)
        except ConfigError:
            continue
        levels.append(level)
    return levels


def _outermost_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, without the layers that are part of another (Zamba2)."""
    outermost: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, GradientCheckpointingLayer):
            outermost.append(child)
        else:
            outermost += _outermost_layers(child)
    return outermost


def feed_forward_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the feed-forward blocks of the decoder layers: MLPs and blocks of experts.

    A block is a child of a layer that has several matrices and takes hidden states alone. Attention
    and recurrent mixers take a mask or a cache too. A layer may have two: GraniteMoeHybrid's shared
    MLP stands beside its experts.
    """
    return [
        child
        for layer in layers(language_model(model))
        for child in layer.children()
        if len(inspect.signature(child.forward).parameters) == 1
        and sum(weight.dim() > 1 for weight in child.parameters()) > 1
    ]


def _norms(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the norms of the decoder layers, without those inside of feed-forward blocks.

    They take little time, and much memory: a norm in 16 bits computes in float32, and keeps that.
    """
    inside = {module for block in blocks for module in block.modules()}
    modules = (module for layer in layers(language_model(model)) for module in layer.modules())
    return [
        module
        for module in dict.fromkeys(modules)  # layers may be parts of others
        if module not in inside
        # A norm is a leaf with vectors as its only weights, called with hidden states alone.
        and not [*module.children()]
        and {weight.dim() for weight in module.parameters()} == {1}
        and len(inspect.signature(module.forward).parameters) == 1
    ]


@contextmanager
def recomputing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Recompute these modules in the backward passes of forward passes that run in the block.

    The model is in evaluation mode (`Scorer.ready`), so that both passes compute the same.
    An engine may sample from the same model outside of the block.
    """
    wrapped: list[Any] = list(modules)
    # `forward` of an instance, in place of that of its class or of an earlier wrapper. Hooks of the
    # module, such as those with which FSDP2 gathers weights, run once, outside.
    former = [vars(module).get("forward") for module in wrapped]
    for module in wrapped:
        # Without dropout a forward pass draws no random number, so its generator's state, which is
        # read and set for each module otherwise, need not be kept.
        module.forward = partial(
            checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
        )
    try:
        yield
    finally:
        for module, forward in zip(wrapped, former, strict=True):
            if forward is None:
                del module.forward
            else:
                module.forward = forward
