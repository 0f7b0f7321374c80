"""Settings of the policy and its updates: weights, adapters, optimizer, batches, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Annotated, Any

from omegaconf import MISSING
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from agenttrain.types import ConfigError
from agenttrain.utils.data_fields import Data
from agenttrain.utils.names import did_you_mean
from agenttrain.utils.sections import (
    SETTINGS,
    InvalidSettings,
    Number,
    Quoted,
    Whole,
    choose,
    field_names,
    raise_problems,
    shown,
    validated,
)


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


@dataclass(config=SETTINGS)
class NoOptions:
    """A schedule without options."""


@dataclass(config=SETTINGS)
class CosineOptions:
    """Options of the schedules cosine and cosine_with_restarts."""

    num_cycles: Number | None = Field(default=None, ge=0)
    """Waves; None: half a wave, down to zero, or one restart."""


@dataclass(config=SETTINGS)
class CosineMinOptions(CosineOptions):
    """Options of cosine_with_min_lr; one of the first two is needed."""

    min_lr: Number | None = Field(default=None, ge=0)
    """Learning rate at the end."""
    min_lr_rate: Number | None = Field(default=None, ge=0, le=1)
    """The same as a share of optimizer.lr."""

    @model_validator(mode="after")
    def _check(self) -> CosineMinOptions:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise InvalidSettings(
                "optimizer.schedule=cosine_with_min_lr: set one of "
                "optimizer.schedule_options.min_lr and optimizer.schedule_options.min_lr_rate"
            )
        return self


@dataclass(config=SETTINGS)
class PolynomialOptions:
    """Options of the schedule polynomial."""

    lr_end: Number = Field(default=1e-7, ge=0)
    """Learning rate at the end, below optimizer.lr."""
    power: Number | None = Field(default=None, ge=0)
    """1: a line, which is the default."""


@dataclass(config=SETTINGS)
class InverseSqrtOptions:
    """Options of the schedule inverse_sqrt."""

    timescale: Number | None = Field(default=None, gt=0)
    """Steps over which the rate falls to 1 / sqrt(2) of itself; None: the steps of the warm-up."""


@dataclass(config=SETTINGS)
class StableDecayOptions(CosineOptions):
    """Options of the schedule warmup_stable_decay; the first is needed."""

    num_decay_steps: Whole | None = Field(default=None, ge=1)
    """Steps of the decay at the end."""
    min_lr_ratio: Number | None = Field(default=None, ge=0, le=1)
    """Share of optimizer.lr that is left at the end."""


SCHEDULE_OPTIONS: Mapping[Schedule, type[Any]] = {
    Schedule.constant: NoOptions,
    Schedule.linear: NoOptions,
    Schedule.cosine: CosineOptions,
    Schedule.cosine_with_restarts: CosineOptions,
    Schedule.cosine_with_min_lr: CosineMinOptions,
    Schedule.polynomial: PolynomialOptions,
    Schedule.inverse_sqrt: InverseSqrtOptions,
    Schedule.warmup_stable_decay: StableDecayOptions,
}
"""Keys of `optimizer.schedule_options`, by schedule. A default that is None is transformers'."""


