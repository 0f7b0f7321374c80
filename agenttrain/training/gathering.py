"""Gathering of sharded weights, with one collective call for each decoder layer.

A weight is a matrix of rows, of which each process has some. The parts of a layer's weights lie one
after the other in a buffer, and the buffers of all processes are gathered on the device that
computes, also if the parts are kept in host memory. So a gather holds one layer, and there are as
many as layers. Weights outside of the layers, such as the embeddings, are gathered alone.

    process 0   | rows 0-1 of q_proj | rows 0-1 of k_proj | …
    process 1   | rows 2-3 of q_proj | rows 2-3 of k_proj | …
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import ceil, prod
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agenttrain.training.sharding import full_tensor, is_sharded, layers

all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""`all_gather_single` from torch 2.13 on."""
ALIGNMENT = 16
"""Each part begins at a multiple of these bytes, so that any number format can be viewed there."""


def gather_by_layer(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full weights by name, layer by layer. All processes iterate together."""
    if not is_sharded(model):
        yield from weights
        return
    layer_ids = set(map(id, layers(model)))
    layer_names = {name for name, module in model.named_modules() if id(module) in layer_ids}

    def layer_of(weight: tuple[str, Tensor]) -> str:
        """Return the name of a weight's layer, or of the weight itself outside of layers."""
        parts = weight[0].split(".")
        modules = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((module for module in modules if module in layer_names), weight[0])

    # A layer's weights follow each other in the model.
    for _, layer_weights in groupby(weights, key=layer_of):
        names, tensors = map(list, zip(*layer_weights, strict=True))
        full = gather(tensors)
        del tensors  # `gather` copies them
        for name in names:
            yield name, next(full)


class PackedPart(NamedTuple):
    """Place of a tensor's part in the buffer of each process."""

    shape: torch.Size
    """Shape of the full tensor."""
    dtype: torch.dtype
    rows: int
    """Rows of the largest part: the last process may have fewer."""
    offset: int
    """First byte in the buffer."""
    size: int
    """Bytes of the largest part."""


def gather(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the full tensors in order. All processes call it together.

    One collective call gathers all tensors that are sharded by rows. A tensor that is sharded
    otherwise needs a call of its own.
    """
    row_sharded = [tensor for tensor in tensors if _is_row_sharded(tensor)]
    packed_parts, total = _packed_parts(row_sharded)
    # [processes, bytes]: row r holds the parts of process r, one tensor after the other.
    buffers = _gather_buffers(row_sharded, packed_parts, total) if row_sharded else None
    # Of each tensor its place in the buffers, or the tensor itself if it is not there.
    part_places = iter(packed_parts)
    sources: list[PackedPart | Tensor] = [
        next(part_places) if _is_row_sharded(tensor) else tensor for tensor in tensors
    ]
    # The buffers hold copies: tensors that the caller has cast for this call can be freed now.
    del tensors, row_sharded
    for place in sources:
        if isinstance(place, Tensor):
            yield full_tensor(place)
            continue
        assert buffers is not None
        # The bytes of each process's rows of this tensor, viewed as numbers: [processes, numbers].
        parts = buffers[:, place.offset : place.offset + place.size].view(place.dtype)
        # The parts lie apart in the buffers, so that `reshape` copies them, unless the tensor is
        # alone there. The last process's part may be padded: cut to the tensor's rows.
        yield parts.reshape(len(buffers) * place.rows, *place.shape[1:])[: place.shape[0]]


def _is_row_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True if the tensor's rows lie on the processes of the mesh's last dimension."""
    if not isinstance(tensor, DTensor):
        return False
    *replicas, sharding = tensor.placements
    return sharding.is_shard(0) and all(placement.is_replicate() for placement in replicas)


def _packed_parts(tensors: Sequence[DTensor]) -> tuple[list[PackedPart], int]:
    """Return the place of each tensor's part in a process's buffer, and the buffer's bytes."""
    packed_parts, offset = [], 0
    for tensor in tensors:
        sharding_dimension = tensor.device_mesh.ndim - 1  # earlier dimensions are of replicas
        rows = ceil(tensor.shape[0] / tensor.device_mesh.size(sharding_dimension))
        size = rows * prod(tensor.shape[1:]) * tensor.dtype.itemsize
        packed_parts.append(PackedPart(tensor.shape, tensor.dtype, rows, offset, size))
        offset += ceil(size / ALIGNMENT) * ALIGNMENT
    return packed_parts, offset


def _gather_buffers(tensors: Sequence[DTensor], places: Sequence[PackedPart], total: int) -> Tensor:
    """Return the buffers of all processes, [processes, bytes], on the device that computes.

    A buffer of `total` bytes has a process's parts of `tensors`, each at its offset in `places`.
    """
    mesh = tensors[0].device_mesh
    group = mesh.get_group(mesh.ndim - 1)  # the last dimension shards, earlier ones are of replicas
    rank, count = dist.get_rank(group), dist.get_world_size(group)
    buffers = torch.empty(count * total, dtype=torch.uint8, device=mesh.device_type)
    buffer = buffers[rank * total : (rank + 1) * total]  # of this process, gathered in place
    for tensor, place in zip(tensors, places, strict=True):
        part: Any = tensor.to_local()
        target = buffer[place.offset : place.offset + part.nbytes].view(part.dtype)
        target.view(part.shape).copy_(part, non_blocking=True)
    all_gather(buffers, buffer, group=group)
    return buffers.view(count, total)
