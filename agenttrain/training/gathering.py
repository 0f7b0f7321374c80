"""Gathering of sharded weights: those of a decoder layer by one collective call.

A weight is a matrix of rows, of which each process has some. The parts of a layer's weights lie one
after the other in a buffer, and the buffers of all processes are gathered on the device that
computes, also if the parts are kept in host memory. So a gather holds one layer, and there are as
many as layers; weights outside of the layers, such as the embeddings, are gathered alone.

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

ALIGNMENT = 16
"""Each part begins at a multiple of these bytes, so that any number format can be viewed there."""


def gather_by_layer(
    model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the full weights with their names in `model`; all processes iterate together.

    `weights` are in the model's order, one layer after the other. A weight that is not sharded is
    yielded as it is.
    """
    if not is_sharded(model):
        yield from weights
        return
    inside = set(map(id, layers(model)))
    names = {name for name, module in model.named_modules() if id(module) in inside}

    def layer_of(named: tuple[str, Tensor]) -> str:
        parts = named[0].split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((prefix for prefix in prefixes if prefix in names), named[0])

    for _, of_layer in groupby(weights, key=layer_of):
        batch = list(of_layer)
        full = gather([tensor for _, tensor in batch])
        for name, _ in batch:
            yield name, next(full)


class Place(NamedTuple):
    """Place of a tensor's part in the buffer of each process."""

    offset: int
    rows: int
    """Rows of the largest part."""
    size: int
    """Bytes of the largest part."""


def gather(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the full tensors, gathered by one collective call of all processes.

    Tensors that are not sharded by rows need none, or one of their own.
    """
    by_rows = [tensor for tensor in tensors if _by_rows(tensor)]
    places, total = _places(by_rows)
    full = None
    if by_rows:
        own = _buffer(by_rows, places, total)
        group = by_rows[0].device_mesh.get_group(by_rows[0].device_mesh.ndim - 1)
        flat = own.new_empty(dist.get_world_size(group) * total)
        dist.all_gather_into_tensor(flat, own, group=group)
        full = flat.view(-1, total)
        del own, flat
    where = iter(places)
    for tensor in tensors:
        if full is None or not _by_rows(tensor):
            yield full_tensor(tensor)
            continue
        place = next(where)
        parts = full[:, place.offset : place.offset + place.size].view(tensor.dtype)
        # A copy, unless the tensor is alone in the buffer.
        yield parts.reshape(len(full) * place.rows, *tensor.shape[1:])[: tensor.shape[0]]


def _by_rows(tensor: Tensor) -> TypeGuard[DTensor]:
    if not isinstance(tensor, DTensor):
        return False
    *others, last = tensor.placements
    return last.is_shard(0) and all(placement.is_replicate() for placement in others)


def _places(tensors: Sequence[DTensor]) -> tuple[list[Place], int]:
    """Return the place of each tensor in the buffer, and the bytes of the buffer."""
    places, offset = [], 0
    for tensor in tensors:
        rows = ceil(tensor.shape[0] / tensor.device_mesh.size(tensor.device_mesh.ndim - 1))
        size = rows * prod(tensor.shape[1:]) * tensor.dtype.itemsize
        places.append(Place(offset, rows, size))
        offset += ceil(size / ALIGNMENT) * ALIGNMENT
    return places, offset


def _buffer(tensors: Sequence[DTensor], places: Sequence[Place], total: int) -> Tensor:
    """Return this process's parts in one buffer on the device that computes."""
    device = tensors[0].device_mesh.device_type
    own = torch.empty(total, dtype=torch.uint8, device=device)
    for tensor, place in zip(tensors, places, strict=True):
        part: Any = tensor.to_local()
        target = own[place.offset : place.offset + part.nbytes].view(part.dtype)
        target.view(part.shape).copy_(part, non_blocking=True)
    return own