@dataclass(config=SETTINGS)
class OptimizerConfig:
    """Settings that all optimizers have."""

    name: Data[str] = "adamw"
    """The optimizer; each has keys of its own beside those that all have."""
    lr: Number = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up."""
    weight_decay: Number = Field(default=0.0, ge=0)
    """Share of a weight, times lr, that every update takes off it; norms and biases are left alone
    by adamw and muon."""
    warmup_steps: Whole = Field(default=0, ge=0)
    """Steps of linear warm-up."""
    schedule: Data[Schedule] = Schedule.constant
    """Learning rate after the warm-up, by the names of transformers' schedules."""
    schedule_options: Data[dict[str, Any]] = field(default_factory=dict)
    """Options of the schedule, by transformers' names, e.g. {min_lr_rate: 0.1}."""
    max_grad_norm: Number = Field(default=1.0, gt=0)
    """Gradients are scaled down to this L2 norm."""

    @model_validator(mode="after")
    def _check(self) -> OptimizerConfig:
        """Check the options of the schedule, and its end against the learning rate."""
        key = "optimizer.schedule_options"
        options_class = SCHEDULE_OPTIONS[self.schedule]
        option_names = field_names(options_class)
        takes = f"it takes {', '.join(option_names)}" if option_names else "it takes none"
        unknown = [name for name in self.schedule_options if name not in option_names]
        problems = [
            f"{key}.{name}={shown(self.schedule_options[name])}: not an option of "
            f"optimizer.schedule={self.schedule}{did_you_mean(name, option_names)}; {takes}"
            for name in unknown
        ]
        valid_options = {n: value for n, value in self.schedule_options.items() if n not in unknown}
        options = None
        try:
            options = validated(options_class, valid_options, key)
        except ConfigError as error:
            problems += str(error).splitlines()
        # With a higher end, the schedule would raise the learning rate that it is to lower.
        min_lr, lr_end = getattr(options, "min_lr", None), getattr(options, "lr_end", None)
        if min_lr is not None and min_lr > self.lr:
            problems.append(
                f"{key}.min_lr={min_lr}: must be at most optimizer.lr={self.lr}; lower it or raise "
                "the rate"
            )
        if lr_end is not None and lr_end >= self.lr:
            problems.append(
                f"{key}.lr_end={lr_end}: must be below optimizer.lr={self.lr}, from which the rate "
                "falls to it"
            )
        raise_problems(problems)
        return self


Beta = Annotated[Number, Field(ge=0, lt=1)]


@dataclass(config=SETTINGS)
class AdamWSettings(OptimizerConfig):
    """AdamW."""

    betas: Data[tuple[Beta, Beta]] = (0.9, 0.99)
    """Decay rates of the two moments."""


@dataclass(config=SETTINGS)
class MuonSettings(AdamWSettings):
    """Muon for the matrices of the layers, AdamW for embeddings, the head, norms and biases."""

    name: Data[str] = "muon"
    momentum: Number = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon; `betas` are AdamW's."""


@dataclass(config=SETTINGS)
class SgdSettings(OptimizerConfig):
    """Plain gradient descent: it keeps nothing, and turns no rounding of a gradient into a step."""

    name: Data[str] = "sgd"


OPTIMIZERS: Mapping[str, type[OptimizerConfig]] = {
    "adamw": AdamWSettings,
    "muon": MuonSettings,
    "sgd": SgdSettings,
}


def optimizer_settings(section: Any) -> OptimizerConfig:
    """Return the section `optimizer` as the settings of the optimizer that it names."""
    return choose("optimizer", section, OPTIMIZERS)


class SharePrefix(StrEnum):
    """When the tokens that sequences have in common at their start are computed once."""

    auto = "auto"
    """Where the model's layers allow it and enough tokens are in common to gain from it."""
    always = "always"
    """However few tokens are in common; a model that cannot is refused."""
    never = "never"


class MixedPrecision(StrEnum):
    """Number format of accelerate's automatic mixed precision."""

    no = "no"
    bf16 = "bf16"
    fp16 = "fp16"


class ActivationCheckpointing(StrEnum):
    """Activations that are computed again in the backward pass instead of being kept."""

    auto = "auto"
    """The first of the others that fits the memory of the device."""
    none = "none"
    """All activations are kept."""
    blocks = "blocks"
    """Those of feed-forward blocks, which are MLPs and blocks of experts, and those of norms."""
    all = "all"
    """Those of whole layers, which keep their inputs alone."""


LEVELS = (
    ActivationCheckpointing.none,
    ActivationCheckpointing.blocks,
    ActivationCheckpointing.all,
)
"""Levels of activation checkpointing, from the fastest to the one with the smallest memory."""


