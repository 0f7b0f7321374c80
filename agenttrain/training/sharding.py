"""FSDP2: every process holds a part of each weight, of its gradient and of its optimizer state.

Uses torch's `fully_shard`, layer by layer: accelerate's plugin is ignored without a GPU (1.15). All
processes gather together, so all of them run the same number of forward passes. With
`distributed.shard_within=node` each node holds a whole model, and processes with the same part sum
their gradients. In a checkpoint policy-0.pt, policy-1.pt, … hold ``{"part": tensor, "shape": [full
shape]}`` for each sharded tensor: parts follow each other along the first dimension, in rank order,
and any number of processes can read them (`TensorParts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agenttrain.training.checkpoint_files import CheckpointError, only_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Settings of a policy that is sharded over processes."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory. Layers are copied to the GPU to
    compute."""
    within: int | None = None
    """Number of successive ranks that together hold the weights. Such groups of ranks exchange only
    gradients. None: all ranks are one group."""


class RowRange(NamedTuple):
    """Rows `start` to `stop` - 1 of a tensor's first dimension. A number has one row."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A process's place among those that hold the parts of a model."""

    index: int
    count: int
    replica: int
    """Number of the group of processes that together hold the model."""


class TensorParts:
    """A full tensor in parts, which may be mapped files: only the rows that are used are read."""

    def __init__(self, parts: Sequence[tuple[int, Tensor]], shape: torch.Size, source: str) -> None:
        """`parts` are pairs of (first row, rows). `source` names files and tensor in errors."""
        self.shape = shape
        self._parts, self._source = parts, source

    def rows(self, rows: RowRange) -> Tensor:
        """Return a copy of rows. Raises CheckpointError if no part holds one of them.

        Example: parts of rows 0-1 and 2-3 give rows 1-2 as the last row of one and the first of the
        other.
        """
        pieces, next_row = [], rows.start
        for first_row, part in sorted(self._parts, key=lambda pair: pair[0]):
            # The rows of this part that are wanted and not found yet.
            piece = part[max(next_row - first_row, 0) : max(rows.stop - first_row, 0)]
            has_gap = first_row > next_row
            if len(piece) and not has_gap:
                pieces.append(piece)
                next_row += len(piece)
        if next_row < rows.stop:
            raise CheckpointError(
                f"{self._source}, of shape {list(self.shape)}: no file holds its rows {next_row} "
                f"to {rows.stop}. The files are not of one checkpoint; resume from another"
            )
        if not pieces:
            return torch.empty(0, *self.shape[1:], dtype=self._parts[0][1].dtype)
        return torch.cat(pieces)


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, by the class names that transformers does not split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    by_name = [module for module in model.modules() if type(module).__name__ in names]
    return by_name or [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def assign(target: Tensor, values: Tensor | TensorParts) -> None:
    """Copy a full tensor into `target`, or this process's part of it into a sharded `target`."""
    with torch.no_grad():
        target.copy_(shard_like(target, values))


def shard_like(target: Tensor, values: Tensor | TensorParts) -> Tensor:
    """Return full values sharded as `target` is: this process's rows of them.

    `TensorParts` are full values that are read from several files row by row.
    """
    rows = own_rows(target)  # all rows, if the target is not sharded
    # Nothing to shard: the target is not sharded, or the values are already. Parts in files are
    # still joined to a tensor.
    if not isinstance(target, DTensor) or isinstance(values, DTensor):
        return values.rows(rows) if isinstance(values, TensorParts) else values
    if isinstance(values, TensorParts):
        local_rows = values.rows(rows)
    else:
        # A clone, because a slice would keep the full tensor in memory.
        local_rows = values[rows.start : rows.stop].clone()
    return like_part(target, local_rows)


def like_part(target: DTensor, local_rows: Tensor, shape: tuple[int, ...] | None = None) -> DTensor:
    """Return a tensor that is sharded as `target`, from this process's rows of it.

    `shape` is the full tensor's, which has as many rows as the target; None: that of the target.
    """
    like = target if shape is None else torch.empty(shape, device="meta")
    return DTensor.from_local(
        local_rows.to(target.to_local().device),
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def own_rows(tensor: Tensor) -> RowRange:
    """Return the rows of a tensor that this process holds: all of them if it is not sharded."""
    rows = tensor.shape[0] if tensor.ndim else 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_shard():
                index = mesh.get_local_rank(dimension)
                return rows_of_part(rows, index, mesh.size(dimension))
    return RowRange(0, rows)


def rows_of_part(rows: int, index: int, count: int) -> RowRange:
    """Return the rows of part `index` of `count`. Example: 5 rows in 3 parts are 2, 2 and 1."""
    size = ceil(rows / count)
    start = min(rows, index * size)
    return RowRange(start, min(rows, start + size))


def shard_of(model: nn.Module) -> Shard | None:
    """Return this process's place among the parts of a sharded model. None: it is not sharded."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            # Processes along the mesh's last dimension hold the parts of one model. A first of two
            # dimensions is that of replicas (`make_mesh`).
            mesh = parameter.device_mesh
            replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
            return Shard(mesh.get_local_rank(mesh.ndim - 1), mesh.size(mesh.ndim - 1), replica)
    return None


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered on the computing device by all processes if sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    parts: Any = tensor
    if tensor.to_local().device.type != tensor.device_mesh.device_type:
        parts = tensor.to(tensor.device_mesh.device_type)
    full: Tensor = parts.full_tensor()
    return full


def gather_to(tensor: Tensor, owner: int, *, is_owner: bool) -> Callable[[], Tensor | None]:
    """Begin to send the parts of a tensor to the process that holds part `owner`.

    Returns a function that waits for the parts and returns the full tensor to the owner, None to
    the others. All processes that hold a part call both together. An unsharded tensor is not sent:
    the owner has it.
    """
    if not isinstance(tensor, DTensor):
        return lambda: tensor if is_owner else None
    dimension = tensor.device_mesh.ndim - 1  # the last one: processes with the parts of one model
    group = tensor.device_mesh.get_group(dimension)
    count = dist.get_world_size(group)
    rows, local = tensor.shape[0], tensor.to_local()
    if local.device.type != tensor.device_mesh.device_type:
        local = local.to(tensor.device_mesh.device_type)
    part_rows = ceil(rows / count)  # as `rows_of_part` divides them
    part = local
    if len(local) < part_rows:  # collectives need parts of one size: pad the last ones
        part = local.new_zeros(part_rows, *tensor.shape[1:])
        part[: len(local)] = local
    full = local.new_empty(part_rows * count, *tensor.shape[1:]) if is_owner else None
    parts = None if full is None else list(full.chunk(count))
    part = part.contiguous()
    work = dist.gather(part, parts, group=group, group_dst=owner, async_op=True)

    def wait() -> Tensor | None:
        """Wait for the parts; return the full tensor to its owner, without padding."""
        work.wait()
        # Naming `part` here keeps it alive until now, because the work reads it.
        return None if full is None or part is None else full[:rows]

    return wait


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def give_storage(model: nn.Module, device: torch.device | str) -> None:
    """Give weights on the meta device storage on `device`. Unsharded ties are lost."""
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)


def release_gathered(module: Any) -> None:
    """Drop gathered weights, which a forward pass without a backward pass leaves behind."""
    if isinstance(module, FSDPModule):
        module.reshard()


WHOLE = "policy.pt"
"""File of a checkpoint with the state of a policy that is not sharded."""
PART = "policy-{}.pt"
"""File with the state of one process of a sharded policy, by the index of its part."""


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True if this process holds only a part of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def read_state(folder: Path, shard: Shard | None = None) -> Any:
    """Read a policy's state, with its sharded tensors as TensorParts if several processes wrote it.

    `shard` is this process's place among those that hold the policy's parts. None: the policy is
    not sharded. The state may have been written by another number of processes than read it.
    """
    if (folder / WHOLE).exists():
        return read_tensors(folder / WHOLE)
    count = len(list(folder.glob(PART.format("*"))))
    if not count:
        raise CheckpointError(
            f"{folder}: has neither {WHOLE} nor {PART.format(0)}, which hold the optimizer. Resume "
            "from another checkpoint, or start a new run with model.path=<this folder>"
        )
    # If as many processes read the state as wrote it, this one needs the part of its own index.
    # Otherwise its rows may lie in any part. The files are mapped into memory, so that only the
    # rows that are used later are read.
    indices = [shard.index] if shard is not None and shard.count == count else list(range(count))
    paths = [folder / PART.format(index) for index in indices]
    parts = [read_tensors(path, mmap=True) for path in paths]
    source = str(paths[0]) if len(paths) == 1 else f"{paths[0]} to {paths[-1].name}"
    return _join(parts, indices, count, f"{source}: state")


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Read tensors and plain values that `torch.save` wrote. Raises NotRead for anything else."""
    with only_tensors(path):
        return torch.load(path, weights_only=True, mmap=mmap)


def own_part(state: Any, *, copies: bool = False) -> Any:
    """Return a state with each sharded tensor as ``{"part": …, "shape": …}``, on the CPU.

    The part is this process's, the shape the full tensor's. With `copies` the result shares no
    memory with the policy.
    """
    if isinstance(state, DTensor):
        part = state.to_local().detach().cpu()
        # torch.save writes all of the storage that a view belongs to.
        if copies or part.untyped_storage().nbytes() != part.nbytes:
            part = part.clone()
        return {"part": part, "shape": list(state.shape)}
    if isinstance(state, Tensor) and copies:
        return state.detach().cpu().clone()
    if isinstance(state, Mapping):
        return {name: own_part(value, copies=copies) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(own_part(value, copies=copies) for value in state)
    return state


def _join(parts: Sequence[Any], indices: Sequence[int], count: int, source: str) -> Any:
    """Join the states `parts` that the processes `indices`, successive ones of `count`, wrote.

    A sharded tensor becomes a TensorParts. `source` names files and key in errors.
    """
    first = parts[0]  # all states have the structure of the first
    # A sharded tensor, as `own_part` wrote it.
    if isinstance(first, dict) and first.keys() == {"part", "shape"}:
        shape = torch.Size(first["shape"])
        start = rows_of_part(shape[0], indices[0], count).start
        starts = accumulate((len(part["part"]) for part in parts), initial=start)
        tensors = [part["part"] for part in parts]
        # Not strict: the last of `starts` is the end.
        return TensorParts(list(zip(starts, tensors, strict=False)), shape, source)
    if isinstance(first, dict):
        return {
            name: _join([part[name] for part in parts], indices, count, f"{source}.{name}")
            for name in first
        }
    if isinstance(first, list | tuple):
        values = enumerate(zip(*parts, strict=True))
        return type(first)(
            _join(value, indices, count, f"{source}.{index}") for index, value in values
        )
    return first.clone() if isinstance(first, Tensor) else first


def shard_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's full state, sharded as the optimizer's parameters are."""
    if "parts" in state:  # several optimizers in one
        pairs = zip(optimizer.parts, state["parts"], strict=True)  # type: ignore[attr-defined]
        return {**state, "parts": [shard_optimizer_state(*pair) for pair in pairs]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_parameter: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        parameter, sharded = parameters[index], {}
        for name, value in values.items():
            # Moments have the shape of their parameter. A step counter stays as it is.
            is_tensor = isinstance(value, Tensor | TensorParts)
            is_moment = is_tensor and value.shape == parameter.shape
            sharded[name] = shard_like(parameter, value) if is_moment else value
        by_parameter[index] = sharded
    return {**state, "state": by_parameter}
