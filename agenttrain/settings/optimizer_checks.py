"""Checks of the optimizer, its schedule, and the weights' formats and adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from agenttrain.engines.registry import OutsideEngine, spec_of
from agenttrain.settings.run_config import RunConfig
from agenttrain.tools.config import is_number
from agenttrain.training.config import (
    Dtype,
    ModelConfig,
    OptimizerConfig,
    OptimizerName,
    Schedule,
)
from agenttrain.utils.names import did_you_mean

OPTIONS: dict[Schedule, tuple[str, ...]] = {
    Schedule.cosine: ("num_cycles",),
    Schedule.cosine_with_restarts: ("num_cycles",),
    Schedule.cosine_with_min_lr: ("min_lr", "min_lr_rate", "num_cycles"),
    Schedule.polynomial: ("lr_end", "power"),
    Schedule.inverse_sqrt: ("timescale",),
    Schedule.warmup_stable_decay: ("num_decay_steps", "min_lr_ratio", "num_cycles"),
}
"""Options in `optimizer.schedule_options`, by schedule."""
POLYNOMIAL_END = 1e-7
"""Default of `lr_end`."""


def optimizer_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with `optimizer`."""
    optimizer = config.optimizer
    warmup = optimizer.warmup_steps
    if 0 < config.steps <= warmup:
        yield (
            f"optimizer.warmup_steps={warmup}: the warm-up would not end in steps={config.steps}; "
            "lower it (0: no warm-up), or raise steps"
        )
    betas = optimizer.betas
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        shown = ",".join(str(beta) for beta in betas)
        yield f"optimizer.betas=[{shown}]: must be two numbers from 0 to below 1, e.g. [0.9,0.99]"
    if not 0 <= optimizer.momentum < 1:
        yield f"optimizer.momentum={optimizer.momentum}: must be from 0 to below 1"
    unused = optimizer.momentum != OptimizerConfig.momentum
    if optimizer.name is not OptimizerName.muon and unused:
        yield f"optimizer.momentum={optimizer.momentum}: is Muon's; add optimizer=muon"
    if optimizer.name is OptimizerName.sgd and tuple(betas) != OptimizerConfig.betas:
        yield f"optimizer.betas={list(betas)}: are AdamW's; add optimizer=adamw"
    yield from _schedule(optimizer, config.steps)


def _schedule(optimizer: OptimizerConfig, steps: int) -> Iterator[str]:
    known = OPTIONS.get(optimizer.schedule, ())
    for name, value in optimizer.schedule_options.items():
        key = f"optimizer.schedule_options.{name}={value}"
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            yield (
                f"{key}: not an option of optimizer.schedule={optimizer.schedule}"
                f"{did_you_mean(name, known)}; {takes}"
            )
        elif not is_number(value, whole=False):
            yield f"{key}: must be a number"
        elif value < 0:
            yield f"{key}: must be 0 or more"
    options = optimizer.schedule_options
    # Options that would raise the learning rate where it is to fall, or divide by nothing.
    defaults = {"lr_end": POLYNOMIAL_END} if optimizer.schedule is Schedule.polynomial else {}
    for name, value in {**defaults, **options}.items():
        key, lr = f"optimizer.schedule_options.{name}={value}", optimizer.lr
        if name not in known or not is_number(value, whole=False):
            continue
        if name in ("min_lr_rate", "min_lr_ratio") and value > 1:
            yield f"{key}: is a share of optimizer.lr, so it is at most 1"
        if name == "min_lr" and value > lr:
            yield f"{key}: must be at most optimizer.lr={lr}; lower it or raise the rate"
        if name == "lr_end" and not value < lr:
            yield f"{key}: must be below optimizer.lr={lr}, from which the rate falls to it"
        if name == "timescale" and value == 0:
            yield f"{key}: must be more than 0"
    if optimizer.schedule is Schedule.warmup_stable_decay:
        decay = options.get("num_decay_steps")
        left = steps - optimizer.warmup_steps
        if not isinstance(decay, int) or not 1 <= decay <= left:
            yield (
                f"optimizer.schedule_options.num_decay_steps={decay}: "
                f"optimizer.schedule=warmup_stable_decay needs a whole number from 1 to {left}, "
                "the steps after the warm-up"
            )
    if optimizer.schedule is Schedule.cosine_with_min_lr and not (
        ("min_lr" in options) ^ ("min_lr_rate" in options)
    ):
        yield (
            "optimizer.schedule=cosine_with_min_lr: set one of "
            "optimizer.schedule_options.min_lr and optimizer.schedule_options.min_lr_rate"
        )


def weight_problems(config: RunConfig) -> Iterator[str]:
    """Yield what is wrong with the format of the weights and with their adapters."""
    model, mixed = config.model, config.training.mixed_precision
    if model.dtype is Dtype.bfloat16 and mixed != "no":
        yield (
            f"training.mixed_precision={mixed}: the weights are model.dtype=bfloat16 already; set "
            "training.mixed_precision=no, or model.dtype=float32"
        )
    lora = model.lora
    if lora.rank < 0:
        yield f"model.lora.rank={lora.rank}: must be 0 (no adapters) or more"
    if lora.rank > 0 and lora.alpha <= 0:
        yield f"model.lora.alpha={lora.alpha}: must be more than 0"
    if lora.rank > 0 and not lora.targets:
        yield "model.lora.targets=[]: name the modules to adapt, e.g. [q_proj,v_proj]"
    if "all-linear" in lora.targets and len(lora.targets) > 1:
        yield f"model.lora.targets={lora.targets}: all-linear stands alone"
    defaults = type(lora)()
    for name in ("alpha", "targets"):
        value = getattr(lora, name)
        if lora.rank == 0 and value != getattr(defaults, name):
            yield f"model.lora.{name}={value}: has no effect with model.lora.rank=0; set the rank"
    yield from _adapters_there(model)


def _adapters_there(model: ModelConfig) -> Iterator[str]:
    """Check rank and alpha against those of a folder of adapters."""
    file = Path(model.path).expanduser() / "adapter_config.json"
    if not file.is_file():
        return
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        rank, alpha = saved["r"], float(saved["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        yield f"model.path={model.path}: adapter_config.json in it is not peft's of LoRA ({error})"
        return
    if (rank, alpha) != (model.lora.rank, model.lora.alpha):
        yield (
            f"model.lora.rank={model.lora.rank} model.lora.alpha={model.lora.alpha:g}: model.path "
            f"holds other adapters; set model.lora.rank={rank} model.lora.alpha={alpha:g} to go on "
            "with them, or merge them first (agenttrain export)"
        )


def float32_on_gpu(config: RunConfig) -> str | None:
    """Name the parts of a run that a GPU would compute in float32, and the remedy."""
    notes = []
    if config.model.dtype is Dtype.float32 and config.training.mixed_precision == "no":
        notes.append(
            "model.dtype=float32 with training.mixed_precision=no trains without fused attention "
            "and the fast units of 16 bits; set model.dtype=bfloat16 (the optimizer keeps float32 "
            "copies), or training.mixed_precision=bf16"
        )
    if not isinstance(config.engine, OutsideEngine):
        notes += spec_of(config.engine).gpu_notes(config.engine)
    return f"note: on a GPU {'; '.join(notes)}" if notes else None
