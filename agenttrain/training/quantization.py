"""Base weights in 4 bits, by bitsandbytes, under adapters that are trained in the model's format.

NF4 (https://arxiv.org/abs/2305.14314, section 3) stores blocks of 64 numbers: a scale, and for each
number the index of one of 16 values. A layer's weight is dequantised when the layer multiplies, and
again in its backward pass, and is freed after each. So it is a constant of 16 bits that is stored
in 4: sampling, training and what an engine is sent all read the same numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from agenttrain.engines.language_model import encoder_pattern
from agenttrain.training.config import ModelConfig
from agenttrain.training.lora_targets import linear_modules

NF4 = "nf4"
"""bitsandbytes' name of the format."""
BLOCK, SCALES = 64, 256
"""Numbers that share a scale, and scales that share a scale of their own."""
VALUES, SCALE_VALUES = 16, 256
"""Entries of the tables of a number's values and of a scale's, in float32, which a layer keeps."""
FLOAT32 = 4
"""Bytes of a number in float32."""

# Not its warning that a kernel of the hub is missing, which only other layers than these would use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def nf4_bytes(numbers: int, *, double: bool) -> int:
    """Return the bytes that a weight of so many numbers takes in NF4.

    `double`: the scales are in 8 bits, in blocks of 256 with a scale and one mean.

    Example: 1024 x 3072 numbers: 1,572,864 bytes of indices and 49,152 scales, of 4 bytes each
    1,769,536 bytes with the table; of 8 bits with 192 scales and a mean 1,623,876.
    """
    indices, scales = ceil(numbers / 2), ceil(numbers / BLOCK)  # two indices in a byte
    size = indices + VALUES * FLOAT32  # with the table of the values that indices stand for
    if not double:
        return size + scales * FLOAT32
    # A byte for each scale; the scales of these, a mean, and the table of a scale's values.
    return size + scales + (ceil(scales / SCALES) + 1 + SCALE_VALUES) * FLOAT32


def layers_to_quantize(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model without adapters that are stored in 4 bits, by name.

    Left out are the head, encoders, routers, layers whose rows are no whole blocks, and those of a
    Mamba mixer whose weight a kernel reads: all but `in_proj`. Packed experts are no linear layers.
    """
    mamba = [name for name, m in model.named_modules() if hasattr(m, "A_log") and hasattr(m, "D")]
    read_by_kernels = {
        f"{name}.{child}"
        for name in mamba
        for child, _ in model.get_submodule(name).named_children()
        if child != "in_proj"
    }
    modules = dict(model.named_modules())
    return {
        name: modules[name]
        for name in linear_modules(model, encoder_pattern(model))
        # A subclass may compute with its weight in its own way. Of rows that end within a block
        # bitsandbytes 0.50 takes wrong scales, on a CPU with AVX512.
        if type(modules[name]) is nn.Linear
        and modules[name].in_features % BLOCK == 0
        and name not in read_by_kernels
    }


def check_quantizable(model: PreTrainedModel, config: ModelConfig) -> None:
    """Raise ValueError for a model that is quantised already, or has nothing to quantise."""
    key = f"model.quantization={config.quantization}: model.path={config.path}"
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"{key} is quantised already, in another way; give it the model's 16-bit weights, or "
            "leave model.quantization out"
        )
    if not layers_to_quantize(model):
        raise ValueError(
            f"{key} ({type(model).__name__}) has no linear layer that could be stored in 4 bits; "
            "leave it out"
        )


def quantize(model: PreTrainedModel, *, double: bool) -> None:
    """Store the linear layers of a loaded model in 4 bits, in place, one after the other.

    On a machine with GPUs they are moved to the current one, which quantises faster than the CPU.
    `double`: the scales are stored in 8 bits. The model has no adapters yet.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, linear in layers_to_quantize(model).items():
        parent, _, child = name.rpartition(".")
        layer = _quantize_layer(linear, device, double=double)
        setattr(model.get_submodule(parent), child, layer)
    model.is_loaded_in_4bit = True  # peft then adds adapters that are made for such layers


def _quantize_layer(linear: nn.Linear, device: torch.device, *, double: bool) -> nn.Module:
    """Return a linear layer in 4 bits with the weight and the bias of `linear`.

    `double`: its scales are stored in 8 bits.
    """
    bnb = import_module("bitsandbytes.nn")
    layer: Any = bnb.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=False,
        compress_statistics=double,
        quant_type=NF4,
        device="meta",
    )
    weight = bnb.Params4bit(
        linear.weight.detach(),
        requires_grad=False,
        compress_statistics=double,
        quant_type=NF4,
        module=layer,
    )
    layer.weight = weight.to(device)  # quantises
    layer.bias = linear.bias
    # Else a CPU with AVX512-BF16 repacks the weight in evaluation mode, and multiplies in bfloat16
    # whatever the format of the model: sampling would differ from training.
    layer.support_avx512bf16_for_cpu = False
    return layer.train(linear.training)