@dataclass(config=SETTINGS)
class TrainingConfig:
    """How a step's rollouts become optimizer updates."""

    token_budget: Whole = Field(default=16384, ge=1)
    """Tokens of one microbatch; a shared prefix counts once, and a longer rollout is packed
    alone."""
    logits_budget_mb: Whole = Field(default=1024, ge=1)
    """Logits kept for the backward pass; above it they are computed again, tile by tile."""
    share_prefix: Data[SharePrefix] = SharePrefix.auto
    """Compute a common prefix of rollouts once: the same loss in other time and memory."""
    mixed_precision: Data[MixedPrecision] = MixedPrecision.no
    """accelerate's `no`, `bf16` or `fp16`."""
    activation_checkpointing: Data[ActivationCheckpointing] = ActivationCheckpointing.auto
    """Activations that are computed again in the backward pass: `none`, those of feed-forward
    `blocks` and norms, or `all`. `auto` takes the first of these that fits the memory by the
    estimate of `agenttrain plan`, or the next one if the first step needs more. The run's
    config.yaml has the one that was chosen. A resumed run keeps it, or takes another one that it is
    given."""
    compile: Data[bool] = False
    """Fuse the elementwise work of layers and head with torch.compile. On a GPU a step takes less
    time and memory; the first takes tens of seconds longer."""
    offload_during_rollouts: Data[bool] = False
    """Keep the optimizer's state and float32 copies in host memory but for the updates, so that an
    engine on the same GPU has their memory."""

    @model_validator(mode="after")
    def _check(self) -> TrainingConfig:
        if self.compile and self.activation_checkpointing is ActivationCheckpointing.blocks:
            raise_problems(
                [
                    "training.activation_checkpointing=blocks: a block of a compiled layer is part "
                    "of the layer's code (training.compile=true); set all or none, or "
                    "training.compile=false"
                ]
            )
        return self


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


class Quantization(StrEnum):
    """Storage of the linear layers of a frozen base model."""

    nf4 = "nf4"
    """4 bits for each number, two in a byte of uint8, and a scale for each 64
    (https://arxiv.org/abs/2305.14314)."""


class VisionTower(StrEnum):
    """Treatment of the part of a model that reads images."""

    frozen = "frozen"
    """Its weights stay; the features of an image are computed once."""
    trained = "trained"
    """It is trained with the rest."""


ALL_LINEAR = "all-linear"
"""Value of model.lora.targets for everything that can have adapters."""


@dataclass(config=SETTINGS)
class LoraSettings:
    """Low-rank adapters (https://arxiv.org/abs/2106.09685) instead of training every weight."""

    rank: Whole = 0
    """Rank of each adapter's matrices; 0: no adapters, all weights are trained."""
    alpha: Number = 32.0
    """An adapter's output is scaled by alpha / rank."""
    targets: Data[list[str]] = field(default_factory=lambda: [ALL_LINEAR])
    """Names of the modules with an adapter, e.g. [q_proj,v_proj]; all-linear: all linear layers
    that can have one, and packed experts, but no head and no router."""
    target_parameters: Data[list[str] | None] = None
    """Packed weights of experts with an adapter, e.g. [experts.gate_up_proj,experts.down_proj];
    None: all of them with targets=[all-linear], else none."""

    @model_validator(mode="after")
    def _check(self) -> LoraSettings:
        problems = []
        if self.rank < 0:
            problems.append(f"model.lora.rank={self.rank}: must be 0 (no adapters) or more")
        if self.rank > 0 and self.alpha <= 0:
            problems.append(f"model.lora.alpha={self.alpha}: must be more than 0")
        if self.rank > 0 and not self.targets and not self.target_parameters:
            problems.append(
                "model.lora.targets=[]: name the modules to adapt, e.g. [q_proj,v_proj]"
            )
        if ALL_LINEAR in self.targets and len(self.targets) > 1:
            problems.append(f"model.lora.targets={shown(self.targets)}: all-linear stands alone")
        defaults = {"alpha": 32.0, "targets": [ALL_LINEAR], "target_parameters": None}
        for name, default in defaults.items():
            value = getattr(self, name)
            if self.rank == 0 and value != default:
                problems.append(
                    f"model.lora.{name}={shown(value)}: has no effect with model.lora.rank=0, "
                    f"which trains all weights; add model.lora.{name}={shown(default)}, its "
                    "default, or set a rank"
                )
        raise_problems(problems)
        return self


