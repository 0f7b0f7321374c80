"""Wrapping of the policy for the processes that train it: none, DDP, or FSDP2."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.nn.parallel import DistributedDataParallel

from agenttrain.engines.language_model import encoder_weights
from agenttrain.engines.mixers import stays_float32
from agenttrain.training.logprobs import Scorer
from agenttrain.training.quantization import scales
from agenttrain.training.sharding import Sharding, layers
from agenttrain.training.world import World
from agenttrain.types import ConfigError


def make_accelerator(mixed_precision: str) -> Accelerator:
    """Return the accelerator of this process. Raises ConfigError for fp16 without a GPU."""
    gpu = torch.cuda.is_available()
    if mixed_precision == "fp16" and not gpu:
        raise ConfigError(
            "training.mixed_precision=fp16: needs a GPU, and there is none here. Set "
            "training.mixed_precision=bf16 or no."
        )
    return Accelerator(
        cpu=not gpu,
        mixed_precision=mixed_precision,
        # Set here, or environment variables (ACCELERATE_…) would decide.
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )


def share_weights(model: nn.Module, world: World) -> None:
    """Copy the main process's weights into every process, in place.

    It is called before the model is copied for the reference and the sampler. Weights on the meta
    device are read later, by each process. `scales` are those of quantized weights.
    """
    if world.size > 1:
        with torch.no_grad():
            for tensor in chain(model.parameters(), scales(model)):
                if not tensor.is_meta:
                    dist.broadcast(tensor, 0)


def wrap(scorer: Scorer, accelerator: Any, sharding: Sharding | None) -> Any:
    """Return the scorer as the processes call it together: sharded in place, or in DDP."""
    if sharding is not None:
        shard(scorer, accelerator, sharding)
        return scorer
    if any(weight.requires_grad for weight in encoder_weights(scorer.model).values()):
        # Text alone gives encoders no gradient, and DDP would wait for one.
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    module = accelerator.prepare_model(scorer)
    if isinstance(module, DistributedDataParallel):
        # Buffers are constants here; broadcasting them would synchronise every forward pass. Set on
        # the instance because accelerate 1.15 only offers the deprecated argument.
        module.broadcast_buffers = False
    return module


def make_mesh(device_type: str, sharding: Sharding) -> DeviceMesh:
    """Return the mesh of all processes, with a dimension of replicas if nodes shard by themselves.

    Raises ConfigError for uneven nodes.
    """
    size, within = dist.get_world_size(), sharding.within
    if within is None or within == size:
        return init_device_mesh(device_type, (size,))
    if size % within:
        raise ConfigError(
            f"distributed.shard_within=node: {size} processes cannot be divided into nodes of "
            f"{within}; start as many on every node, or set distributed.shard_within=run"
        )
    names = ("replicate", "shard")
    return init_device_mesh(device_type, (size // within, within), mesh_dim_names=names)


def shard(scorer: Scorer, accelerator: Any, sharding: Sharding) -> None:
    """Shard the weights of `scorer` in place, by torch's FSDP2 (`fully_shard`).

    Gradients are summed in float32 whatever the format of the weights. Under bf16, weights are
    gathered in bf16, half the bytes of float32, and layers compute in it, except those that
    `stays_float32` names.
    """
    # Of accelerate only its mixed precision: with `evaluation_mode` it does not wrap in DDP.
    accelerator.prepare_model(scorer, device_placement=False, evaluation_mode=True)
    gather_dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    if not dist.is_initialized():  # a single process, which is "sharded" to offload its weights
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    device = accelerator.device
    mesh = make_mesh(device.type, sharding)
    precision = MixedPrecisionPolicy(param_dtype=gather_dtype, reduce_dtype=torch.float32)
    offload = OffloadPolicy()
    if sharding.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    # Weights that are gathered in float32 although the others are gathered in bf16.
    uncast: set[nn.Parameter] = set()
    if gather_dtype is not None:
        uncast = {w for name, w in scorer.model.named_parameters() if stays_float32(name)}
    # The layers first: the scorer then takes the weights that are in no layer.
    for module in (*layers(scorer.model), scorer):
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=precision,
            offload_policy=offload,
            ignored_params=uncast,
        )
    # Then the modules that hold weights of `uncast`, for these weights alone. Not before the
    # layers: `fully_shard` leaves out modules that are sharded already, with all their weights.
    for module in scorer.model.modules():
        if uncast.isdisjoint(module.parameters(recurse=False)):
            continue
        fully_shard(
            module,
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32),
            offload_policy=offload,
            ignored_params={*module.parameters()} - uncast,
        )
    # `inside` calls a function of the model. Gather weights for it as for `forward`.
    register_fsdp_forward_method(scorer, "inside")
