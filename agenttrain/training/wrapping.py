"""How the processes that train one policy are put around it: alone, DDP, or sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, GradientAccumulationPlugin
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from agenttrain.training.logprobs import Scorer
from agenttrain.training.sharding import Sharding
from agenttrain.training.world import World


def make_accelerator(mixed_precision: str) -> Accelerator:
    """The devices of this run's processes; raises ValueError for fp16 without a GPU."""
    gpu = torch.cuda.is_available()
    if mixed_precision == "fp16" and not gpu:
        raise ValueError(
            "training.mixed_precision=fp16: needs a GPU, and there is none here. Set "
            "training.mixed_precision=bf16 or no."
        )
    return Accelerator(
        cpu=not gpu,
        mixed_precision=mixed_precision,
        # Named, because the environment (ACCELERATE_…) would decide them else.
        dynamo_backend="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
    )


def share_weights(model: nn.Module, world: World) -> None:
    """Give every process the main one's weights, whatever it drew or loaded itself.

    Before copies are made of them: DDP would do it too late for the reference and for the
    optimizer's float32 copies.
    """
    if world.size > 1:
        with torch.no_grad():
            for parameter in model.parameters():
                dist.broadcast(parameter, 0)


def wrap(scorer: Scorer, accelerator: Any, sharding: Sharding | None) -> Any:
    """The scorer as the processes call it together."""
    if sharding is not None:
        shard(scorer, accelerator, sharding)
        return scorer
    if scorer.model.config.get_text_config() is not scorer.model.config:
        # Text leaves the weights for pictures without a gradient, which DDP would wait for.
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    wrapped = accelerator.prepare_model(scorer)
    if isinstance(wrapped, DistributedDataParallel):
        # Buffers are constants here; to broadcast them would tie every forward pass to the others.
        # Set afterwards: as an argument it is deprecated, and accelerate 1.15 has no other.
        wrapped.broadcast_buffers = False
    return wrapped


def shard(scorer: Scorer, accelerator: Any, sharding: Sharding) -> None:
    """Shard in place, with accelerate's mixed precision and nothing else of it.

    Under bf16 weights cross between the processes in bf16, half as many bytes as in float32.
    """
    accelerator.prepare_model(scorer, device_placement=False, evaluation_mode=True)
    gathered = torch.bfloat16 if accelerator.mixed_precision == "bf16" else None
    sharding.apply(scorer, scorer.model, accelerator.device, gathered)
