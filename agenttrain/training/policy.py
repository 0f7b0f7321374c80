"""The policy: the model that is trained, its optimizer, and its frozen reference.

`agenttrain.trainer.train_policy` shows the order in which its methods are called. Shapes: S sampled
tokens of a microbatch.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agenttrain.algorithms.config import AlgorithmConfig, Behaviour
from agenttrain.algorithms.loss import Averages, MetricParts, mean_parts, metric_names, policy_loss
from agenttrain.algorithms.losses import EntropyBonus, kl_estimate, token_weights
from agenttrain.algorithms.mismatch import (
    MISMATCH_NAMES,
    ROUTE_NAMES,
    THIRDS,
    Origins,
    mismatch,
    route_mismatch,
)
from agenttrain.engines.vision import Vision
from agenttrain.training.batch import (
    Microbatch,
    MissingRoutes,
    SequenceKey,
    TrainingSequence,
    make_sequences,
    split,
    stand_in,
)
from agenttrain.training.checkpoint_files import CheckpointError
from agenttrain.training.config import ActivationCheckpointing, OptimizerConfig, TrainingConfig
from agenttrain.training.context_group import ContextGroup
from agenttrain.training.footprint import lacks_reserve
from agenttrain.training.gathering import gather_by_layer
from agenttrain.training.heap import map_large_blocks, return_free_memory
from agenttrain.training.images import freeze_encoders
from agenttrain.training.kernels import check_kernels, kernel_names
from agenttrain.training.logprobs import (
    Scorer,
    pack_evenly,
    score_microbatches,
)
from agenttrain.training.minibatch import (
    Minibatch,
    loss_inputs,
    needs_old_logprobs,
    store_scores,
    top_entropy,
)
from agenttrain.training.nonfinite import (
    BrokenUpdate,
    broken_weights,
    find_culprits,
    place_of,
)
from agenttrain.training.offload import StateOffload
from agenttrain.training.operations import StepWork, WorkCounter, count_operations
from agenttrain.training.optimizers import MasterWeights, build_optimizer, learning_rate
from agenttrain.training.quantization import scales
from agenttrain.training.reference import copy_weights, make_reference
from agenttrain.training.sharding import (
    Sharding,
    full_tensor,
    give_storage,
    release_gathered,
    shard_optimizer_state,
)
from agenttrain.training.sliced_weights import SlicedWeights, read_shards
from agenttrain.training.world import World
from agenttrain.training.wrapping import make_accelerator, share_weights, wrap
from agenttrain.types import Rollout
from agenttrain.utils.names import list_names

Value = TypeVar("Value")


class Policy:
    """The trained model with its optimizer, reference and precision; scores and updates.

    `model` is the module that is trained. An engine in the same process samples from `sampler`,
    which is `model` itself unless its weights are sharded. Forward passes go through `_scorer`,
    which maps packed sequences to logprobs, or `_wrapped`, the scorer in DDP or FSDP2 if there are
    several processes. `step` counts finished steps. A step is these calls, which all processes make
    together::

        score, kl_penalties, begin_step
        for each of minibatches:
            for each of microbatches: forward, backward
            optimizer_step
        end_step
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
        weights: SlicedWeights | None = None,
        sampled: bool = False,
        vision: Vision | None = None,
        context_parallel: int = 1,
    ) -> None:
        """Prepare `model` for training; the reference is a copy of it as it is now.

        Load a checkpoint's weights afterwards. `steps` is the run's length, `temperature` that of
        its rollouts. With `weights`, `model` is on the meta device and each process reads its part
        once it is sharded. `sampled`: an engine of this process samples from `self.sampler`, an
        unsharded copy if the policy is sharded. With `context_parallel`, groups of that many
        successive ranks compute their microbatches together.
        """
        self.world = world or World()
        self.accelerator = accelerator or make_accelerator(training.mixed_precision)
        self.device: torch.device = self.accelerator.device
        self.step = 0
        """Number of finished steps."""
        self.on_level: Callable[[ActivationCheckpointing], None] | None = None
        """Called with a higher level of activation checkpointing that the first step needs. None:
        the level stays. Set by the run if it may choose; None again after the first step."""
        # Settings.
        self.algorithm = algorithm
        self._config = optimizer
        self._training = training
        self._max_completion_tokens = max_completion_tokens
        self._steps = steps
        self._has_computed = False
        """True once the gradient of a microbatch was computed."""
        self._sharding = sharding
        self._context: ContextGroup | None = None
        """Processes that compute microbatches together with this one."""
        self.vision = vision
        self.reward_weights = dict(reward_weights or {})
        """Weights of the rubric, for algorithms that normalise each reward function."""
        self._bonus = EntropyBonus(algorithm.entropy.bonus)
        # The model. Sharded layers are moved to the device one by one, when they are sharded.
        self.model = model if sharding else model.to(self.device)
        if sharding and self.device.type == "cpu":
            map_large_blocks()  # or gathered layers stay in the C library's heap
        if vision is None or vision.frozen:
            freeze_encoders(self.model)
        self._work = WorkCounter(count_operations(self.model), self.device)
        # A slow file system may delay one process by minutes: wait without a limit before the first
        # collective, which has one.
        self.world.exchange((), "the model in every process", patient=True)
        if context_parallel > 1:
            self._context = ContextGroup(self.world, context_parallel)
        share_weights(self.model, self.world)
        self.sampler = self.model
        if sharding and sampled:  # before the model is sharded, below
            self.sampler = copy.deepcopy(self.model).requires_grad_(False)
        # Scorer and reference, both sharded or wrapped for several processes.
        level = training.activation_checkpointing
        if level is ActivationCheckpointing.auto:  # no run has chosen one
            level = ActivationCheckpointing.none
        self._scorer = Scorer(
            self.model,
            temperature=temperature,
            logits_budget_mb=training.logits_budget_mb,
            entropy_grad=algorithm.has_bonus,
            share_prefix=training.share_prefix,
            compile=training.compile,
            defer=True,  # `choose_layout` is called below, when the weights have been read
            vision=vision,
            replays_routes=algorithm.replays_routes,
            level=level,
        )
        self._reference = make_reference(self._scorer, self.accelerator, algorithm, sharding)
        self._wrapped = wrap(self._scorer, self.accelerator, sharding)
        if weights is not None:
            self._read(weights)
        if self.sampler is not self.model:
            self.sampler.to(self.device)
        # Try how rollouts can be computed, now that the weights are where they are trained.
        self._scorer.choose_layout(
            self.device, self.world, self.accelerator.autocast(), self._context
        )
        if self._reference is not None:
            self._reference.scorer.copy_layout(self._scorer)
        longest = max(training.token_budget, max_completion_tokens)
        check_kernels(self._scorer.kernels, self.device, longest)
        self.kernel = kernel_names(self._scorer.kernels)
        """Names of the kernels that compute attention: ``varlen``, or ``efficient,flash``."""
        # The optimizer, whose state is in host memory between updates if it is offloaded.
        built = build_optimizer(self.model, optimizer)
        # Weights in 16 bits are updated by way of float32 copies.
        self._masters = built if isinstance(built, MasterWeights) else None
        self.optimizer = self.accelerator.prepare_optimizer(built)
        self._offload: StateOffload | None = None
        if training.offload_during_rollouts:
            self._offload = StateOffload(built, self.storage)
            self._offload.to_host()

    def _read(self, weights: SlicedWeights) -> None:
        """Read this process's part of the weights, and copy them to the reference and the sampler.

        The scorer holds `model` itself. Models of their own, without storage so far, are the
        sampler of a sharded policy, and the reference unless it is the policy without adapters.
        """
        read_shards(weights, self._scorer, self.storage, self.world)
        if self._reference is not None:
            copy_weights(self._reference, self._scorer)
        if self.sampler is not self.model:
            give_storage(self.sampler, self.device)
            self.sampler.tie_weights()
            # Scales of weights in 4 bits are buffers and never change: `refresh_sampler`, which is
            # called after every update, copies parameters only.
            for target, source in zip(scales(self.sampler), scales(self.model), strict=True):
                target.copy_(source)
            self.refresh_sampler()

    @property
    def storage(self) -> torch.device:
        """The device that holds the weights between updates."""
        offload = self._sharding is not None and self._sharding.cpu_offload
        return torch.device("cpu") if offload else self.device

    def kernel_metrics(self) -> dict[str, float]:
        """Return each kernel's share of the attention calls: ``{"training/kernel/flash": 1.0}``."""
        calls = self._scorer.kernels
        total = calls.total()
        return {f"training/kernel/{name}": count / total for name, count in sorted(calls.items())}

    def take_work(self, peak_tflops: float | None = None) -> StepWork:
        """Return the work of this process since the last call, which is that of the step.

        `peak_tflops` is the dense bf16 peak of the card; None: it is looked up by its name.
        """
        return self._work.take(peak_tflops)

    def score(self, groups: Sequence[Sequence[Rollout]]) -> list[list[TrainingSequence]]:
        """Return the sequences of the rollouts that have a reward, scored as the algorithm needs.

        The reference scores them if there is a KL penalty. The policy scores them if the algorithm
        uses its probabilities from before the step's first update. Advantages may be assigned
        later: a sequence reads them from its trajectory when it is packed.
        """
        sequences = [
            [
                sequence
                for rollout in group
                if rollout.reward is not None and rollout.sampled_length > 0
                for sequence in self._sequences(rollout)
            ]
            for group in groups
        ]
        if self._reference is not None:
            flat = list(chain(*sequences))
            scores = score_microbatches(self._reference, self._pack_to_score(flat))
            # The first of (logprobs, entropies).
            sequences = [
                [replace(sequence, ref_logprobs_S=scores[sequence.key][0]) for sequence in group]
                for group in sequences
            ]
        if needs_old_logprobs(self.algorithm):
            flat = list(chain(*sequences))
            scores = score_microbatches(self._scorer, self._pack_to_score(flat))
            for sequence in flat:  # into its trajectory, to be saved with the rollout
                store_scores([sequence], *scores[sequence.key])

            def with_scores(sequence: TrainingSequence) -> TrainingSequence:
                logprobs_S, entropy_S = scores[sequence.key]
                return replace(sequence, old_logprobs_S=logprobs_S, old_entropy_S=entropy_S)

            sequences = [[with_scores(sequence) for sequence in group] for group in sequences]
        return sequences

    def _sequences(self, rollout: Rollout) -> list[TrainingSequence]:
        """Return a rollout's sequences.

        If the algorithm replays experts, raises MissingRoutes for a rollout without recorded
        experts, and for recorded experts that the model does not have.
        """
        # This raises if there is no record.
        sequences = make_sequences(rollout, replays_routes=self.algorithm.replays_routes)
        if self._scorer.replay is None:
            return sequences
        for sequence in sequences:
            assert sequence.routes is not None
            # [positions with experts, layers, experts of a layer]
            problem = self._scorer.replay.routers.find_problem(sequence.routes.experts_RLK)
            if problem is not None:
                raise MissingRoutes(
                    f"algorithm.router_replay=rollout: {sequence.trajectory.name} was sampled with "
                    f"{problem}. Set algorithm.router_replay=off, or sample the model that is "
                    "trained."
                )
        return sequences

    def kl_penalties(
        self, groups: Sequence[Sequence[TrainingSequence]]
    ) -> tuple[dict[str, float], MetricParts]:
        """Return each rollout's KL by id, and its metric; empty without a KL in the reward."""
        penalty = self.algorithm.kl_in_reward
        if penalty is None:
            return {}, {}
        penalties: defaultdict[str, float] = defaultdict(float)
        kl = torch.zeros(2, device=self.device)  # sum and count over all sampled tokens
        recomputed = self.algorithm.behaviour is Behaviour.recomputed
        for sequence in chain(*groups):
            policy_S = sequence.old_logprobs_S if recomputed else sequence.behaviour_S
            assert policy_S is not None and sequence.ref_logprobs_S is not None
            kl_S = kl_estimate(policy_S, sequence.ref_logprobs_S, penalty.estimator)
            penalties[sequence.rollout.rollout_id] += kl_S.sum().item()
            kl = kl + mean_parts(kl_S).to(self.device)
        return penalties, {"kl": kl}

    @property
    def level(self) -> ActivationCheckpointing:
        """The level of activation checkpointing."""
        return self._scorer.level

    def begin_step(self) -> None:
        """Set the step's learning rate, and begin to measure the memory of its updates."""
        self._work.begin_update()
        lr = learning_rate(self._config, self.step + 1, self._steps)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr

    def ready(self) -> AbstractContextManager[None]:
        """Prepare the model for calls of `forward` and `backward` in the block (`Scorer.ready`)."""
        return self._scorer.ready()

    def minibatches(self, groups: Sequence[Sequence[TrainingSequence]]) -> Iterator[Minibatch]:
        """Yield a step's minibatches, the same number in all processes.

        In each epoch the groups are divided into minibatches. One in which no process has anything
        to train is left out, in all processes alike: `minibatch` returns None in all of them. The
        first that is yielded is marked `first`: before its update the policy is still the one that
        sampled.
        """
        first = True
        for epoch in range(self.algorithm.num_epochs):
            for part in split(groups, self.algorithm.minibatches):
                minibatch = self.minibatch(list(chain(*part)))
                if minibatch is not None:
                    minibatch.first, minibatch.epoch = first, epoch
                    first = False
                    yield minibatch

    def minibatch(self, sequences: Sequence[TrainingSequence]) -> Minibatch | None:
        """Return the minibatch of an update: `sequences` with their weights in the loss.

        None in all processes if none of them has a gradient. All processes call this together:
        counts are summed over them (`_sum_of_ranks`). Without sequences a process counts 0.
        """
        algorithm = self.algorithm
        tokens = self._sum_of_ranks(sum(sequence.sampled_length for sequence in sequences))
        if tokens == 0:
            return None
        # Lengths are those of whole rollouts, so that a token's weight does not depend on how many
        # trajectories its rollout has.
        weights_B = token_weights(
            torch.tensor([sequence.rollout.sampled_length for sequence in sequences]),
            algorithm.aggregation,
            tokens=tokens,
            rollouts=self._sum_of_ranks(len({s.rollout.rollout_id for s in sequences})),
            fixed_length=self._max_completion_tokens,
        )
        # Masked truncated rollouts have weight 0 but count in `tokens` and `rollouts`, so that the
        # weight of the others does not depend on how many were truncated.
        weighted_sequences = []
        for sequence, weight in zip(sequences, weights_B.tolist(), strict=True):
            is_masked = algorithm.mask_truncated and sequence.rollout.truncated
            weighted_sequences.append(replace(sequence, weight=0.0 if is_masked else weight))
        minibatch = Minibatch(sequences=weighted_sequences, tokens=tokens)
        if self._sum_of_ranks(len(minibatch.trained_sequences(algorithm))) == 0:
            return None
        # The entropy bonus acts on the tokens that are trained: `tokens` without masked sequences
        # and without tokens of low entropy.
        local_bonus_tokens = sum(s.sampled_length for s in weighted_sequences if s.weight > 0)
        if algorithm.top_entropy < 1:
            masks = top_entropy(weighted_sequences, algorithm.top_entropy, self.world)
            minibatch.top_entropy_masks = masks
            local_bonus_tokens = sum(int(mask_S.sum()) for mask_S in masks.values())
        minibatch.bonus_tokens = self._sum_of_ranks(local_bonus_tokens)
        # The bonus is the mean entropy of these tokens: the loss adds up tokens, so divide here.
        minibatch.bonus = self._bonus.weight(algorithm) / max(minibatch.bonus_tokens, 1)
        return minibatch

    def microbatches(self, minibatch: Minibatch) -> Iterator[Microbatch]:
        """Yield the microbatches of an update; the last backward pass syncs the gradients."""
        microbatches = self._pack(minibatch.trained_sequences(self.algorithm))
        if not microbatches:
            # The other processes wait for this one in the backward pass.
            microbatches = self._pack([stand_in()])
        for microbatch in microbatches:
            # Gradients summed in float32 copies (`MasterWeights`) are averaged in `_clip` instead.
            syncs = microbatch is microbatches[-1] and self._masters is None
            with contextlib.nullcontext() if syncs else self.accelerator.no_sync(self._wrapped):
                yield microbatch

    def forward(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        """Return logprob and entropy of every sampled token, [S] each, with a graph."""
        self._work.add(microbatch, backward=True)
        logprobs_S, entropy_S = self._wrapped(microbatch)
        return logprobs_S, entropy_S

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of a microbatch's loss."""
        # Gradients are averaged over processes, but the loss is the sum over them.
        self.accelerator.backward(loss * self.accelerator.num_processes)
        if self._masters is not None:  # move gradients in 16 bits to float32 sums
            self._masters.fold()

    def with_enough_memory(self, compute: Callable[[], Value]) -> Value:
        """Call the forward and backward pass of a microbatch; repeat it if memory is exhausted.

        Only the first microbatch of a run is repeated, which is its largest one, at the next level
        of activation checkpointing, and only in a single process that holds all weights. Later the
        gradients of earlier microbatches would be lost, and other processes wait in a collective.
        Only the try that fits counts as work of the step.
        """
        work_before = copy.copy(self._work)
        while True:
            try:
                result = compute()
                self._has_computed = True
                return result
            except torch.OutOfMemoryError as error:
                alone = self.world.size == 1 and self._sharding is None
                if not alone or self._has_computed or not self._raise_level():
                    error.add_note(self._remedy())
                    raise
            # After the block: until then the error's traceback holds the tensors of the pass.
            self.optimizer.zero_grad()
            self._work = copy.copy(work_before)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _raise_level(self) -> bool:
        """Go to the next level of activation checkpointing. False: the level stays."""
        if self.on_level is None:
            return False
        level = self._scorer.next_level()
        if level is None:
            return False
        self._scorer.recompute(level)
        self.on_level(level)
        return True

    def _remedy(self) -> str:
        """Return the setting with which the update needs less memory."""
        level = self._scorer.next_level()
        if level is None:
            return (
                f"Set training.token_budget below {self._training.token_budget}: `agenttrain plan` "
                "names the settings with which an update fits."
            )
        return f"Set training.activation_checkpointing={level}, which is {self.level} now."

    def _check_peak(self, peak: int) -> None:
        """Raise the level in all processes if the first update left one of them too little memory.

        A level of activation checkpointing says how many activations are computed again to save
        memory. `peak` is the update's, in bytes of the allocator, beside which a GPU needs a
        reserve (`lacks_reserve`). This check is made once: later updates keep the level. On a CPU
        nothing is measured.
        """
        if self.on_level is None or not self._has_computed:
            return
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            # Bytes of the GPU outside this process's allocator.
            other_bytes = total - free - torch.cuda.memory_reserved(self.device)
            lacks_memory = lacks_reserve(peak, other_bytes, total)
            if self.world.max(float(lacks_memory), "the memory of the first update"):
                self._raise_level()
        self.on_level = None  # without it neither this check nor `_raise_level` does anything

    def optimizer_step(self, minibatch: Minibatch) -> MetricParts:
        """Update the weights; return metrics, each as this process's (sum, count).

        Raises BrokenUpdate in all processes, and changes no weight, if loss or gradient of one of
        them is not finite.
        """
        losses = torch.stack(minibatch.losses)
        norm = self._clip(losses)
        if norm is None:
            raise self._broken_update(losses, minibatch)
        route_metrics: MetricParts = {}
        if minibatch.first and self.algorithm.replays_routes:
            route_metrics = self._route_mismatch(minibatch)  # by the weights before the update
        self.optimizer.step()
        self.optimizer.zero_grad()
        # Trajectories get the scores of their first forward pass in this step. If the algorithm
        # needs them before the first update, `Policy.score` has stored them.
        if minibatch.epoch == 0 and not needs_old_logprobs(self.algorithm):
            for batch, logprobs_S, entropy_S in minibatch.scores:
                store_scores(batch.sequences, logprobs_S, entropy_S)
        metrics = self._update_metrics(minibatch, losses.sum(), norm)
        if minibatch.first:
            metrics |= self._mismatch(minibatch) | route_metrics
        return metrics

    def _update_metrics(self, minibatch: Minibatch, loss: Tensor, norm: float) -> MetricParts:
        """Return metrics of an update, and let the entropy bonus follow the entropy that it had.

        A metric is (sum, count). Both are summed over processes later, and then divided. `loss` is
        this process's, `norm` the gradient's norm, the same in all processes.
        """
        # The loss is the sum of the processes' losses, not their mean: the count is 1 in all.
        loss_count = torch.tensor(float(self.accelerator.is_main_process), device=self.device)
        metrics = {
            "grad_norm": self._from_main(norm),
            "loss": torch.stack((loss, loss_count)),
            "train/tokens": self._from_main(minibatch.tokens),
        }
        if self.algorithm.mask_truncated:
            masked = {s.rollout.rollout_id: s.weight == 0 for s in minibatch.sequences}
            metrics["mask/truncated"] = mean_parts(torch.tensor([*masked.values()])).to(self.device)
        if self.algorithm.has_bonus and minibatch.bonus_tokens:
            entropy = torch.stack(minibatch.entropy).sum()
            total = float(self.accelerator.reduce(entropy, "sum"))
            self._bonus.observe(total / minibatch.bonus_tokens, self.algorithm)
            metrics["entropy_coef"] = self._from_main(self._bonus.coefficient)
        return metrics

    def _route_mismatch(self, minibatch: Minibatch) -> MetricParts:
        """Compare the replayed experts with the policy's own, on the update's first microbatch.

        In one more forward pass, without a gradient, the routers choose the experts themselves. The
        metrics are how often they choose the replayed ones, and how far the logprobs are from the
        engine's with the replayed experts and with the routers' own.

        `equal` holds two counts, to which `comparing` adds during the pass: the (token, layer)
        pairs whose two sets of experts are equal, and all pairs.
        """
        # The scores are the update's: logprobs by the replayed experts, and entropies.
        microbatch, replayed_S, _ = minibatch.scores[0]
        replay = self._scorer.replay
        assert replay is not None, "algorithm.router_replay=rollout"
        with torch.no_grad(), replay.comparing(self.device) as equal:
            unreplayed_S, _ = self._scorer(microbatch)
        release_gathered(self._scorer)
        return route_mismatch(microbatch.behaviour_S, replayed_S, unreplayed_S, equal)

    def _mismatch(self, minibatch: Minibatch) -> MetricParts:
        """Compare the engine's logprobs with the policy's from before the step's first update.

        For the first minibatch only. Each of its `scores` is (microbatch, logprobs, entropies), of
        forward passes before the update. All processes call this together.
        """
        sequences = [s for batch, _, _ in minibatch.scores for s in batch.sequences]
        engine_S = torch.cat([batch.behaviour_S for batch, _, _ in minibatch.scores])
        trainer_S = torch.cat([logprobs_S for _, logprobs_S, _ in minibatch.scores])
        # A token sampled by the policy of this step has `self.step`, the number of finished steps,
        # as its version. Other tokens are stale.
        origins = token_origins(sequences, self.step, engine_S.device)
        tokens = engine_S.new_tensor(len(engine_S))
        sums = torch.stack((engine_S.sum(), trainer_S.sum(), tokens))
        engine_sum, trainer_sum, count = self.accelerator.reduce(sums.double(), "sum").tolist()
        # Over the tokens of all processes: `mismatch` itself sees this process's alone.
        means = (engine_sum / count, trainer_sum / count)
        return mismatch(engine_S, trainer_S, origins, means)

    def end_step(self, averages: Averages) -> dict[str, float]:
        """Finish the step: update the reference, free memory, check its peak. Return the metrics.

        The metrics have the same names in every step. If no rollout had a gradient, `loss`,
        `grad_norm` and `train/tokens` are 0 and the others NaN.
        """
        lr = learning_rate(self._config, self.step + 1, self._steps)
        self.step += 1
        if self._reference is not None:
            self._reference.follow(self.model, self.step)
        return_free_memory()
        self._check_peak(self._work.end_update())
        without_updates = {
            **dict.fromkeys(("loss", "grad_norm", "train/tokens"), 0.0),
            **dict.fromkeys((*metric_names(self.algorithm), *MISMATCH_NAMES), math.nan),
            **dict.fromkeys(ROUTE_NAMES if self.algorithm.replays_routes else (), math.nan),
        }
        return {**without_updates, **averages.means(self.accelerator), "lr": lr}

    def logprobs(self, rollouts: Sequence[Rollout]) -> dict[SequenceKey, Tensor]:
        """Return the logprobs [S] of each sequence by its key, without a gradient."""
        sequences = [sequence for rollout in rollouts for sequence in self._sequences(rollout)]
        scores = score_microbatches(self._scorer, self._pack(sequences))
        return {key: logprobs_S for key, (logprobs_S, _) in scores.items()}

    def probe_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the policy's logprob, at temperature 1, of every id of a text after the first.

        A weight sync compares them with the engine's. All processes call this together.
        """
        # A target is the position before the token that it predicts: the last id predicts none. The
        # stand-in gives the fields that only a loss needs; zeros take the place of the engine's
        # logprobs.
        targets_S = torch.arange(len(token_ids) - 1)
        sequence = replace(
            stand_in(),
            token_ids_T=torch.tensor(token_ids),
            targets_S=targets_S,
            behaviour_S=torch.zeros(len(targets_S)),
            ref_logprobs_S=None,
        )
        transform = self._scorer.transform  # has the temperature of the rollouts
        self._scorer.transform = replace(transform, temperature=1.0)
        try:
            packed = self._scorer.pack([sequence], len(token_ids), self.device)
            # One sequence: the only entry is its (logprobs, entropies).
            ((logprobs_S, _),) = score_microbatches(self._scorer, packed).values()
        finally:
            self._scorer.transform = transform
        values: list[float] = logprobs_S.tolist()
        return values

    def refresh_sampler(self) -> None:
        """Copy the weights into `sampler` if it is not the model itself; all processes together."""
        if self.sampler is self.model:
            return
        sampler_weights = dict(self.sampler.named_parameters())
        with torch.no_grad():
            for name, weight in gather_by_layer(self.model, self.model.named_parameters()):
                sampler_weights[name].copy_(weight)

    @contextlib.contextmanager
    def optimizer_on_device(self) -> Iterator[None]:
        """Keep the optimizer's state on the device for the block, if it is offloaded otherwise."""
        if self._offload is None:
            yield
            return
        self._offload.to_device()
        try:
            yield
        finally:
            self._offload.to_host()

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
        """Continue from `state_dict()`, written by any number of processes.

        Weights that are trained in a shorter format than float32 have a float32 copy in the
        optimizer's state (`masters`). Raises CheckpointError, and changes nothing, if the state was
        saved with another number of copies than this run has: then other weights were trained in
        the shorter format.
        """
        saved = len(state["optimizer"].get("masters", ()))
        copies = 0 if self._masters is None else len(self._masters.pairs)
        if saved != copies:
            raise CheckpointError(
                f"distributed.name, model.dtype: the optimizer saved float32 copies of {saved} "
                f"weights, and this run has {copies} in a shorter format. Only distributed=fsdp2 "
                "trains the decays of recurrent layers in bfloat16: resume with the same settings, "
                "or begin anew from the saved weights with model.path=<checkpoint>"
            )
        self.step = state["step"]
        optimizer = self.optimizer.optimizer  # inside accelerate's wrapper
        with self.optimizer_on_device():
            self.optimizer.load_state_dict(shard_optimizer_state(optimizer, state["optimizer"]))
        if state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self._bonus = EntropyBonus(*state["entropy_bonus"])
        if self._reference is not None and state["reference"] is not None:
            self._reference.load_state_dict(state["reference"])

    def _clip(self, losses: Tensor) -> float | None:
        """Clip the gradient and return its norm before clipping.

        Return None in all processes if the norm, or the loss of any process, is not finite.
        """
        parameters = list(self._wrapped.parameters())
        if self._masters is not None:
            # The float32 copies, and the weights in float32, which have no copy.
            parameters = [p for group in self._masters.param_groups for p in group["params"]]
            # DDP has averaged nothing: `microbatches` keeps it from that, because gradients are
            # summed in the copies, which it does not know. FSDP2 has averaged sharded gradients.
            if self.world.size > 1 and self._sharding is None:
                for parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad = self.accelerator.reduce(parameter.grad, "mean")
        norm = full_tensor(self.accelerator.clip_grad_norm_(parameters, self._config.max_grad_norm))
        # The loss scaler of fp16 provokes overflows on purpose and skips such updates by itself: a
        # norm that is not finite is then no error.
        norm_is_fine = bool(norm.isfinite()) or self.accelerator.scaler is not None
        is_broken = not (bool(losses.isfinite().all()) and norm_is_fine)
        # The losses differ between processes. If one is broken, the update is broken for all.
        broken_ranks = self._sum_of_ranks(int(is_broken))
        return None if broken_ranks else float(norm)

    def _broken_update(self, losses: Tensor, minibatch: Minibatch) -> BrokenUpdate:
        """Return the error that names the rollouts or weights that broke an update.

        All processes call it together, and gather what each has found: weights that are not finite,
        then rollouts that break an update by themselves, else all that were packed together.
        """
        self.optimizer.zero_grad()  # the broken gradients, before each sequence has its own
        trained_sequences = minibatch.trained_sequences(self.algorithm)

        def score_alone(sequence: TrainingSequence) -> tuple[Tensor, Tensor]:
            """Run one sequence forward and backward; return its loss and logprobs, [S].

            `find_culprits` then looks at its own gradient, which packed sequences would share. The
            loss is the one of the update: `minibatch` has its masks and bonus.
            """
            (microbatch,) = pack_evenly(
                self._scorer,
                [sequence],
                sequence.length,
                self.device,
                peers=None,
                context=self._context,
            )
            # The gradient is not averaged over ranks: it is to be that of this sequence alone.
            with self.accelerator.no_sync(self._wrapped):
                inputs = loss_inputs(  # `forward` returns logprobs and entropies
                    microbatch, *self.forward(microbatch), minibatch, self.algorithm
                )
                loss, _ = policy_loss(inputs, self.algorithm)
                loss.backward()
            # Processes that compute the sequence together have a part of its gradient each. FSDP2
            # has added the parts up in its backward pass.
            if self._context is not None and self._sharding is None:
                self._context.add_gradients(self.model)
            return loss.detach(), inputs.logprobs_S.detach()

        world = self.world
        # Weights that are not finite already, by name, of all processes.
        weights = dict(world.gather(list(broken_weights(self.model).items()), "broken weights"))
        # In turns: a context group computes each sequence together, so that only one process at a
        # time runs a sequence of its own, and the others help.
        local_culprits = find_culprits(
            trained_sequences, score_alone, self.model, world, in_turns=self._context is not None
        )
        broken_rollouts = world.gather(local_culprits, "the culprits")
        local_places = [
            place_of(sequence.rollout, sequence.trajectory) for sequence in trained_sequences
        ]
        places = world.gather(local_places, "the culprits")
        cause = ""
        if weights:
            first_name, count = next(iter(weights.items()))
            cause = f"weight {first_name} ({count}); "
        if broken_rollouts:
            cause += list_names([f"rollout {c.place}: {c.what}" for c in broken_rollouts])
        elif places:
            # No sequence is broken by itself: name all rollouts of the update. The message then
            # reads "the update is not finite (…): no rollout is by itself".
            cause += f"no rollout is by itself; they were {list_names(places)}"
        loss = world.sum(losses.sum().item(), "the loss")
        return BrokenUpdate(
            f"step {self.step + 1}: the update is not finite (loss {loss:g}): "
            f"{cause}. The weights are those before it",
            list(dict.fromkeys(culprit.rollout_id for culprit in broken_rollouts)),
            world.to_main(minibatch.sequences, "the sequences of a broken update"),
        )

    def _pack(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        """Pack sequences; with sharded weights, return as many microbatches in every process."""
        peers = None if self._sharding is None else self.world
        budget = self._training.token_budget
        return pack_evenly(self._scorer, sequences, budget, self.device, peers, self._context)

    def _pack_to_score(self, sequences: Sequence[TrainingSequence]) -> list[Microbatch]:
        """Pack sequences as `_pack` does, and count their forward passes as work of the step."""
        microbatches = self._pack(sequences)
        for microbatch in microbatches:
            self._work.add(microbatch, backward=False)
        return microbatches

    def _sum_of_ranks(self, count: int) -> int:
        """Return the sum of a count over all processes."""
        local = torch.tensor(count, device=self.device)
        return int(self.accelerator.reduce(local, "sum"))

    def _from_main(self, value: float) -> Tensor:
        """Return a metric's (sum, count), which is (0, 0) in all processes but the main one.

        For a value that is the same in all processes, and so counts once.
        """
        is_main = self.accelerator.is_main_process
        return torch.tensor((value, 1.0) if is_main else (0.0, 0.0), device=self.device)


def token_origins(
    sequences: Sequence[TrainingSequence], version: int, device: torch.device
) -> Origins:
    """Return the turn, third and staleness of the sampled tokens, sequence by sequence.

    A token is stale if it was sampled under another policy version than `version`, the trained one.
    Example: the thirds of 4 tokens are 0 0 1 2.
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