def is_quantized(module: nn.Module) -> bool:
    """Return True if a module's own weight is stored in 4 bits by `quantize`."""
    # Not `module.weight`: peft's layers have it too, as a property.
    return getattr(module._parameters.get("weight"), "bnb_quantized", False)


def has_quantized(model: nn.Module) -> bool:
    """Return True if a model has layers in 4 bits."""
    return bool(getattr(model, "is_loaded_in_4bit", False))


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, layer) of the layers in 4 bits; below an adapter it ends in `base_layer`."""
    if has_quantized(model):
        yield from ((n, m) for n, m in model.named_modules() if is_quantized(m))


@torch.no_grad()
def dequantized(layer: Any) -> Tensor:
    """Return a layer's weight as it is multiplied, in the format that it was quantised from."""
    functional = import_module("bitsandbytes.functional")
    weight: Tensor = functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return weight


def full_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of `state_dict`, one after the other, weights in 4 bits dequantised.

    Their scales, which `state_dict` has under names below theirs, are left out.
    """
    layers = {f"{name}.weight": layer for name, layer in quantized_layers(model)}
    scale_prefixes = tuple(f"{name}." for name in layers)
    for name, tensor in model.state_dict().items():
        if name in layers:
            yield name, dequantized(layers[name])
        elif not (scale_prefixes and name.startswith(scale_prefixes)):
            yield name, tensor


def dequantize(model: PreTrainedModel) -> None:
    """Replace the layers in 4 bits by linear layers of the numbers that they stand for, in place.

    The model has no adapters.
    """
    for name, layer in list(quantized_layers(model)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, unquantized(layer))
    model.is_loaded_in_4bit = False


def unquantized(layer: Any) -> nn.Linear:
    """Return a linear layer of the numbers that a layer in 4 bits stands for."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(dequantized(layer), requires_grad=False)
    linear.bias = layer.bias
    return linear.train(layer.training)


def has_double_scales(model: nn.Module) -> bool:
    """Return True if the scales of a model's layers in 4 bits are in 8 bits."""
    return any(layer.weight.quant_state.nested for _, layer in quantized_layers(model))


def scales(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that layers in 4 bits keep beside their weights: scales, means, tables."""
    for _, layer in quantized_layers(model):
        state = layer.weight.quant_state
        yield from (state.absmax, state.code)
        if state.nested:
            yield from (state.offset, state.state2.absmax, state.state2.code)


def numbers_of(model: nn.Module) -> dict[str, int]:
    """Return how many numbers each weight in 4 bits stands for, by the weight's name."""
    return {f"{n}.weight": m.in_features * m.out_features for n, m in quantized_layers(model)}


def describe_quantization(model: PreTrainedModel) -> str:
    """Return a line that says how much of the model is in 4 bits, and which matrices are not.

    Example: ``base in 4 bits (nf4): 72 % of the weights; in bfloat16: embed_tokens, lm_head``.
    """
    numbers = numbers_of(model)
    unquantized_weights = {
        n: p for n, p in model.named_parameters() if n not in numbers and "lora_" not in n
    }
    total = sum(numbers.values()) + sum(p.numel() for p in unquantized_weights.values())
    names = dict.fromkeys(
        n.removesuffix(".weight").rpartition(".")[2]
        for n, p in unquantized_weights.items()
        if p.ndim > 1  # matrices, not norms and biases
    )
    dtype = str(model.dtype).removeprefix("torch.")
    share = f"{100 * sum(numbers.values()) / total:.0f} % of the weights"
    return f"base in 4 bits ({NF4}): {share}; in {dtype}: {', '.join(names)}"
