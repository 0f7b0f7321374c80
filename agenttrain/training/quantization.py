"""Base weights in 4 bits, by bitsandbytes, under adapters that are trained in the model's format.

NF4 (https://arxiv.org/abs/2305.14314, section 3) stores blocks of 64 numbers: a scale, and for each
number the index of one of 16 values. A layer's weight is dequantised when the layer multiplies, and
again in its backward pass, and is freed after each. So it is a constant of 16 bits that is stored
in 4: sampling, training and what an engine is sent all read the same numbers.

The indices of a row are a row of bytes, because no block spans two rows. FSDP2 shards and gathers
these bytes as it does other weights. Scales are whole in every process.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agenttrain.engines.language_model import encoder_pattern
from agenttrain.training.config import ModelConfig
from agenttrain.training.lora_targets import linear_modules
from agenttrain.training.sharding import full_tensor, like_part, local_part, own_rows

NF4 = "nf4"
"""bitsandbytes' name of the format."""
BLOCK, SCALE_BLOCK = 64, 256
"""Numbers that share a scale, and scales that share a scale of their own."""
VALUES, SCALE_VALUES = 16, 256
"""Entries of the tables of a number's values and of a scale's, in float32, which a layer keeps."""
FLOAT32_BYTES = 4
"""Bytes of a number in float32."""

# Not its warning that a kernel of the hub is missing, which only other layers than these would use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def nf4_bytes(numbers: int, *, double: bool) -> int:
    """Return the bytes that a weight of so many numbers takes in NF4.

    Each number is an index of 4 bits into a table of 16 values, and each block of 64 numbers has a
    scale. Example: 1024 x 3072 numbers are 1,572,864 bytes of indices and 49,152 scales.

    - not `double`: scales in float32. With the table (64 bytes): 1,572,864 + 196,608 + 64.
    - `double`: scales in 8 bits, indices into a table of 256 values, with a scale in float32 for
      each block of 256 scales and a mean: 1,572,864 + 49,152 + 64 + 768 + 4 + 1,024.
    """
    return ceil(numbers / 2) + scale_bytes(numbers, double=double)


def scale_bytes(numbers: int, *, double: bool) -> int:
    """Return the bytes of `nf4_bytes` that are not indices: scales, a mean, tables."""
    blocks = ceil(numbers / BLOCK)
    if not double:
        return (blocks + VALUES) * FLOAT32_BYTES
    return blocks + (VALUES + ceil(blocks / SCALE_BLOCK) + 1 + SCALE_VALUES) * FLOAT32_BYTES


