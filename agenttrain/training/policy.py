"""The policy: the model that is trained, its optimizer, and its frozen reference.

Shapes: S sampled tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.algorithms.entropy import EntropyBonus
from agenttrain.algorithms.kl import kl_estimate
from agenttrain.algorithms.loss import policy_loss
from agenttrain.algorithms.metrics import mean_parts, metric_names
from agenttrain.algorithms.mismatch import MISMATCH_NAMES, mismatch
from agenttrain.config.algorithm import AlgorithmConfig, Behaviour
from agenttrain.config.schema import OptimizerConfig, TrainingConfig
from agenttrain.training.averages import Averages, nothing
from agenttrain.training.batch import Microbatch, Row, RowKey, make_rows, split, stand_in
from agenttrain.training.blame import BrokenUpdate, broken_weights, culprits, told
from agenttrain.training.credit import assign_advantages, has_gradient, weigh
from agenttrain.training.heap import return_free_memory
from agenttrain.training.kernels import check_kernels, named
from agenttrain.training.logprobs import Scorer, checkpoint_layers
from agenttrain.training.optimizers import MasterWeights, build_optimizer
from agenttrain.training.origins import origins
from agenttrain.training.reference import make_reference
from agenttrain.training.schedule import learning_rate
from agenttrain.training.scoring import (
    flat,
    keep_scores,
    needs_own,
    probe,
    score,
    with_own,
    with_reference,
)
from agenttrain.training.sharded_state import spread
from agenttrain.training.sharding import Sharding, refresh, whole, whole_copy
from agenttrain.training.update import Part, Plan, loss_inputs, plan
from agenttrain.training.world import World
from agenttrain.training.wrapping import make_accelerator, share_weights, wrap
from agenttrain.types import Rollout


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
        reward_weights: Mapping[str, float] | None = None,
        accelerator: Any = None,
        world: World | None = None,
        sharding: Sharding | None = None,
        sampled: bool = False,
    ) -> None:
        """`steps` is the length of the run, for the learning rate; `reward_weights` are the
        rubric's, for algorithms that look at each reward function.

        `temperature` is that of the rollouts, whose probabilities are those after it. The reference
        is a copy of `model` as it is now: load a checkpoint's weights afterwards.

        All processes of `world` begin with the main one's weights; `sharding` None: each holds all
        of them. `sampled`: an engine of this process samples from `sampler`, which then is whole.
        """
        self.world = world or World()
        self.accelerator = accelerator or make_accelerator(training.mixed_precision)
        device = self.accelerator.device
        # Layers that are sharded go to the device one by one.
        self.model = model if sharding else model.to(device)
        # Files may reach one process minutes after another: the collectives that follow would end.
        self.world.exchange((), "the model in every process", patient=True)
        share_weights(self.model, self.world)
        self.sampler = whole_copy(self.model, device) if sharding and sampled else self.model
        self.step = 0
        self._algorithm = algorithm
        self._config = optimizer
        self._training = training
        self._max_completion_tokens = max_completion_tokens
        self._steps = steps
        self._reward_weights = dict(reward_weights or {})
        self._bonus = EntropyBonus(algorithm.entropy_bonus)
        self._scorer = Scorer(
            self.model,
            temperature=temperature,
            logits_budget_mb=training.logits_budget_mb,
            entropy_grad=algorithm.has_bonus,
            share_prefix=training.share_prefix,
            defer=True,
        )
        if training.gradient_checkpointing:
            checkpoint_layers(self.model)
        self._sharding = sharding
        self._reference = make_reference(self._scorer, self.accelerator, algorithm, sharding)
        self._wrapped = wrap(self._scorer, self.accelerator, sharding)
        self._decide(max(training.token_budget, max_completion_tokens))
        built = build_optimizer(self.model, optimizer)
        self._masters = built if isinstance(built, MasterWeights) else None
        self.optimizer = self.accelerator.prepare_optimizer(built)

    def _decide(self, tokens: int) -> None:
        """Find out how rollouts of up to `tokens` tokens are computed, where the weights now are.

        Raises SlowAttention and UnsupportedModel.
        """
        device = self.accelerator.device
        self._scorer.decide(device, self.world, self.accelerator.autocast())
        if self._reference is not None:
            self._reference.decide_as(self._scorer)
        check_kernels(self._scorer.kernels, device, tokens)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def kernel(self) -> str:
        """What computes attention: ``varlen``, or several, ``efficient,flash``."""
        return named(self._scorer.kernels)

    def kernel_metrics(self) -> dict[str, float]:
        """The share of attention calls that each kernel computes: ``training/kernel/flash``: 1."""
        calls = self._scorer.kernels
        return {f"training/kernel/{name}": n / calls.total() for name, n in sorted(calls.items())}

    def update(self, groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
        """All optimizer updates of one step; sets every rollout's advantage; returns metrics.

        Rollouts that the trainer scores get its `trainer_logprobs` and `entropies` too, which it
        computes anyway: of rollouts without a gradient it needs none.

        Groups come in the order of their tasks; their rollouts are taken in the order of `sample`.
        In a world of several processes each gives the groups of all, those of others empty: which
        rollouts an update is made of does not depend on who has them. Rollouts without a reward
        take no part. Raises BrokenUpdate, in all processes, before weights are touched by a loss or
        gradient that is not finite.

        Metrics: loss, grad_norm, lr, train/tokens (sampled tokens per update), those of
        `metric_names` over the rollouts that had a gradient, and `MISMATCH_NAMES` (the distance
        between the engine's and the trainer's logprobs before the first update). The
        names are always the same; NaN stands where no rollout had a gradient.
        """
        ordered = [sorted(group, key=lambda rollout: rollout.sample) for group in groups]
        averages = Averages()
        rows = [[row for r in group if _scored(r) for row in make_rows(r)] for group in ordered]
        if self._reference is not None:
            rows = with_reference(rows, self._reference, self._pack)
        if needs_own(self._algorithm):
            rows = with_own(rows, self._scorer, self._pack)
        penalties = self._penalties(rows, averages)
        assign_advantages(ordered, self._algorithm, penalties, self._reward_weights)
        lr = learning_rate(self._config, self.step + 1, self._steps)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        self._update_all(rows, averages)
        self.step += 1
        if self._reference is not None:
            self._reference.follow(self.model, self.step)
        return_free_memory()
        return {**self._nothing(), **averages.means(self.accelerator), "lr": lr}

    def logprobs(self, rollouts: Sequence[Rollout]) -> dict[RowKey, Tensor]:
        """Row's key -> log-probabilities of its sampled tokens [S], without a gradient."""
        rows = [row for rollout in rollouts for row in make_rows(rollout)]
        with self._scorer.ready():
            found = score(self._scorer, self._pack(rows))
        return {key: logprobs_S for key, (logprobs_S, _) in found.items()}

    def probe(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability at temperature 1 of every id after the first; all processes together."""
        return probe(self._scorer, token_ids, self.accelerator.device)

    def refresh_sampler(self) -> None:
        """`sampler` gets the policy's weights, where it is a copy; all processes together."""
        if self.sampler is not self.model:
            refresh(self.sampler, self.model)

    def _nothing(self) -> dict[str, float]:
        """The metrics of a step in which nothing had a gradient."""
        names = (*metric_names(self._algorithm), *MISMATCH_NAMES)
        zero = dict.fromkeys(("loss", "grad_norm", "train/tokens"), 0.0)
        return {**zero, **dict.fromkeys(names, math.nan)}

    def state_dict(self) -> dict[str, Any]:
        """What the next update depends on, besides the weights."""
        scaler = self.accelerator.scaler
        return {
            "step": self.step,
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "entropy_bonus": (self._bonus.coefficient, self._bonus.last),
            "reference": None if self._reference is None else self._reference.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()` of any number of processes, its tensors whole or Parted."""
        self.step = state["step"]
        optimizer = self.optimizer.optimizer  # within accelerate's
        self.optimizer.load_state_dict(spread(optimizer, state["optimizer"]))
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self._bonus = EntropyBonus(*state["entropy_bonus"])
        if self._reference is not None and state["reference"] is not None:
            self._reference.load_state_dict(state["reference"])

    def _penalties(self, groups: list[list[Row]], averages: Averages) -> dict[str, float]:
        """KL over the sampled tokens of each rollout, where it is a part of the reward.

        Between the reference and the probabilities that `algorithm.behaviour` names.
        """
        penalties: defaultdict[str, float] = defaultdict(float)
        if not self._algorithm.kl_in_reward:
            return penalties
        # A process without rollouts has the name too: averages are over all processes.
        averages.add("kl", torch.zeros(2, device=self.accelerator.device))
        for row in flat(groups):
            recomputed = self._algorithm.behaviour is Behaviour.recomputed
            own_S = row.old_logprobs_S if recomputed else row.behaviour_S
            assert own_S is not None and row.ref_logprobs_S is not None
            kl_S = kl_estimate(own_S, row.ref_logprobs_S, self._algorithm.kl)
            penalties[row.rollout.rollout_id] += kl_S.sum().item()
            averages.add("kl", mean_parts(kl_S).to(self.accelerator.device))
        return penalties

    def _update_all(self, groups: list[list[Row]], averages: Averages) -> None:
        """`num_epochs` passes of `minibatches` updates; the sampler's gap before the first."""
        measured = False
        # Every process takes part in every update, those without a group in it too.
        parts = split(groups, self._algorithm.minibatches)
        with self._scorer.ready():
            for epoch in range(self._algorithm.num_epochs):
                for part in parts:
                    done = self._update_once(flat(part), averages)
                    if epoch == 0 and not needs_own(self._algorithm):
                        for one in done:
                            keep_scores(one.microbatch.rows, one.trainer_S, one.entropy_S)
                    if done and not measured:
                        measured = True
                        self._compare(done, averages)

    def _update_once(self, rows: list[Row], averages: Averages) -> list[Part]:
        """One optimizer update over `rows`; what each microbatch contributed."""
        algorithm = self._algorithm
        tokens = self._total(sum(row.sampled_length for row in rows))
        if tokens == 0:
            return []
        weighted = weigh(
            rows,
            algorithm,
            tokens=tokens,
            rollouts=self._total(len(rows)),
            fixed_length=self._max_completion_tokens,
        )
        trained = [row for row in weighted if has_gradient(row, algorithm)]
        if self._total(len(trained)) == 0:
            return []
        shared = plan(weighted, algorithm, self._bonus, self.accelerator)
        microbatches = self._pack(trained)
        if not microbatches:
            # Without a gradient of its own it still has to meet the others in the backward pass.
            microbatches = self._pack([stand_in()])
        parts = [
            self._accumulate(microbatch, shared, averages, last=microbatch is microbatches[-1])
            for microbatch in microbatches
        ]
        losses = torch.stack([part.loss for part in parts])
        norm = self._clip(losses)
        if norm is None:
            raise self._blame(losses, rows, trained, shared)
        self._step(losses, norm, averages)
        self._count("train/tokens", tokens, averages)
        self._observe(weighted, parts, shared, averages)
        return parts

    def _accumulate(
        self, microbatch: Microbatch, shared: Plan, averages: Averages, *, last: bool
    ) -> Part:
        """Forward and backward of a microbatch."""
        accelerator = self.accelerator
        # Sums in float32 copies meet those of the other processes by themselves, in `_clip`.
        meets = last and self._masters is None
        with contextlib.nullcontext() if meets else accelerator.no_sync(self._wrapped):
            logprobs_S, entropy_S = self._wrapped(microbatch)
            inputs = loss_inputs(microbatch, logprobs_S, entropy_S, self._algorithm, shared)
            loss, metrics = policy_loss(inputs, self._algorithm)
            # Processes average their gradients; the loss is their sum.
            accelerator.backward(loss * accelerator.num_processes)
        if self._masters is not None:
            self._masters.fold()
        entropy_S = entropy_S.detach()
        for name, part in {**metrics, "entropy": mean_parts(entropy_S)}.items():
            # The row that stands in is no rollout: it is in no mean of rollouts.
            averages.add(name, part if entropy_S.numel() else nothing(name, part))
        return Part(
            loss=loss.detach(),
            microbatch=microbatch,
            trainer_S=logprobs_S.detach(),
            entropy_S=entropy_S,
            entropy=(entropy_S if inputs.kept_S is None else entropy_S * inputs.kept_S).sum(),
        )

    def _observe(
        self, rows: list[Row], parts: list[Part], shared: Plan, averages: Averages
    ) -> None:
        """Measure what the whole update says, and let the entropy bonus follow it."""
        if self._algorithm.mask_truncated:
            masked = torch.tensor([row.weight == 0 for row in rows])
            averages.add("mask/truncated", mean_parts(masked).to(self.accelerator.device))
        if self._algorithm.has_bonus and shared.bonus_tokens:
            entropy = torch.stack([part.entropy for part in parts]).sum()
            total = float(self.accelerator.reduce(entropy, "sum"))
            self._bonus.observe(total / shared.bonus_tokens, self._algorithm)
            self._count("entropy_coef", self._bonus.coefficient, averages)

    def _compare(self, parts: list[Part], averages: Averages) -> None:
        """Measure the distance of the engine that sampled; `parts` are of the first update."""
        rows = [row for part in parts for row in part.microbatch.rows]
        engine_S = torch.cat([part.microbatch.behaviour_S for part in parts])
        trainer_S = torch.cat([part.trainer_S for part in parts])
        # As many updates of the engine's weights as steps so far.
        found = origins(rows, self.step, engine_S.device)
        sums = torch.stack((engine_S.sum(), trainer_S.sum(), engine_S.new_tensor(len(engine_S))))
        engine, trainer, count = self.accelerator.reduce(sums.double(), "sum").tolist()
        means = (engine / count, trainer / count)
        for name, part in mismatch(engine_S, trainer_S, found, means).items():
            averages.add(name, part)

    def _clip(self, losses: Tensor) -> float | None:
        """Clip the gradient; its norm before, or None when it or a loss is not finite."""
        parameters = list(self._wrapped.parameters())
        if self._masters is not None:
            parameters = self._masters.copies
            self._average(parameters)
        norm = whole(self.accelerator.clip_grad_norm_(parameters, self._config.max_grad_norm))
        # The scaler of fp16 probes for overflows itself and skips such updates.
        probing = self.accelerator.scaler is not None
        finite = bool(losses.isfinite().all()) and (bool(norm.isfinite()) or probing)
        # The norm is everybody's, a loss is not.
        return None if self._total(int(not finite)) else float(norm)

    def _average(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over the processes; those of sharded weights are already."""
        if self.world.size == 1 or self._sharding is not None:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = self.accelerator.reduce(parameter.grad, "mean")

    def _step(self, losses: Tensor, norm: float, averages: Averages) -> None:
        """Update the weights with the clipped gradient."""
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._count("grad_norm", norm, averages)
        averages.add("loss", torch.stack((losses.sum(), self._once(1.0))))

    def _blame(
        self, losses: Tensor, rows: list[Row], trained: list[Row], shared: Plan
    ) -> BrokenUpdate:
        """The error that names who made an update that is not finite, of all processes."""
        self.optimizer.zero_grad()

        def alone(row: Row) -> tuple[Tensor, Tensor]:
            (microbatch,) = self._scorer.pack([row], 1, self.accelerator.device)
            with self.accelerator.no_sync(self._wrapped):
                logprobs_S, entropy_S = self._wrapped(microbatch)
                inputs = loss_inputs(microbatch, logprobs_S, entropy_S, self._algorithm, shared)
                loss, _ = policy_loss(inputs, self._algorithm)
                loss.backward()
            return loss.detach(), logprobs_S.detach()

        world = self.world
        broken = dict(world.gather(list(broken_weights(self.model).items()), "broken weights"))
        found = world.gather(culprits(trained, alone, self.model, world), "the culprits")
        named = world.gather([row.rollout.rollout_id for row in trained], "the culprits")
        first = next(iter(broken.items()), None)
        cause = f"weight {first[0]} ({first[1]}); " if first else ""
        loss = world.sum(losses.sum().item(), "the loss")
        return BrokenUpdate(
            f"step {self.step + 1}: the update is not finite (loss {loss:g}): "
            f"{cause}{told(found, named)}. The weights are those before it",
            [culprit.rollout_id for culprit in found],
            world.to_main(rows, "the rows of a broken update"),
        )

    def retry(self, rows: Sequence[Row]) -> None:
        """Do again the update that raised BrokenUpdate with these rows; raises it if it does."""
        with self._scorer.ready():
            self._update_once(list(rows), Averages())

    def _pack(self, rows: Sequence[Row]) -> list[Microbatch]:
        """Microbatches; where weights are sharded, as many in every process."""
        device, budget = self.accelerator.device, self._training.token_budget
        made = self._scorer.pack(rows, budget, device) if rows else []
        if self._sharding is not None:
            most = int(self.world.max(len(made), "the number of microbatches"))
            made += self._scorer.pack([stand_in()], budget, device) * (most - len(made))
        return made

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


def _scored(rollout: Rollout) -> bool:
    return rollout.reward is not None and rollout.sampled_length > 0
