"""FSDP2: every process holds a part of each weight, of its gradient and of its optimizer state.

Uses torch's `fully_shard`, layer by layer. accelerate's plugin for it is ignored without a GPU
(1.15) and adds nothing that is needed. A layer's weights are gathered before it runs and dropped
after it. Embeddings, the last norm and the head, which may share weights, form a group of their own
that stays gathered from the forward pass to the end of the backward pass.

All processes gather together, so all of them run the same number of forward passes.

In a checkpoint each process writes its part of the policy; any number of processes reads them.

policy-0.pt, policy-1.pt, …   like the policy.pt of an unsharded policy, but a tensor of which the
                              process has a part is ``{"part": tensor, "shape": [full shape]}``

Parts follow each other along the first dimension, in rank order. Readers map the files into memory
and join a tensor only where it is used (`TensorParts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agenttrain.training.checkpoint_files import only_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Settings of a policy that is sharded over all processes."""

    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in host memory; layers are copied to the GPU to
    compute."""


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor in parts, which may be mapped files; it is joined only where it is used.

    So a process that needs a part of every tensor never holds all of them.
    """

    parts: tuple[Tensor, ...]
    """Consecutive slices of the first dimension."""
    shape: torch.Size


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the decoder layers, by the class names that transformers does not split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    return named or [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def assign(target: Tensor, values: Tensor | TensorParts) -> None:
    """Copy a full tensor into `target`, or this process's part of it into a sharded `target`."""
    with torch.no_grad():
        target.copy_(shard_like(target, values))


def shard_like(target: Tensor, values: Tensor | TensorParts) -> Tensor:
    """Shard `values`, which every process has, as `target` is sharded; without communication."""
    if isinstance(values, TensorParts):
        values = torch.cat(values.parts).reshape(values.shape)
    if not isinstance(target, DTensor) or isinstance(values, DTensor):
        return values
    mesh, placements = target.device_mesh, target.placements
    placed = values.to(target.to_local().device)
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; all processes together gather one that is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor; all of it if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def release_gathered(module: Any) -> None:
    """Drop gathered weights, which a forward pass without a backward pass leaves behind."""
    if isinstance(module, FSDPModule):
        module.reshard()


WHOLE = "policy.pt"
PART = "policy-{}.pt"


def is_sharded(model: torch.nn.Module) -> bool:
    """Return True if this process holds only a part of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def read_state(folder: Path) -> Any:
    """Read the state of a policy, written by any number of processes.

    Tensors are on the CPU, as TensorParts if several processes wrote them.
    """
    if (folder / WHOLE).exists():
        return read_tensors(folder / WHOLE)
    count = len(list(folder.glob(PART.format("*"))))
    paths = [folder / PART.format(rank) for rank in range(count)]
    return _joined([read_tensors(path, mmap=True) for path in paths])


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Read tensors and plain values that `torch.save` wrote; raises NotRead for anything else."""
    with only_tensors(path):
        return torch.load(path, weights_only=True, mmap=mmap)


def own_part(state: Any) -> Any:
    """Replace each sharded tensor in a state by this process's part and the tensor's shape."""
    if isinstance(state, DTensor):
        # A copy: torch.save writes all of the storage that a view belongs to.
        return {"part": state.to_local().detach().cpu().clone(), "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {name: own_part(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(own_part(value) for value in state)
    return state


def _joined(parts: Sequence[Any]) -> Any:
    """Join the states that all processes wrote, in the order of their ranks."""
    first = parts[0]
    if isinstance(first, dict) and first.keys() == {"part", "shape"}:
        return TensorParts(tuple(part["part"] for part in parts), torch.Size(first["shape"]))
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, list | tuple):
        return type(first)(_joined(values) for values in zip(*parts, strict=True))
    return first.clone() if isinstance(first, Tensor) else first


def shard_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard an optimizer's state as its parameters are sharded."""
    if "parts" in state:
        pairs = zip(optimizer.parts, state["parts"], strict=True)  # type: ignore[attr-defined]
        return {**state, "parts": [shard_optimizer_state(part, of_part) for part, of_part in pairs]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_parameter: dict[int, dict[str, Any]] = {}
    for index, values in state["state"].items():
        own = by_parameter[index] = {}
        for name, value in values.items():
            tensor = isinstance(value, Tensor | TensorParts)
            alike = tensor and value.shape == parameters[index].shape
            own[name] = shard_like(parameters[index], value) if alike else value
    return {**state, "state": by_parameter}


def full_weights(model: PreTrainedModel, keep: bool) -> dict[str, Tensor]:
    """Return every weight by its name in `state_dict`, on the CPU, if `keep`; otherwise nothing.

    All processes gather one weight after the other. Tied weights are one tensor.
    """
    owners = dict(model.named_parameters(remove_duplicate=False))
    weights: dict[int, Tensor] = {}
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        key = id(owners.get(name, tensor))
        if key not in weights:
            gathered = full_tensor(tensor.detach())
            weights[key] = gathered.cpu() if keep else gathered.new_empty(0)
        named[name] = weights[key]
    return named if keep else {}
