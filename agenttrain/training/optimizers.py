"""Optimizers and learning-rate schedules: AdamW, Muon with AdamW, SGD.

`MasterWeights` updates float32 copies of weights in a shorter format.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from agenttrain.training.config import (
    AdamWSettings,
    MuonSettings,
    OptimizerConfig,
    Schedule,
    SgdSettings,
)
from agenttrain.training.sharding import assign, local_part
from agenttrain.types import ConfigError
from agenttrain.utils.garbage import no_garbage_collection


def build_optimizer(model: PreTrainedModel, config: OptimizerConfig) -> Optimizer:
    """Return the optimizer of the trainable weights.

    A weight in bfloat16 has 8 significant bits: an update below 1/256 of it would be lost. The
    optimizer therefore updates float32 copies and rounds them into the model.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    # Detached, so that a copy is a leaf tensor with a gradient of its own.
    masters = {
        name: p if p.dtype is torch.float32 else p.detach().float().requires_grad_()
        for name, p in trainable.items()
    }
    optimizer = BUILDERS[type(config)](masters, model, config)
    pairs = [(p, masters[name]) for name, p in trainable.items() if masters[name] is not p]
    return MasterWeights(optimizer, pairs) if pairs else optimizer


def _sgd(parameters: Mapping[str, Tensor], _: PreTrainedModel, config: SgdSettings) -> SGD:
    return SGD(parameters.values(), lr=config.lr, weight_decay=config.weight_decay)


def _muon(
    parameters: Mapping[str, Tensor], model: PreTrainedModel, config: MuonSettings
) -> Optimizer:
    """Return Muon for the layers' matrices, joined with AdamW for all other parameters.

    `parameters` may be float32 copies: they are told apart by the names of the model's weights.
    """
    # Muon is for matrices other than the embeddings and the head.
    embedding_and_head = {
        id(weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
        if module is not None
        for weight in module.parameters()
    }
    matrix_names = {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and id(parameter) not in embedding_and_head
    }
    matrices = [p for name, p in parameters.items() if name in matrix_names]
    remaining = {name: p for name, p in parameters.items() if name not in matrix_names}
    if not matrices:
        raise ConfigError(
            "optimizer=muon: no trainable matrix in the model's layers; set optimizer=adamw"
        )
    muon = Muon(
        matrices,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        # Updates of AdamW's size, so that one learning rate serves both
        # (https://arxiv.org/abs/2502.16982, section 2.2).
        adjust_lr_fn="match_rms_adamw",
    )
    return Together([muon, _adamw(remaining, model, config)]) if remaining else muon


def _adamw(parameters: Mapping[str, Tensor], _: PreTrainedModel, config: AdamWSettings) -> AdamW:
    """Return AdamW. Norms and biases (fewer than two dimensions) have no weight decay.

    The model is of no use here, but every entry of `BUILDERS` gets it.
    """
    weights = parameters.values()
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = config.betas
    return AdamW(groups, lr=config.lr, betas=(beta1, beta2))


BUILDERS: Mapping[type[OptimizerConfig], Callable[..., Optimizer]] = {
    AdamWSettings: _adamw,
    MuonSettings: _muon,
    SgdSettings: _sgd,
}
"""Settings class -> function of (parameters, model, settings) that builds the optimizer."""


class _Wrapper(Optimizer):
    """Optimizer that joins others (`parts`) and shares their parameter groups."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([p for part in parts for g in part.param_groups for p in g["params"]], {})
        # The same dictionaries: a learning rate set in them is set in the parts.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the weights of each part. Closures are not supported."""
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading made new dictionaries in each part.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


class Together(_Wrapper):
    """Several optimizers of different parameters as one."""


class MasterWeights(_Wrapper):
    """Optimizer of float32 copies: sums gradients into them and rounds them back into the model.

    `Policy.backward` calls `fold` after every backward pass, and `step` ends an update.
    """

    def __init__(self, optimizer: Optimizer, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take pairs of (weight of the model, copy that `optimizer` updates)."""
        self.pairs = list(pairs)
        super().__init__([optimizer])

    @torch.no_grad()
    def fold(self) -> None:
        """Move the gradients of 16-bit weights to their float32 copies and sum them there.

        Called after every backward pass: sums of several in 16 bits would be rounded each time.
        """
        sums: list[Tensor] = []
        terms: list[Tensor] = []
        for weight, master in self.pairs:
            if weight.grad is None:
                continue
            if master.grad is None:
                # Converted one by one, so that only one gradient is in memory twice.
                master.grad = weight.grad.float()
            else:
                sums.append(local_part(master.grad))
                terms.append(local_part(weight.grad))
            weight.grad = None
        if sums:
            torch._foreach_add_(sums, terms)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update the copies, then round them into the model's weights."""
        self.fold()  # for a caller that has not done so after its last backward pass
        super().step(closure)
        weights, masters = zip(*self.pairs, strict=True)
        torch._foreach_copy_([*map(local_part, weights)], [*map(local_part, masters)])
        for master in masters:
            master.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the copies and of the model's weights."""
        super().zero_grad(set_to_none)
        for weight, _ in self.pairs:
            weight.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state and the copies."""
        return {**super().state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        super().load_state_dict(state_dict)
        for (_, master), values in zip(self.pairs, state_dict["masters"], strict=True):
            assign(master, values)


@cache
def _import_get_scheduler() -> Callable[..., Any]:
    """Import peft's thousand modules with transformers' function, once, in the first step."""
    with no_garbage_collection():
        from transformers import get_scheduler
    return get_scheduler


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the learning rate of a step, 1 … steps, by one of transformers' schedules.

    It is a pure function, so that a resumed run needs no saved schedule.

    transformers gives the first step a rate of 0, which would waste its rollouts. Here step n has
    the rate that transformers gives to step n + 1: a warm-up begins at 1 / warmup_steps, and a
    decay reaches 0 after the last step.

    Example: lr 1, 2 steps of warm-up, linear over 6: .5, 1, .8, .6, .4, .2.
    """
    warmup_steps = max(config.warmup_steps, 1)
    warmup = min(step / warmup_steps, 1.0)
    # These two are written here, because an import of transformers' takes a second of CPU time.
    if config.schedule is Schedule.constant:
        return config.lr * warmup
    if config.schedule is Schedule.linear:
        decay = (steps + 1 - step) / max(steps + 1 - warmup_steps, 1)
        return config.lr * max(min(warmup, decay), 0.0)
    get_scheduler = _import_get_scheduler()
    scheduler = get_scheduler(
        str(config.schedule),
        # transformers reads the base rate from an optimizer (for `min_lr`).
        SGD([torch.zeros(1)], lr=config.lr),
        num_warmup_steps=warmup_steps,
        num_training_steps=steps + 1,
        scheduler_specific_kwargs=dict(config.schedule_options),
    )
    assert isinstance(scheduler, LambdaLR)
    factor: float = scheduler.lr_lambdas[0](step)
    return config.lr * factor
