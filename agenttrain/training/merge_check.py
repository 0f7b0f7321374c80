"""Check at the first weight sync that merged adapters compute what the adapters do.

New adapters change nothing, so that the first comparison of policy and engine says nothing about
them. For each kind of adapted weight, one adapter is given random values for the check::

    before    log-probabilities of a text by the policy
    adapted   with the random adapter: must differ from `before`
    merged    with the adapter merged into its weight, as a sync sends it: must be like `adapted`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.engines.registry import names_with
from agenttrain.training.lora import adapted_weights, base_name, delta, zero_matrix
from agenttrain.training.quantization import is_quantized, linear_like
from agenttrain.training.sharding import assign, full_tensor
from agenttrain.types import AgenttrainError

EXACT_LIMIT = 0.02
"""Limit in float32 on a CPU of the mean gap between `merged` and `adapted`, as a share of what the
adapter moved. Tiny models: up to 6e-6. A merge that leaves the adapter out has a gap of 1."""
LIMIT, FLOOR = 0.5, 0.05
"""The same limit elsewhere, and a gap in nats that counts as none there: rounding alone makes it,
by which a token may also take another route among experts. Tiny models in bfloat16: shares up to
0.22."""


class WrongMerge(AgenttrainError):
    """An adapter has no effect, or another one merged than applied. The message names it."""


def check_merging(model: PreTrainedModel, score: Callable[[], list[float]]) -> None:
    """Raise WrongMerge if a merged adapter does not compute what the adapter computes.

    `score` returns the policy's log-probabilities of a text, in nats, one for each token. Gaps are
    means over them of absolute differences. The gap between merged and adapted may be `limit` times
    that between adapted and before, or `floor` nats. All processes call this together. At the end
    the policy is as before.
    """
    weights = {base_name(name): w for name, w in model.named_parameters(remove_duplicate=False)}
    layers = adapted_weights(model)
    # One weight of each kind, where the number of the layer makes no kind: of all
    # `model.layers.N.mlp.experts.down_proj` that of layer 0. A dictionary keeps the last value of a
    # key: put the weights in from the last to the first, so that it keeps the first of each kind.
    kinds = {re.sub(r"\.\d+\.", ".N.", name): name for name in reversed(layers)}
    exact = model.dtype is torch.float32 and model.device.type == "cpu"
    limit, floor = (EXACT_LIMIT, 0.0) if exact else (LIMIT, FLOOR)
    before_T = torch.tensor(score())
    for name in reversed(kinds.values()):  # from the first layer on again
        layer, weight = layers[name], weights[name]
        with _random_adapter(layer, weight):
            adapted_T = torch.tensor(score())
            with _merged(layer, weight):
                merged_T = torch.tensor(score())
        adapter_change = (adapted_T - before_T).abs().mean().item()
        gap = (merged_T - adapted_T).abs().mean().item()
        if adapter_change == 0:
            raise WrongMerge(
                f"model.lora: adapters of {name} do not change the log-probabilities of a text; "
                "leave them out of model.lora.targets and model.lora.target_parameters"
            )
        if not gap <= max(limit * adapter_change, floor):  # not `>`: NaN is no agreement
            raise WrongMerge(
                f"model.lora: adapters of {name} merged into the weights differ from the adapters "
                f"by {gap:.3g} nats, of {adapter_change:.3g} that they change; set "
                f"{names_with(own_weights=False)} rollout.process=same, which does not merge "
                "them, or leave them out of model.lora.targets and model.lora.target_parameters"
            )


@contextmanager
def _random_adapter(layer: Any, weight: Tensor) -> Iterator[None]:
    """Give an adapter random values inside the `with` block, and its own values again at the end.

    A new adapter changes nothing, so that merging it would prove nothing. The values go into the
    matrix that is zero in a new adapter (`zero_matrix`), and are scaled so that the change of the
    weight (`delta`) has the norm of the weight. `weight` is the layer's: in 4 bits it holds bytes,
    and the numbers that these stand for count.
    """
    matrix = zero_matrix(layer)
    original = matrix.detach().clone()
    values = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0))
    values = values.to(matrix.device, matrix.dtype)
    try:
        assign(matrix, values)
        with torch.no_grad():
            base = layer.get_base_layer()
            base_weight = base.dequantized() if is_quantized(base) else weight
            weight_norm, change_norm = (
                torch.linalg.vector_norm(full_tensor(tensor), dtype=torch.float32)
                for tensor in (base_weight, delta(layer, weight))
            )
        # The change is proportional to this matrix: scale it to the norm of the weight.
        assign(matrix, values * (weight_norm / change_norm).to(values))
        yield
    finally:
        assign(matrix, original)


@contextmanager
def _merged(layer: Any, weight: Tensor) -> Iterator[None]:
    """Merge an adapter into its weight, and switch the adapter off, within the block.

    A layer in 4 bits is replaced by a linear one of the merged weight, which is not sharded.
    """
    gradient_flags = [(parameter, parameter.requires_grad) for parameter in layer.parameters()]
    former_layer, former_weight = layer.base_layer, weight.detach().clone()
    in_4_bits = is_quantized(former_layer)
    try:
        with torch.no_grad():
            if in_4_bits:
                weight = former_layer.dequantized()
            weight.add_(delta(layer, weight).to(weight.dtype))
            if in_4_bits:
                layer.base_layer = linear_like(former_layer, full_tensor(weight))
        layer.enable_adapters(False)
        yield
    finally:
        layer.enable_adapters(True)
        # peft changes which weights have a gradient when it switches adapters off and on.
        for parameter, requires_grad in gradient_flags:
            parameter.requires_grad_(requires_grad)
        if in_4_bits:
            layer.base_layer = former_layer
        else:
            assign(weight, former_weight)
