"""Settings of the policy and its updates: weights, adapters, optimizer, batches, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from omegaconf import MISSING


class OptimizerName(StrEnum):
    """Algorithm that updates the weights."""

    adamw = "adamw"
    muon = "muon"
    """Muon for the matrices of the layers, AdamW for embeddings, the head, norms and biases."""
    sgd = "sgd"
    """Plain gradient descent: it keeps nothing, and turns no rounding of a gradient into a step."""


class Schedule(StrEnum):
    """Learning rate after the warm-up: transformers' schedules, by their names."""

    constant = "constant"
    linear = "linear"
    """Down to zero after the last step."""
    cosine = "cosine"
    """Down to zero after the last step."""
    cosine_with_restarts = "cosine_with_restarts"
    cosine_with_min_lr = "cosine_with_min_lr"
    """Down to `min_lr` or `min_lr_rate` of schedule_options."""
    polynomial = "polynomial"
    inverse_sqrt = "inverse_sqrt"
    warmup_stable_decay = "warmup_stable_decay"
    """Flat, then down within the last `num_decay_steps` of schedule_options."""


class SharePrefix(StrEnum):
    """When the rollouts of a group are computed with their common prompt once."""

    auto = "auto"
    """Where the model's layers allow it and the prompt is long enough to gain from it."""
    always = "always"
    """Whatever the prompt's length; a model that cannot is refused."""
    never = "never"


@dataclass
class OptimizerConfig:
    """The optimizer and its schedule."""

    name: OptimizerName = OptimizerName.adamw
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.99)
    """Decay rates of AdamW's moments."""
    momentum: float = 0.95
    """Momentum of Muon."""
    weight_decay: float = 0.0
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: Schedule = Schedule.constant
    schedule_options: dict[str, Any] = field(default_factory=dict)
    """Options of the schedule, by transformers' names, e.g. {min_lr_rate: 0.1}."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this L2 norm."""


@dataclass
class TrainingConfig:
    """How a step's rollouts become optimizer updates."""

    token_budget: int = 16384
    """Tokens of one microbatch, a shared prompt's once; a longer rollout is one alone."""
    logits_budget_mb: int = 1024
    """Logits kept for the backward pass; above it they are computed again, tile by tile."""
    share_prefix: SharePrefix = SharePrefix.auto
    """The loss is the same; time and memory are not."""
    mixed_precision: str = "no"
    """accelerate's `no`, `bf16` or `fp16`."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward pass instead of keeping its activations."""


class Dtype(StrEnum):
    """Number format of the policy's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Init(StrEnum):
    """Where a run's first weights come from."""

    pretrained = "pretrained"
    """The files in `model.path`."""
    random = "random"
    """Drawn with `seed`, of the sizes that its config.json says; for `agenttrain sft`."""


@dataclass
class LoraSettings:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) instead of training every weight."""

    rank: int = 0
    """Rank of each adapter's matrices; 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    """An adapter's output is scaled by alpha / rank."""
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    """Names of the modules with an adapter, e.g. [q_proj,v_proj]; all-linear: all but the head."""


@dataclass
class ModelConfig:
    """The policy. `path` is a folder that transformers can load, or `bundled:<name>`."""

    path: str = MISSING
    """Folder with config.json, weights and tokenizer; `bundled:shop` is the packaged model."""
    dtype: Dtype = Dtype.float32
    """Number format of the weights; the optimizer keeps float32 copies of others."""
    init: Init = Init.pretrained
    lora: LoraSettings = field(default_factory=LoraSettings)


class WeightSyncMode(StrEnum):
    """Treatment of rollouts in flight when weights change."""

    drain = "drain"
    """They end first."""
    abort_resume = "abort_resume"
    """They go on, and the new weights read all their tokens again."""
    in_flight = "in_flight"
    """They go on with the keys and values that they have, of both weights."""


@dataclass
class WeightSyncConfig:
    """How the engine gets new weights."""

    mode: WeightSyncMode = WeightSyncMode.drain
    tolerance: float | None = None
    """Gap of log-probabilities, in nats, up to which engine and policy agree after a sync, for an
    engine with weights of its own; None: 0.1, for both the mean and the 90 % quantile over a text
    that the engine sampled; in float32 on a CPU 1e-3, for the largest."""


@dataclass
class CheckpointConfig:
    """Checkpoints under <run>/checkpoints."""

    every: int | None = 20
    """Steps between checkpoints; None: only at the end."""
    keep: int = 2
    """Newest checkpoints kept."""
    keep_best: bool = False
    """Also keep the best by the sampled reward of the evaluations while training (`eval.every`) and
    after it, under checkpoints/best; of equals the earlier one."""