@dataclass(config=SETTINGS)
class ModelConfig:
    """The policy: a folder that transformers can load, `bundled:<name>`, or a model of the hub."""

    path: Data[str] = MISSING
    """Folder with config.json, weights and tokenizer; `bundled:shop` is the packaged model;
    `org/name` one of the Hugging Face hub, if there is no such folder."""
    revision: Quoted = None
    """Branch, tag or commit of a model of the hub; None: main. config.yaml has its commit."""
    base_revision: Quoted = None
    """Branch, tag or commit of the base model, where model.path holds adapters of a model of the
    hub; None: the revision in adapter_config.json."""
    dtype: Data[Dtype] = Dtype.float32
    """Number format of the weights; the optimizer keeps float32 copies of others."""
    init: Data[Init] = Init.pretrained
    """Where the first weights come from; random ones are for `agenttrain sft`."""
    quantization: Data[Quantization | None] = None
    """Storage of the frozen linear layers under adapters; None: in `dtype`. nf4: 4 bits, by
    bitsandbytes (pip install 'agenttrain[4bit]')."""
    double_quantization: Data[bool] = True
    """With nf4 the scales of blocks are in 8 bits instead of 32: 4.13 bits a number, not 4.5."""
    lora: LoraSettings = field(default_factory=LoraSettings)
    vision: Data[VisionTower] = VisionTower.frozen
    """Training of the part that reads images, for a model that has one."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        problems = []
        if self.vision is VisionTower.trained and self.lora.rank:
            problems.append(
                f"model.vision=trained: model.lora.rank={self.lora.rank} trains adapters of the "
                "language model alone; leave one of them out"
            )
        key = f"model.quantization={self.quantization}"
        if self.quantization is not None and self.lora.rank == 0:
            problems.append(
                f"{key}: weights in 4 bits cannot be trained, and model.lora.rank=0 has no "
                "adapters; set a rank, e.g. model.lora.rank=32, or leave model.quantization out"
            )
        if self.quantization is not None and self.init is Init.random:
            problems.append(
                f"{key}: model.init=random draws a base model that would never be trained; leave "
                "one of them out"
            )
        if self.quantization is None and not self.double_quantization:
            problems.append(
                "model.double_quantization=false: has no effect without model.quantization=nf4; "
                "leave it out"
            )
        raise_problems(problems)
        return self


class WeightSyncMode(StrEnum):
    """Treatment of rollouts in flight when weights change."""

    drain = "drain"
    """They end first."""
    abort_resume = "abort_resume"
    """They continue after the new weights have read all their tokens again."""
    in_flight = "in_flight"
    """They continue with their KV cache, which then holds states of old and new weights."""


class Transport(StrEnum):
    """How weights reach the servers."""

    auto = "auto"
    """lora if servers read the model's adapters as the trainer does, else files. They do not for
    adapters of experts, or of a base in 4 bits: these are merged into the weights."""
    files = "files"
    """All weights, with adapters merged into them, while a server is paused."""
    lora = "lora"
    """The adapters alone, each version under a name of its own, which a request names. So nothing
    is paused."""
    nccl = "nccl"
    """All weights, by a broadcast from the trainer's GPU to those of the servers. It has never been
    run on GPUs."""


@dataclass(config=SETTINGS)
class WeightSyncConfig:
    """How the engine gets new weights."""

    transport: Data[Transport] = Transport.auto
    """How weights reach the servers."""
    mode: Data[WeightSyncMode] = WeightSyncMode.drain
    """Treatment of rollouts in flight when weights change. Servers that are sent the adapters alone
    need none."""
    tolerance: Number | None = Field(default=None, gt=0)
    """Limit, in nats, of the gap between the log-probabilities of engine and policy after a sync,
    over a text that the engine sampled, for an engine with weights of its own. The mean gap or its
    90 % quantile has to be within it. In float32 on a CPU the largest gap has to be. None: 1e-3 in
    float32 on a CPU, else 0.1."""
    folder: str | None = None
    """Folder of the files by which weights reach servers, two versions of all weights. None: one in
    memory (/dev/shm) if they fit there, else in the run folder; always in the run folder with
    servers.admin_urls."""


@dataclass(config=SETTINGS)
class CheckpointConfig:
    """Checkpoints under <run>/checkpoints."""

    every: Whole | None = Field(default=20, ge=1)
    """Steps between checkpoints; None: only at the end."""
    keep: Whole = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    in_background: Data[bool] = False
    """Write a copy of the policy while training goes on. The copy takes host memory: weights and
    optimizer once more. The next checkpoint waits for the one before."""
    keep_best: Data[bool] = False
    """Also keep the checkpoint with the best sampled reward, of the evaluations while training
    (`eval.every`) and after it, under checkpoints/best; among equals the earlier one."""
