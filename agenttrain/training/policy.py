"""The policy: the model that is trained, its optimizer, and its frozen reference.

`agenttrain.trainer.update` shows how its methods make the updates of a step. Shapes: S sampled
tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.algorithms.config import AlgorithmConfig, Behaviour
from agenttrain.algorithms.loss import Averages, Metrics, mean_parts, metric_names, policy_loss
from agenttrain.algorithms.losses import EntropyBonus, kl_estimate
from agenttrain.algorithms.mismatch import MISMATCH_NAMES, THIRDS, Origins, mismatch
from agenttrain.training.batch import (
    Microbatch,
    SequenceKey,
    TrainingSequence,
    make_sequences,
    split,
    stand_in,
)
from agenttrain.training.config import OptimizerConfig, TrainingConfig
from agenttrain.training.heap import return_free_memory
from agenttrain.training.kernels import check_kernels, kernel_names
from agenttrain.training.logprobs import Scorer, checkpoint_layers
from agenttrain.training.nonfinite import BrokenUpdate, broken_weights, culprits, describe_culprits
from agenttrain.training.optimizers import MasterWeights, build_optimizer, learning_rate
from agenttrain.training.reference import make_reference
from agenttrain.training.sharding import (
    Sharding,
    copy_full_weights,
    full_tensor,
    shard_optimizer_state,
    unsharded_copy,
)
from agenttrain.training.update import (
    Minibatch,
    loss_inputs,
    needs_old_logprobs,
    store_scores,
    top_entropy,
    weigh_sequences,
)
from agenttrain.training.world import World
from agenttrain.training.wrapping import make_accelerator, share_weights, wrap
from agenttrain.types import Rollout


class Policy:
    """The model with what it takes to score rollouts with it and to update it.

    `model` is the module that is trained, on its device, and that an engine in the same process
    samples from. `step` counts the finished steps. A step is `score`, `begin_step`, then `forward`
    and `backward` of the `batches` of each of its `minibatches` with an `optimizer_step`, and
    `end_step`; all processes do it together.
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
        self.sampler = unsharded_copy(self.model, device) if sharding and sampled else self.model
        self.step = 0
        self.algorithm = algorithm
        self._config = optimizer
        self._training = training
        self._max_completion_tokens = max_completion_tokens
        self._steps = steps
        self.reward_weights = dict(reward_weights or {})
        """Weights of the rubric, for algorithms that look at each reward function."""
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
        self._choose_kernels(max(training.token_budget, max_completion_tokens))
        built = build_optimizer(self.model, optimizer)
        self._masters = built if isinstance(built, MasterWeights) else None
        self.optimizer = self.accelerator.prepare_optimizer(built)

    def _choose_kernels(self, tokens: int) -> None:
        """Try how rollouts of up to `tokens` tokens can be computed, where the weights now are.

        Raises SlowAttention and UnsupportedModel.
        """
        device = self.accelerator.device
        self._scorer.choose_layout(device, self.world, self.accelerator.autocast())
        if self._reference is not None:
            self._reference.copy_layout(self._scorer)
        check_kernels(self._scorer.kernels, device, tokens)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        device: torch.device = self.accelerator.device
        return device

    @property
    def kernel(self) -> str:
        """Kernels that compute attention: ``varlen``, or several, ``efficient,flash``."""
        return kernel_names(self._scorer.kernels)

    def kernel_metrics(self) -> dict[str, float]:
        """The share of attention calls that each kernel computes: ``training/kernel/flash``: 1."""
        calls = self._scorer.kernels
        return {f"training/kernel/{name}": n / calls.total() for name, n in sorted(calls.items())}

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[TrainingSequence]]:
        """Return the rows of the rollouts that have a reward, scored as the algorithm asks.

        That is by the reference where there is a KL penalty, and by the policy itself where its
        probabilities before the step's first update are needed.
        """
        sequences = [
            [sequence for r in group if _is_trained(r) for sequence in make_sequences(r)]
            for group in groups
        ]
        if self._reference is not None:
            scores = self._scores(self._reference, _flat(sequences))
            sequences = [
                [replace(sequence, ref_logprobs_S=scores[sequence.key][0]) for sequence in g]
                for g in sequences
            ]
        if needs_old_logprobs(self.algorithm):
            scores = self._scores(self._scorer, _flat(sequences))
            for sequence in _flat(sequences):
                store_scores([sequence], *scores[sequence.key])
            sequences = [
                [_with_own(sequence, *scores[sequence.key]) for sequence in g] for g in sequences
            ]
        return sequences

    def kl_penalties(
        self, groups: Sequence[Sequence[TrainingSequence]]
    ) -> tuple[dict[str, float], Metrics]:
        """Return the KL over each rollout's sampled tokens where it is a part of the reward.

        Between the reference and the probabilities that `algorithm.behaviour` names; by
        rollout_id, and as parts of the metric ``kl``.
        """
        if not self.algorithm.kl_in_reward:
            return {}, {}
        penalties: defaultdict[str, float] = defaultdict(float)
        kl = torch.zeros(2, device=self.device)
        for sequence in _flat(groups):
            recomputed = self.algorithm.behaviour is Behaviour.recomputed
            own_S = sequence.old_logprobs_S if recomputed else sequence.behaviour_S
            assert own_S is not None and sequence.ref_logprobs_S is not None
            kl_S = kl_estimate(own_S, sequence.ref_logprobs_S, self.algorithm.kl)
            penalties[sequence.rollout.rollout_id] += kl_S.sum().item()
            kl = kl + mean_parts(kl_S).to(self.device)
        return penalties, {"kl": kl}

    def begin_step(self) -> None:
        """Set the step's learning rate."""
        lr = learning_rate(self._config, self.step + 1, self._steps)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr

    def ready(self) -> AbstractContextManager[None]:
        """Within, `forward` may be called; backward passes belong inside too."""
        return self._scorer.ready()

    def minibatches(self, groups: Sequence[Sequence[TrainingSequence]]) -> Iterator[Minibatch]:
        """Yield `num_epochs` passes of `minibatches` updates, cut by group.

        Those are left out in which no process has a token to learn from. Every process takes part
        in every other, also without a group in it.
        """
        first = True
        for epoch in range(self.algorithm.num_epochs):
            for part in split(groups, self.algorithm.minibatches):
                minibatch = self.minibatch(_flat(part))
                if minibatch is not None:
                    minibatch.first, minibatch.epoch, first = first, epoch, False
                    yield minibatch

    def minibatch(self, sequences: Sequence[TrainingSequence]) -> Minibatch | None:
        """Return the rows of one update, weighed; None where no process has one to learn from."""
        algorithm = self.algorithm
        tokens = self._sum_of_ranks(sum(sequence.sampled_length for sequence in sequences))
        if tokens == 0:
            return None
        weighed = weigh_sequences(
            sequences,
            algorithm,
            tokens=tokens,
            rollouts=self._sum_of_ranks(len(sequences)),
            fixed_length=self._max_completion_tokens,
        )
        minibatch = Minibatch(sequences=weighed, tokens=tokens)
        if self._sum_of_ranks(len(minibatch.trained(algorithm))) == 0:
            return None
        count = sum(sequence.sampled_length for sequence in weighed if sequence.weight > 0)
        if algorithm.top_entropy < 1:
            minibatch.kept = top_entropy(weighed, algorithm.top_entropy, self.world)
            count = sum(int(kept_S.sum()) for kept_S in minibatch.kept.values())
        minibatch.bonus_tokens = self._sum_of_ranks(count)
        minibatch.bonus = self._bonus.weight(algorithm) / max(minibatch.bonus_tokens, 1)
        return minibatch

    def microbatches(self, minibatch: Minibatch) -> Iterator[Microbatch]:
        """Yield the microbatches of an update; the last one's backward pass syncs the gradients."""
        microbatches = self._pack(minibatch.trained(self.algorithm))
        if not microbatches:
            # Without a gradient of its own it still has to meet the others in the backward pass.
            microbatches = self._pack([stand_in()])
        for microbatch in microbatches:
            # Sums in float32 copies meet those of the other processes by themselves, in `_clip`.
            syncs = microbatch is microbatches[-1] and self._masters is None
            with contextlib.nullcontext() if syncs else self.accelerator.no_sync(self._wrapped):
                yield microbatch

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return log-probability and entropy of every sampled token, with their graph, [S] each."""
        logprobs_S, entropy_S = self._wrapped(microbatch)
        return logprobs_S, entropy_S

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a microbatch's loss."""
        # Processes average their gradients; the loss is their sum.
        self.accelerator.backward(loss * self.accelerator.num_processes)
        if self._masters is not None:
            self._masters.fold()

    def optimizer_step(self, minibatch: Minibatch) -> Metrics:
        """Update the weights with the clipped gradient of a minibatch; return its metrics.

        Raises BrokenUpdate, in all processes and before weights are touched, where a loss or the
        gradient is not finite.
        """
        losses = torch.stack(minibatch.losses)
        norm = self._clip(losses)
        if norm is None:
            raise self._broken_update(losses, minibatch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if minibatch.epoch == 0 and not needs_old_logprobs(self.algorithm):
            for batch, logprobs_S, entropy_S in minibatch.scores:
                store_scores(batch.sequences, logprobs_S, entropy_S)
        metrics = {
            "grad_norm": self._once(norm),
            "loss": torch.stack((losses.sum(), self._once(1.0)[1])),
            "train/tokens": self._once(minibatch.tokens),
        }
        if self.algorithm.mask_truncated:
            masked = torch.tensor([sequence.weight == 0 for sequence in minibatch.sequences])
            metrics["mask/truncated"] = mean_parts(masked).to(self.device)
        if self.algorithm.has_bonus and minibatch.bonus_tokens:
            entropy = torch.stack(minibatch.entropy).sum()
            total = float(self.accelerator.reduce(entropy, "sum"))
            self._bonus.observe(total / minibatch.bonus_tokens, self.algorithm)
            metrics["entropy_coef"] = self._once(self._bonus.coefficient)
        return {**metrics, **self._mismatch(minibatch)} if minibatch.first else metrics

    def _mismatch(self, minibatch: Minibatch) -> Metrics:
        """Return the distance of the engine that sampled; `minibatch` is the step's first."""
        sequences = [sequence for batch, _, _ in minibatch.scores for sequence in batch.sequences]
        engine_S = torch.cat([batch.behaviour_S for batch, _, _ in minibatch.scores])
        trainer_S = torch.cat([logprobs_S for _, logprobs_S, _ in minibatch.scores])
        # As many updates of the engine's weights as steps so far.
        origins = token_origins(sequences, self.step, engine_S.device)
        sums = torch.stack((engine_S.sum(), trainer_S.sum(), engine_S.new_tensor(len(engine_S))))
        engine, trainer, count = self.accelerator.reduce(sums.double(), "sum").tolist()
        return mismatch(engine_S, trainer_S, origins, (engine / count, trainer / count))

    def end_step(self, averages: Averages) -> dict[str, float]:
        """Count the step, let the reference follow, and return the step's metrics.

        The names are always the same; where no rollout had a gradient, loss, grad_norm and
        train/tokens are 0 and the others NaN.
        """
        lr = learning_rate(self._config, self.step + 1, self._steps)
        self.step += 1
        if self._reference is not None:
            self._reference.follow(self.model, self.step)
        return_free_memory()
        empty = {
            **dict.fromkeys(("loss", "grad_norm", "train/tokens"), 0.0),
            **dict.fromkeys((*metric_names(self.algorithm), *MISMATCH_NAMES), math.nan),
        }
        return {**empty, **averages.means(self.accelerator), "lr": lr}

    def logprobs(self, rollouts: Sequence[Rollout]) -> dict[SequenceKey, Tensor]:
        """Row's key -> log-probabilities of its sampled tokens [S], without a gradient."""
        scores = self._scores(
            self._scorer, [sequence for r in rollouts for sequence in make_sequences(r)]
        )
        return {key: logprobs_S for key, (logprobs_S, _) in scores.items()}

    def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability at temperature 1 of every id after the first; all processes together."""
        targets_S = torch.arange(len(token_ids) - 1)
        sequence = replace(
            stand_in(),
            token_ids_T=torch.tensor(token_ids),
            targets_S=targets_S,
            behaviour_S=torch.zeros(len(targets_S)),
            ref_logprobs_S=None,
        )
        transform = self._scorer.transform
        self._scorer.transform = replace(transform, temperature=1.0)
        try:
            with self._scorer.ready():
                packed = self._scorer.pack([sequence], len(token_ids), self.device)
                ((logprobs_S, _),) = score(self._scorer, packed).values()
        finally:
            self._scorer.transform = transform
        values: list[float] = logprobs_S.tolist()
        return values

    def refresh_sampler(self) -> None:
        """`sampler` gets the policy's weights, where it is a copy; all processes together."""
        if self.sampler is not self.model:
            copy_full_weights(self.sampler, self.model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next update depends on, besides the weights."""
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
        self.optimizer.load_state_dict(shard_optimizer_state(optimizer, state["optimizer"]))
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self._bonus = EntropyBonus(*state["entropy_bonus"])
        if self._reference is not None and state["reference"] is not None:
            self._reference.load_state_dict(state["reference"])

    def _scores(
        self, scorer: Any, sequences: Sequence[TrainingSequence]
    ) -> dict[SequenceKey, tuple[Tensor, Tensor]]:
        with scorer.ready():
            return score(scorer, self._pack(sequences))

    def _clip(self, losses: Tensor) -> float | None:
        """Clip the gradient; its norm before, or None when it or a loss is not finite."""
        parameters = list(self._wrapped.parameters())
        if self._masters is not None:
            parameters = self._masters.copies
            self._average(parameters)
        norm = full_tensor(self.accelerator.clip_grad_norm_(parameters, self._config.max_grad_norm))
        # The scaler of fp16 probes for overflows itself and skips such updates.
        probing = self.accelerator.scaler is not None
        finite = bool(losses.isfinite().all()) and (bool(norm.isfinite()) or probing)
        # The norm is everybody's, a loss is not.
        return None if self._sum_of_ranks(int(not finite)) else float(norm)

    def _average(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients over the processes; those of sharded weights are already."""
        if self.world.size == 1 or self._sharding is not None:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = self.accelerator.reduce(parameter.grad, "mean")

    def _broken_update(self, losses: Tensor, minibatch: Minibatch) -> BrokenUpdate:
        """Return the error that names what broke an update, rollouts or weights of all ranks."""
        self.optimizer.zero_grad()
        trained = minibatch.trained(self.algorithm)

        def alone(sequence: TrainingSequence) -> tuple[Tensor, Tensor]:
            (microbatch,) = self._scorer.pack([sequence], 1, self.accelerator.device)
            with self.accelerator.no_sync(self._wrapped):
                inputs = loss_inputs(
                    microbatch, *self.forward(microbatch), minibatch, self.algorithm
                )
                loss, _ = policy_loss(inputs, self.algorithm)
                loss.backward()
            return loss.detach(), inputs.logprobs_S.detach()

        world = self.world
        broken = dict(world.gather(list(broken_weights(self.model).items()), "broken weights"))
        found = world.gather(culprits(trained, alone, self.model, world), "the culprits")
        kernel_names = world.gather(
            [sequence.rollout.rollout_id for sequence in trained], "the culprits"
        )
        first = next(iter(broken.items()), None)
        cause = f"weight {first[0]} ({first[1]}); " if first else ""
        loss = world.sum(losses.sum().item(), "the loss")
        return BrokenUpdate(
            f"step {self.step + 1}: the update is not finite (loss {loss:g}): "
            f"{cause}{describe_culprits(found, kernel_names)}. The weights are those before it",
            [culprit.rollout_id for culprit in found],
            world.to_main(minibatch.sequences, "the rows of a broken update"),
        )

    def _pack(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        """Microbatches; where weights are sharded, as many in every process."""
        device, budget = self.accelerator.device, self._training.token_budget
        made = self._scorer.pack(sequences, budget, device) if sequences else []
        if self._sharding is not None:
            most = int(self.world.max(len(made), "the number of microbatches"))
            made += self._scorer.pack([stand_in()], budget, device) * (most - len(made))
        return made

    def _sum_of_ranks(self, count: int) -> int:
        local = torch.tensor(count, device=self.device)
        return int(self.accelerator.reduce(local, "sum"))

    def _once(self, value: float) -> Tensor:
        """Return the part of a figure that all processes know and the main one contributes."""
        counts = self.accelerator.is_main_process
        return torch.tensor((value, 1.0) if counts else (0.0, 0.0), device=self.device)


def score(
    scorer: Any, microbatches: Iterable[Microbatch]
) -> dict[SequenceKey, tuple[Tensor, Tensor]]:
    """Row's key -> (logprobs_S, entropy_S) of its sampled tokens, on the CPU, no gradient."""
    scores: dict[SequenceKey, tuple[Tensor, Tensor]] = {}
    with torch.no_grad():
        for microbatch in microbatches:
            lengths = [sequence.sampled_length for sequence in microbatch.sequences]
            pieces = [values_S.cpu().split(lengths) for values_S in scorer(microbatch)]
            for sequence, logprobs_S, entropy_S in zip(microbatch.sequences, *pieces, strict=True):
                if sequence.sampled_length:  # not the one that stands in for a process without rows
                    scores[sequence.key] = (logprobs_S, entropy_S)
    return scores


def token_origins(
    sequences: Sequence[TrainingSequence], version: int, device: torch.device
) -> Origins:
    """Return the origins of the rows' sampled tokens, one row after the other.

    `version` is what the trainer holds. Example: of 4 sampled tokens the thirds are 0 0 1 2.
    """
    turns: list[int] = []
    thirds: list[int] = []
    stale: list[bool] = []
    for sequence in sequences:
        for span in sequence.trajectory.sampled_spans():
            turns += [span.turn] * len(span.token_ids)
            stale += [span.policy_version != version] * len(span.token_ids)
        sampled = sequence.sampled_length
        thirds += [index * len(THIRDS) // sampled for index in range(sampled)]
    return Origins(
        turn_S=torch.tensor(turns, dtype=torch.long, device=device),
        third_S=torch.tensor(thirds, dtype=torch.long, device=device),
        stale_S=torch.tensor(stale, dtype=torch.bool, device=device),
    )


def _is_trained(rollout: Rollout) -> bool:
    return rollout.reward is not None and rollout.sampled_length > 0


def _with_own(
    sequence: TrainingSequence, logprobs_S: Tensor, entropy_S: Tensor
) -> TrainingSequence:
    return replace(sequence, old_logprobs_S=logprobs_S, old_entropy_S=entropy_S)


def _flat(groups: Sequence[Sequence[TrainingSequence]]) -> list[TrainingSequence]:
    return [sequence for group in groups for sequence in group]