def layers_to_quantize(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers of a model without adapters that are stored in 4 bits, by name.

    Left out are the head, encoders and routers (by `linear_modules`), layers whose rows are no
    whole blocks, and those of a Mamba mixer whose weight a kernel reads: all but `in_proj`. Packed
    experts are no linear layers.
    """
    # Only Mamba mixers have parameters `A_log`, of the decay, and `D`, of the skip connection.
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
        # A subclass may compute with its weight in its own way. A row has to be whole blocks: if it
        # ends within one, bitsandbytes 0.50 reads wrong scales on a CPU with AVX512.
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


class QuantizedLinear(nn.Linear):
    """A frozen linear layer whose weight is stored in NF4.

    NF4 stores a scale for each block of 64 numbers, and for each number the index of one of 16
    values. `weight` has these indices, two in a byte: [out, in / 2] of uint8, a format that casts
    of the model leave alone. With double quantization the scales are bytes too, each an index into
    a table, with scales of their own.

    If the layer is sharded, a process has some rows of `weight`. `forward` runs with the weight
    gathered. Buffers, which hold the scales, are never sharded: they are those of all rows.
    """

    scales: Tensor
    """Scale of each `BLOCK` of the whole weight, in 8 bits or in float32."""
    values: Tensor
    """The 16 values that the indices stand for."""
    scale_scales: Tensor
    """For scales in 8 bits: the scale of each `SCALE_BLOCK` of them."""
    scale_values: Tensor
    """For scales in 8 bits: the table of values that they are indices of."""
    scale_mean: Tensor
    """For scales in 8 bits: a number that is added to each."""

    def __init__(self, linear: nn.Linear, *, double: bool, device: torch.device) -> None:
        """Make room for the weight of `linear` on `device`, and take its bias.

        `double`: the scales are in 8 bits. The values come later: `quantize` fills `weight`, and
        `store_scales` the buffers.
        """
        # Without storage: weight and bias are replaced below.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        self.dtype = linear.weight.dtype
        """Format of the weight that is packed, and of a dequantised one."""
        self.has_double_scales = double
        self.row_blocks = linear.in_features // BLOCK
        """Blocks of a row of the weight."""
        packed_shape = (linear.out_features, linear.in_features // 2)
        packed = torch.empty(packed_shape, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        blocks = linear.out_features * self.row_blocks
        scale_format = torch.uint8 if double else torch.float32
        # float32 explicitly, because a model may be built with another default.
        # Buffer -> (length, format). A scale for each block, and the 16 values of an index.
        shapes = {"scales": (blocks, scale_format), "values": (VALUES, torch.float32)}
        if double:  # `scales` are indices: scales of their blocks, the table of values, the mean
            shapes["scale_scales"] = (ceil(blocks / SCALE_BLOCK), torch.float32)
            shapes["scale_values"] = (SCALE_VALUES, torch.float32)
            shapes["scale_mean"] = (1, torch.float32)
        for name, (length, dtype) in shapes.items():
            buffer = torch.empty(length, dtype=dtype, device=device)
            self.register_buffer(name, buffer, persistent=False)
        self.train(linear.training)

    def _apply(self, fn: Any, recurse: bool = True) -> QuantizedLinear:
        """Move the layer. Its scales and tables keep their formats, which bitsandbytes expects."""
        original = dict(self._buffers)
        super()._apply(fn, recurse)  # moves, but also casts, for example to bfloat16
        for name, buffer in self._buffers.items():
            uncast = original[name]
            if buffer is not None and uncast is not None and buffer.dtype != uncast.dtype:
                self._buffers[name] = uncast.to(buffer.device)
        return self

    @torch.no_grad()
    def store_scales(self, scales_B: Tensor) -> None:
        """Store the scales of the weight, one for each of its B blocks, and the tables.

        `scales_B` are in float32. With double quantization they are stored in 8 bits, with a mean
        and scales of their own, as bitsandbytes does.
        """
        functional = import_module("bitsandbytes.functional")
        # The 16 values that the indices of a weight stand for, the same for all weights.
        self.values.copy_(functional.get_4bit_type(NF4, device=scales_B.device))
        if not self.has_double_scales:
            self.scales.copy_(scales_B)
            return
        mean = scales_B.mean()
        indices_B, state = functional.quantize_blockwise(scales_B - mean, blocksize=SCALE_BLOCK)
        self.scales.copy_(indices_B)
        self.scale_scales.copy_(state.absmax)
        self.scale_values.copy_(state.code)
        self.scale_mean.copy_(mean)

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the weight, which bitsandbytes dequantises for the product.

        Autograd keeps the 4 bits alone: the backward pass dequantises them again, and the weight
        itself has no gradient.
        """
        functional = import_module("bitsandbytes.functional")
        # bitsandbytes' arguments for scales in 8 bits: the number to add to each scale, and the
        # state by which the scales themselves are dequantised.
        nested = {}
        if self.has_double_scales:
            nested = {"offset": self.scale_mean[0], "state2": self._scale_state()}
        state = functional.QuantState(
            self.scales,
            shape=torch.Size((self.out_features, self.in_features)),
            code=self.values,  # the table of an index
            blocksize=BLOCK,
            quant_type=NF4,
            dtype=self.dtype,
            **nested,
        )
        multiply = import_module("bitsandbytes").matmul_4bit
        # It takes the bytes as one column; their shape is in `state`.
        output: Tensor = multiply(input, self.weight.view(-1, 1), state, bias=self.bias)
        return output

    def _scale_state(self) -> Any:
        """Return bitsandbytes' description of scales in 8 bits."""
        state = import_module("bitsandbytes.functional").QuantState
        return state(
            self.scale_scales, code=self.scale_values, blocksize=SCALE_BLOCK, dtype=torch.float32
        )

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """Return the weight as it is multiplied, sharded if the layer is.

        If it is, `weight` has the 4 bits of some rows. Each process dequantises its own. But it has
        the scales of all rows, B blocks: with double quantization bytes, which are dequantised
        before.
        """
        functional = import_module("bitsandbytes.functional")
        rows, packed = own_rows(self.weight), local_part(self.weight)
        scales_B = self.scales
        if self.has_double_scales:
            scales_B = functional.dequantize_blockwise(scales_B, self._scale_state())
            scales_B = scales_B + self.scale_mean
        # Scales are those of all rows: take those of this process's. No `code`, which only
        # `matmul_4bit` reads: `dequantize_4bit` knows the 16 values by `quant_type`.
        state = functional.QuantState(
            scales_B[rows.start * self.row_blocks : rows.stop * self.row_blocks],
            shape=torch.Size((len(packed), self.in_features)),
            blocksize=BLOCK,
            quant_type=NF4,
            dtype=self.dtype,
        )
        if len(packed):
            # bitsandbytes takes the bytes as one column; `state` has the shape.
            weight: Tensor = functional.dequantize_4bit(packed.view(-1, 1), state)
        else:  # another process has all rows
            weight = torch.empty(state.shape, dtype=self.dtype, device=packed.device)
        if isinstance(self.weight, DTensor):
            return like_part(self.weight, weight, (self.out_features, self.in_features))
        return weight


@torch.no_grad()
def pack(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of a weight as bytes, [rows, in / 2], and the float32 scale of each block.

    Example: 2 rows of 128 numbers give [2, 64] bytes and 4 scales.
    """
    width = rows.shape[1] // 2
    if not len(rows):  # another process has all rows of a sharded weight
        return rows.new_empty(0, width, dtype=torch.uint8), rows.new_empty(0, dtype=torch.float32)
    functional = import_module("bitsandbytes.functional")
    packed, state = functional.quantize_4bit(rows.contiguous(), blocksize=BLOCK, quant_type=NF4)
    return packed.view(-1, width), state.absmax


def quantize(model: PreTrainedModel, *, double: bool, on_host: bool = False) -> None:
    """Store the linear layers of a model in 4 bits, in place, one after the other.

    On a machine with GPUs they are packed on the current one, which is faster than the CPU, and
    stay there unless `on_host`. Weights on the meta device are packed later, when they are read.
    `double`: the scales are stored in 8 bits. The model has no adapters yet.
    """
    packing = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in list(layers_to_quantize(model)):  # by name: nothing else keeps a replaced layer
        linear: Any = model.get_submodule(name)
        parent, _, child = name.rpartition(".")
        device = linear.weight.device if linear.weight.is_meta or on_host else packing
        layer = QuantizedLinear(linear, double=double, device=device)
        if not linear.weight.is_meta:
            packed, scales_B = pack(linear.weight.detach().to(packing))
            layer.weight.data.copy_(packed)
            layer.store_scales(scales_B)
        setattr(model.get_submodule(parent), child, layer)


def gather_scales(layer: QuantizedLinear, own_scales_B: Tensor) -> None:
    """Store the scales of a sharded layer, of which each process has those of its rows.

    All processes call it together.
    """
    weight: Any = layer.weight
    own_scales_RB = own_scales_B.view(-1, layer.row_blocks)
    shape = (layer.out_features, layer.row_blocks)
    layer.store_scales(full_tensor(like_part(weight, own_scales_RB, shape)).flatten())


def is_quantized(module: nn.Module) -> bool:
    """Return True if a module's own weight is stored in 4 bits by `quantize`."""
    return isinstance(module, QuantizedLinear)


def has_quantized(model: nn.Module) -> bool:
    """Return True if a model has layers in 4 bits."""
    return any(map(is_quantized, model.modules()))


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, QuantizedLinear]]:
    """Yield (name, layer) of the layers in 4 bits; below an adapter it ends in `base_layer`."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            yield name, module


def full_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the entries of `state_dict`, one after the other, weights in 4 bits dequantised.

    Sharded weights stay sharded.
    """
    layers = {f"{name}.weight": layer for name, layer in quantized_layers(model)}
    for name, tensor in model.state_dict().items():
        yield name, layers[name].dequantized() if name in layers else tensor


def dequantize(model: PreTrainedModel) -> None:
    """Replace the layers in 4 bits by linear layers of the numbers that they stand for, in place.

    The model has no adapters.
    """
    for name, layer in list(quantized_layers(model)):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, linear_like(layer, layer.dequantized()))


def linear_like(layer: nn.Linear, weight: Tensor) -> nn.Linear:
    """Return a frozen linear layer of `weight`, with the bias and the mode of another layer.

    A sharded bias is gathered by all processes together.
    """
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(full_tensor(layer.bias), requires_grad=False)
    return linear.train(layer.training)


def has_double_scales(model: nn.Module) -> bool:
    """Return True if the scales of a model's layers in 4 bits are in 8 bits."""
    return any(layer.has_double_scales for _, layer in quantized_layers(model))


def scales(model: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors that layers in 4 bits keep beside their weights: scales, means, tables."""
    for _, layer in quantized_layers(model):
        yield from layer.buffers(recurse=False)


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
