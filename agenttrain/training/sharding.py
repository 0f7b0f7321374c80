"""FSDP2: every process holds a part of each weight, of its gradient and of its optimizer state.

torch's `fully_shard` itself, layer by layer: accelerate's plugin for it is ignored where there is
no GPU (1.15), and does nothing that is needed beyond it. A layer's weights are gathered before it
runs and dropped after it; embeddings, the last norm and the head, which share weights, are one
group of their own that stays whole from the forward to the end of the backward pass.

Processes gather together: all of them run the same number of forward passes.

In a checkpoint each process writes its part of the policy, and any number of processes reads them.

policy-0.pt, policy-1.pt, …   what policy.pt holds of a policy that is not sharded; a tensor that
                              the process has a part of is ``{"part": tensor, "shape": [all]}``

Parts follow each other along the first dimension, in the order of the processes. Readers map the
files into memory, and put a tensor together where it is used (`TensorParts`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agenttrain.training.checkpoint_files import only_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a policy is sharded over all processes."""

    cpu_offload: bool = False
    """Weights, gradients and optimizer stay in the host's memory; a layer visits the GPU."""

    def apply(
        self,
        scorer: nn.Module,
        model: PreTrainedModel,
        device: torch.device,
        gathered_dtype: torch.dtype | None = None,
    ) -> None:
        """Shard the weights of `scorer`, a module around `model`, in place.

        Gradients are summed in float32 whatever the weights are. Weights are gathered in
        `gathered_dtype` (None: as they are), in which the layers then compute. `scorer.inside` may
        be called as `scorer.forward` may.
        """
        if not dist.is_initialized():  # one process, which may still want to offload
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=gathered_dtype, reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if self.cpu_offload:
            offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        # The layers first: the scorer takes what is in none of them.
        for module in (*layers(model), scorer):
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload)
        register_fsdp_forward_method(scorer, "inside")


@dataclass(frozen=True, slots=True)
class TensorParts:
    """A tensor in parts, which may lie in files: put together when it is used, and then dropped.

    A process that has a part of every tensor then never holds all of them.
    """

    parts: tuple[Tensor, ...]
    """They follow each other along the first dimension."""
    shape: torch.Size

    def full_tensor(self) -> Tensor:
        """All of it."""
        return torch.cat(self.parts).reshape(self.shape)


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, by the names that transformers keeps of modules not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    return named or [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def unsharded_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy that nothing trains and nothing shards, for an engine in this process."""
    copied: PreTrainedModel = copy.deepcopy(model).requires_grad_(False).to(device)
    return copied


def copy_full_weights(copied: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the sharded `model`'s weights, one gathered at a time, into a `unsharded_copy` of it.

    Tied weights are one parameter in both. Every process takes part.
    """
    targets = dict(copied.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            targets[name].copy_(full_tensor(parameter))


def assign(target: Tensor, values: Tensor | TensorParts) -> None:
    """Copy all values of a tensor into it, or into this process's part of it."""
    with torch.no_grad():
        target.copy_(shard_like(target, values))


def shard_like(target: Tensor, values: Tensor | TensorParts) -> Tensor:
    """Split `values`, which every process has, as `target` is split: without communication."""
    values = values.full_tensor() if isinstance(values, TensorParts) else values
    if not isinstance(target, DTensor) or isinstance(values, DTensor):
        return values
    mesh, placements = target.device_mesh, target.placements
    placed = values.to(target.to_local().device)
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a tensor; a sharded one is gathered by all processes together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def release_gathered(module: Any) -> None:
    """Drop what a forward pass without a backward one left gathered."""
    if isinstance(module, FSDPModule):
        module.reshard()


WHOLE = "policy.pt"
PART = "policy-{}.pt"


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether this process holds only a part of the model's weights."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def write_part(state: Any, folder: Path, rank: int) -> None:
    """Write this process's part of a policy's state."""
    torch.save(_parted(state), folder / PART.format(rank))


def read_state(folder: Path) -> Any:
    """The state of a policy, however many processes wrote it; tensors are on the CPU, and Parted
    where several processes wrote them."""
    if (folder / WHOLE).exists():
        return read_tensors(folder / WHOLE)
    count = len(list(folder.glob(PART.format("*"))))
    paths = [folder / PART.format(rank) for rank in range(count)]
    return _joined([read_tensors(path, mmap=True) for path in paths])


def read_tensors(path: Path, *, mmap: bool = False) -> Any:
    """Read tensors and plain values that `torch.save` wrote; raises NotRead for anything else."""
    with only_tensors(path):
        return torch.load(path, weights_only=True, mmap=mmap)


def _parted(state: Any) -> Any:
    """Replace each sharded tensor in a state by this process's part and the tensor's shape."""
    if isinstance(state, DTensor):
        # A copy: a part that is a view would be written with all that it is a view of.
        return {"part": state.to_local().detach().cpu().clone(), "shape": list(state.shape)}
    if isinstance(state, Mapping):
        return {name: _parted(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(_parted(value) for value in state)
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
    """Split an optimizer's state as its parameters are split."""
    if "parts" in state:
        pairs = zip(optimizer.parts, state["parts"], strict=True)  # type: ignore[attr-defined]
        return {**state, "parts": [shard_optimizer_state(part, of_part) for part, of_part in pairs]}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def of_parameter(index: int, value: Any) -> Any:
        alike = isinstance(value, Tensor | TensorParts) and value.shape == parameters[index].shape
        return shard_like(parameters[index], value) if alike else value

    by_parameter = {
        index: {name: of_parameter(index, value) for name, value in values.items()}
        for index, values in state["state"].items()
    }
    return {**state, "state": by_parameter}


def full_weights(model: PreTrainedModel, keep: bool) -> dict[str, Tensor]:
    """Every weight by its name in `state_dict`, on the CPU, where `keep`; nothing elsewhere.

    All processes gather one weight after the other; tied weights are one tensor.
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
