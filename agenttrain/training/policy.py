"""The policy: the model that is trained, its optimizer, and its frozen reference.

Shapes: S sampled tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.algorithms.kl import kl_estimate
from agenttrain.algorithms.loss import LossInputs, mean_parts, policy_loss
from agenttrain.config.schema import AlgorithmConfig, KlIn, OptimizerConfig, TrainingConfig
from agenttrain.training.averages import Averages
from agenttrain.training.batch import Microbatch, Row, make_row, pack, split, stand_in
from agenttrain.training.credit import assign_advantages, has_gradient, weigh
from agenttrain.training.logprobs import Scorer, checkpoint_layers
from agenttrain.training.lora import BaseScorer, is_adapted
from agenttrain.training.optimizers import build_optimizer
from agenttrain.training.schedule import learning_rate
from agenttrain.types import AgenttrainError, Rollout

NOTHING = {
    "loss": 0.0,
    "grad_norm": 0.0,
    "train/tokens": 0.0,
    **dict.fromkeys(
        (
            "entropy",
            "clip_ratio/low_mean",
            "clip_ratio/high_mean",
            "clip_ratio/region_mean",
            "sampling/logprob_gap",
            "sampling/logprob_gap_max",
        ),
        math.nan,
    ),
}
"""The metrics of a step in which nothing had a gradient."""


class NotFinite(AgenttrainError):
    """A loss or gradient is NaN or infinite; the weights are still those before the update."""


class Policy:
    """Turns a step's rollouts into optimizer updates.

    `model` is the module that is trained, on its device, and that an engine in the same process
    samples from. `step` counts the calls of `update`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        algorithm: AlgorithmConfig,
        optimizer: OptimizerConfig,
        training: TrainingConfig,
        temperature: float,
        max_completion_tokens: int,
        steps: int,
        accelerator: Any = None,
    ) -> None:
        """`steps` is the length of the run, for the learning rate.

        `temperature` is that of the rollouts, whose probabilities are those after it. The reference
        is a copy of `model` as it is now: load a checkpoint's weights afterwards.
        """
        self.accelerator = accelerator or _accelerator(training.mixed_precision)
        self.model = model.to(self.accelerator.device)
        self.step = 0
        self._algorithm = algorithm
        self._config = optimizer
        self._training = training
        self._max_completion_tokens = max_completion_tokens
        self._steps = steps
        budget = training.logits_budget_mb
        self._scorer = Scorer(self.model, temperature=temperature, logits_budget_mb=budget)
        if training.gradient_checkpointing:
            checkpoint_layers(self.model)
        self._reference: Any = self._freeze(self._scorer) if algorithm.beta > 0 else None
        self._wrapped, self.optimizer = self.accelerator.prepare(
            self._scorer, build_optimizer(self.model, optimizer)
        )

    def _freeze(self, scorer: Scorer) -> Any:
        if is_adapted(self.model):
            return BaseScorer(scorer)
        frozen = copy.deepcopy(scorer).requires_grad_(False)
        return self.accelerator.prepare_model(frozen, evaluation_mode=True)

    def update(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """All optimizer updates of one step; sets every rollout's advantage; returns metrics.

        Groups come in the order of their tasks; their rollouts are taken in the order of `sample`.
        Rollouts without a reward take no part. Raises NotFinite before weights are touched by a
        loss or gradient that is not a number.

        Metrics: loss, grad_norm, lr, and over the rollouts that had a gradient: entropy, kl,
        clip_ratio/*, train/tokens (sampled tokens per update), and sampling/logprob_gap (mean and
        max distance between the engine's and the trainer's logprobs before the first update). The
        names are always the same; NaN stands where no rollout had a gradient.
        """
        ordered = [sorted(group, key=lambda rollout: rollout.sample) for group in groups]
        averages = Averages()
        rows = [[make_row(rollout) for rollout in group if _scored(rollout)] for group in ordered]
        if self._reference is not None:
            rows = _with_reference(rows, self._reference_logprobs(rows))
        assign_advantages(ordered, self._algorithm, self._penalties(rows, averages))
        lr = learning_rate(self._config, self.step + 1, self._steps)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        gap = self._update_all(rows, averages)
        self.step += 1
        nothing = NOTHING if self._reference is None else {**NOTHING, "kl": math.nan}
        return {**nothing, **averages.means(self.accelerator), **gap, "lr": lr}

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on, besides the weights."""
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.step = state["step"]
        self.optimizer.load_state_dict(state["optimizer"])
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _reference_logprobs(self, groups: list[list[Row]]) -> dict[str, Tensor]:
        """rollout_id -> the reference's logprobs of its sampled tokens."""
        found: dict[str, Tensor] = {}
        with torch.no_grad(), self._reference.ready():
            for microbatch in self._pack([row for group in groups for row in group]):
                logprobs_S, _ = self._reference(microbatch)
                pieces = logprobs_S.cpu().split([row.sampled_length for row in microbatch.rows])
                ids = [row.rollout.rollout_id for row in microbatch.rows]
                found.update(zip(ids, pieces, strict=True))
        return found

    def _penalties(self, groups: list[list[Row]], averages: Averages) -> dict[str, float]:
        """KL over the sampled tokens of each rollout, where it is a part of the reward."""
        penalties: dict[str, float] = {}
        if self._reference is None or self._algorithm.kl_in is not KlIn.reward:
            return penalties
        for row in (row for group in groups for row in group):
            assert row.ref_logprobs_S is not None
            kl_S = kl_estimate(row.behaviour_S, row.ref_logprobs_S, self._algorithm.kl)
            penalties[row.rollout.rollout_id] = kl_S.sum().item()
            averages.add("kl", mean_parts(kl_S).to(self.accelerator.device))
        return penalties

    def _update_all(self, groups: list[list[Row]], averages: Averages) -> dict[str, float]:
        """`num_epochs` passes of `minibatches` updates; the sampler's gap before the first."""
        gap: dict[str, float] = {}
        parts = split(groups, self._algorithm.minibatches)
        # Every process takes part in every update, those with fewer groups too.
        parts += [()] * (self._algorithm.minibatches - len(parts))
        with self._scorer.ready():
            for _ in range(self._algorithm.num_epochs):
                for part in parts:
                    gaps = self._update_once([row for group in part for row in group], averages)
                    gap = gap or self._gap_metrics(gaps)
        return gap

    def _update_once(self, rows: list[Row], averages: Averages) -> list[Tensor]:
        """One optimizer update over `rows`; |logprobs - behaviour| of each microbatch, [S]."""
        tokens = self._total(sum(row.sampled_length for row in rows))
        if tokens == 0:
            return []
        weighted = weigh(
            rows,
            self._algorithm,
            tokens=tokens,
            rollouts=self._total(len(rows)),
            fixed_length=self._max_completion_tokens,
        )
        trained = [row for row in weighted if has_gradient(row, self._algorithm)]
        if self._total(len(trained)) == 0:
            return []
        # A process without a gradient of its own still has to meet the others in the backward pass.
        microbatches = self._pack(trained or [stand_in()])
        parts = [
            self._accumulate(microbatch, averages, last=microbatch is microbatches[-1])
            for microbatch in microbatches
        ]
        losses = torch.stack([loss for loss, _ in parts])
        self._apply(losses, microbatches, averages)
        self._count("train/tokens", tokens, averages)
        return [gap_S for _, gap_S in parts]

    def _accumulate(
        self, microbatch: Microbatch, averages: Averages, *, last: bool
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward of a microbatch: its part of the loss, and its gaps, [S]."""
        accelerator = self.accelerator
        with contextlib.nullcontext() if last else accelerator.no_sync(self._wrapped):
            logprobs_S, entropy_S = self._wrapped(microbatch)
            inputs = LossInputs(
                logprobs_S=logprobs_S,
                behaviour_S=microbatch.behaviour_S,
                ref_logprobs_S=microbatch.ref_logprobs_S,
                row_S=microbatch.row_S,
                advantages_B=microbatch.advantages_B,
                weights_B=microbatch.weights_B,
            )
            loss, metrics = policy_loss(inputs, self._algorithm)
            # Processes average their gradients; the loss is their sum.
            accelerator.backward(loss * accelerator.num_processes)
        for name, part in {**metrics, "entropy": mean_parts(entropy_S)}.items():
            averages.add(name, part)
        return loss.detach(), (logprobs_S.detach() - microbatch.behaviour_S).abs()

    def _apply(
        self, losses: Tensor, microbatches: Sequence[Microbatch], averages: Averages
    ) -> None:
        """Clip the gradient and step, unless something is not finite."""
        norm = self.accelerator.clip_grad_norm_(
            self._wrapped.parameters(), self._config.max_grad_norm
        )
        # The scaler of fp16 probes for overflows itself and skips such updates.
        if not losses.isfinite().all() or (
            not torch.isfinite(norm) and self.accelerator.scaler is None
        ):
            self.optimizer.zero_grad()
            raise NotFinite(_not_finite(losses, float(norm), microbatches, self.step + 1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._count("grad_norm", float(norm), averages)
        averages.add("loss", torch.stack((losses.sum(), self._once(1.0))))

    def _pack(self, rows: Sequence[Row]) -> list[Microbatch]:
        return pack(rows, self._training.token_budget, self.accelerator.device)

    def _total(self, count: int) -> int:
        """The sum over all processes."""
        local = torch.tensor(count, device=self.accelerator.device)
        return int(self.accelerator.reduce(local, "sum"))

    def _count(self, name: str, value: float, averages: Averages) -> None:
        """Add a figure that all processes know, once."""
        averages.add(name, torch.stack((self._once(value), self._once(1.0))))

    def _once(self, value: float) -> Tensor:
        mine = value if self.accelerator.is_main_process else 0.0
        return torch.tensor(mine, device=self.accelerator.device)

    def _gap_metrics(self, gaps: list[Tensor]) -> dict[str, float]:
        if not gaps:
            return {}
        averages = Averages()
        averages.add("sampling/logprob_gap", mean_parts(torch.cat(gaps)))
        # A process that only stood in has no gap.
        highest = torch.cat([*gaps, gaps[0].new_zeros(1)]).max()
        highest = self.accelerator.gather(highest).max().item()
        return {**averages.means(self.accelerator), "sampling/logprob_gap_max": highest}


def _accelerator(mixed_precision: str) -> Accelerator:
    if mixed_precision == "fp16" and not torch.cuda.is_available():
        raise ValueError(
            "training.mixed_precision=fp16: needs a GPU, and there is none here. Set "
            "training.mixed_precision=bf16 or no."
        )
    return Accelerator(mixed_precision=mixed_precision)


def _scored(rollout: Rollout) -> bool:
    return rollout.reward is not None and rollout.sampled_length > 0


def _with_reference(groups: list[list[Row]], found: Mapping[str, Tensor]) -> list[list[Row]]:
    return [
        [replace(row, ref_logprobs_S=found[row.rollout.rollout_id]) for row in group]
        for group in groups
    ]


def _not_finite(losses: Tensor, norm: float, microbatches: Sequence[Microbatch], step: int) -> str:
    broken = [
        row.rollout.rollout_id
        for loss, microbatch in zip(losses, microbatches, strict=True)
        if not loss.isfinite()
        for row in microbatch.rows
    ]
    where = f" among the rollouts {', '.join(broken)}" if broken else ""
    return (
        f"step {step}: loss {losses.sum().item():g}, gradient norm {norm:g}{where}. The weights "
        "are those before this update. Lower optimizer.lr, or set training.mixed_precision=no."
    )
