"""FSDP2: every process holds a part of each weight, of its gradient and of its optimizer state.

torch's `fully_shard` itself, layer by layer: accelerate's plugin for it is ignored where there is
no GPU (1.15), and does nothing that is needed beyond it. A layer's weights are gathered before it
runs and dropped after it; embeddings, the last norm and the head, which share weights, are one
group of their own that stays whole from the forward to the end of the backward pass.

Processes gather together: all of them run the same number of forward passes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
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
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer


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
class Parted:
    """A tensor in parts, which may lie in files: put together when it is used, and then dropped.

    A process that has a part of every tensor then never holds all of them.
    """

    parts: tuple[Tensor, ...]
    """They follow each other along the first dimension."""
    shape: torch.Size

    def whole(self) -> Tensor:
        """All of it."""
        return torch.cat(self.parts).reshape(self.shape)


def layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, by the names that transformers keeps of modules not to be split."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    return named or [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]


def whole_copy(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy that nothing trains and nothing shards, for an engine in this process."""
    copied: PreTrainedModel = copy.deepcopy(model).requires_grad_(False).to(device)
    return copied


def refresh(copied: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the sharded `model`'s weights, one gathered at a time, into a `whole_copy` of it.

    Tied weights are one parameter in both. Every process takes part.
    """
    targets = dict(copied.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            targets[name].copy_(whole(parameter))


def assign(target: Tensor, values: Tensor | Parted) -> None:
    """Copy all values of a tensor into it, or into this process's part of it."""
    with torch.no_grad():
        target.copy_(spread_like(target, values))


def spread_like(target: Tensor, values: Tensor | Parted) -> Tensor:
    """Split `values`, which every process has, as `target` is split: without communication."""
    values = values.whole() if isinstance(values, Parted) else values
    if not isinstance(target, DTensor) or isinstance(values, DTensor):
        return values
    mesh, placements = target.device_mesh, target.placements
    placed = values.to(target.to_local().device)
    return distribute_tensor(placed, mesh, placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; a sharded one is gathered by all processes together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def here(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; all of a tensor that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def settle(module: Any) -> None:
    """Drop what a forward pass without a backward one left gathered."""
    if isinstance(module, FSDPModule):
        module.reshard()
