"""One optimizer update: its sequences, the inputs of its loss, and the scores that it leaves.

Shapes: S sampled tokens of a microbatch, N tokens of all processes.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from agenttrain.algorithms.config import AlgorithmConfig, Behaviour
from agenttrain.algorithms.loss import LossInputs
from agenttrain.algorithms.losses import top_entropy_mask
from agenttrain.training.batch import Microbatch, SequenceKey, TrainingSequence
from agenttrain.training.transfers import to_device
from agenttrain.training.world import World


class ScoredMicrobatch(NamedTuple):
    """A microbatch with its logprobs and entropies from before the update, [S sampled tokens]."""

    microbatch: Microbatch
    logprobs_S: Tensor
    entropy_S: Tensor


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """The sequences of one optimizer update, and the results of its microbatches.

    `Policy.minibatch` makes it, and each microbatch adds its results by `record`.
    """

    sequences: list[TrainingSequence]
    """Sequences of this process, with the weight of their tokens in the loss."""
    tokens: int
    """Sampled tokens of all processes."""
    epoch: int = 0
    """Pass over the step's rollouts, from 0."""
    first: bool = False
    """True for the first minibatch of a step: the policy is still the one that sampled."""
    top_entropy_masks: Mapping[SequenceKey, Tensor] | None = None
    """Mask of the sampled tokens of top entropy, by sequence key; None: all tokens are trained."""
    bonus_tokens: int = 0
    """Tokens of all processes that the entropy bonus acts on."""
    bonus: float = 0.0
    """Weight of the entropy of each of these tokens."""
    losses: list[Tensor] = field(default_factory=list)
    """Loss of each microbatch."""
    scores: list[ScoredMicrobatch] = field(default_factory=list)
    """Each microbatch with its logprobs and entropies."""
    entropy: list[Tensor] = field(default_factory=list)
    """Sum of each microbatch's entropies over the tokens that the bonus acts on."""

    def trained_sequences(self, config: AlgorithmConfig) -> list[TrainingSequence]:
        """Return the sequences that have a gradient; the others need no forward pass."""
        # KL and entropy have a gradient also where the advantage is 0.
        has_other_terms = config.kl_in_loss is not None or config.has_bonus
        return [
            sequence
            for sequence in self.sequences
            if sequence.weight > 0
            and (has_other_terms or any(sequence.trajectory.advantages or ()))
        ]

    def record(self, microbatch: Microbatch, inputs: LossInputs, loss: Tensor) -> None:
        """Store the result of a microbatch, detached from its graph.

        `Policy.optimizer_step` reads `losses`, `scores` and `entropy`.
        """
        assert inputs.entropy_S is not None
        entropy_S = inputs.entropy_S.detach()
        self.losses.append(loss.detach())
        self.scores.append(ScoredMicrobatch(microbatch, inputs.logprobs_S.detach(), entropy_S))
        # The entropy bonus acts on the trained tokens: those that `kept_S`, the mask of top
        # entropy, keeps. Its coefficient follows their mean entropy.
        with_bonus_S = entropy_S if inputs.kept_S is None else entropy_S * inputs.kept_S
        self.entropy.append(with_bonus_S.sum())


def top_entropy(
    sequences: Sequence[TrainingSequence], share: float, world: World
) -> dict[SequenceKey, Tensor]:
    """Return the mask of the top `share` of tokens by entropy, [S] for each sequence with a weight.

    Sequences of weight 0 have no gradient: they are not compared, and get no mask. Tokens of all
    processes are compared. Ties go to the earlier position, then to the rollout that comes first by
    group and sample. So they do not depend on which process holds a rollout, or on what is packed
    with it. N: tokens of all processes.
    """
    # (sort key, entropies) of each sequence. The sort key is the same in every process.
    local: list[tuple[tuple[Any, ...], Tensor]] = [
        ((sequence.rollout.group_id, sequence.rollout.sample, sequence.key), sequence.old_entropy_S)
        for sequence in sequences
        if sequence.weight > 0 and sequence.old_entropy_S is not None
    ]
    # `gather` joins the lists of all processes. Each gives a list of one item: its `local`.
    by_rank = world.gather([local], "the entropies of an update")
    entropies = [entry for entries in by_rank for entry in entries]
    sorted_keys = sorted(key for key, _ in entropies)
    number_of = {key: number for number, key in enumerate(sorted_keys)}
    # A unique number for each token, by which ties are broken. It sorts by position in the sequence
    # first, then by sequence: of 3 sequences, position 2 of the one with number 1 is 2 * 3 + 1.
    places = [
        torch.arange(len(entropy_S)) * len(sorted_keys) + number_of[key]
        for key, entropy_S in entropies
    ]
    # `cat` needs a tensor even if there is no sequence.
    entropy_N = torch.cat([torch.zeros(0), *(entropy_S for _, entropy_S in entropies)])
    place_N = torch.cat([torch.zeros(0, dtype=torch.long), *places])
    mask_N = top_entropy_mask(entropy_N, place_N, share)
    masks = mask_N.split([len(entropy_S) for _, entropy_S in entropies])
    # The masks are in the order of the ranks: take those of this process.
    first = sum(len(entries) for entries in by_rank[: world.rank])
    own_masks = masks[first : first + len(local)]
    sequence_keys = [sort_key[-1] for sort_key, _ in local]
    return dict(zip(sequence_keys, own_masks, strict=True))


def loss_inputs(
    microbatch: Microbatch,
    logprobs_S: Tensor,
    entropy_S: Tensor,
    minibatch: Minibatch,
    config: AlgorithmConfig,
) -> LossInputs:
    """Return the inputs of a microbatch's loss.

    `engine_S` are the logprobs of the engine that sampled the tokens. `behaviour_S` are those in
    the denominator of the ratio: the engine's, or, if `algorithm.behaviour` is `recomputed`, the
    policy's own from before the step's first update (`old_logprobs_S`). `kept_S` is the mask of the
    tokens of top entropy.
    """
    device = logprobs_S.device
    kept_S = None
    if minibatch.top_entropy_masks is not None:
        # A process without sequences computes a stand-in, which has no sampled token and no mask.
        masks = [
            minibatch.top_entropy_masks[sequence.key]
            for sequence in microbatch.sequences
            if sequence.sampled_length
        ]
        kept_S = to_device(torch.cat([torch.zeros(0, dtype=torch.bool), *masks]), device)
    engine_S = microbatch.behaviour_S  # a microbatch has the logprobs of the engine alone
    behaviour_S = engine_S
    if config.behaviour is Behaviour.recomputed:
        old = [s.old_logprobs_S for s in microbatch.sequences if s.old_logprobs_S is not None]
        # With one update per step the old policy was not scored: it is the current one.
        was_scored = len(old) == len(microbatch.sequences)
        if was_scored:
            behaviour_S = to_device(torch.cat(old), device).to(logprobs_S.dtype)
        else:
            behaviour_S = logprobs_S.detach()
    sequence_tokens = [sequence.sampled_length for sequence in microbatch.sequences]
    rollout_tokens = [sequence.rollout.sampled_length for sequence in microbatch.sequences]
    rollout_tokens_B = None
    if rollout_tokens != sequence_tokens:  # a rollout has several trajectories
        rollout_tokens_B = to_device(torch.tensor(rollout_tokens), device)
    return LossInputs(
        logprobs_S=logprobs_S,
        behaviour_S=behaviour_S,
        engine_S=engine_S,
        ref_logprobs_S=microbatch.ref_logprobs_S,
        entropy_S=entropy_S,
        kept_S=kept_S,
        sequence_S=microbatch.sequence_S,
        advantages_S=microbatch.advantages_S,
        weights_B=microbatch.weights_B,
        rollout_tokens_B=rollout_tokens_B,
        bonus=minibatch.bonus,
    )


def store_scores(
    sequences: Sequence[TrainingSequence], logprobs_S: Tensor, entropy_S: Tensor
) -> None:
    """Write the scores of packed sequences into their trajectories, one sequence after the other.

    A trajectory's `trainer_logprobs` and `entropies` are saved with its rollout.
    """
    lengths = [sequence.sampled_length for sequence in sequences]
    logprobs = logprobs_S.float().cpu().split(lengths)
    entropies = entropy_S.float().cpu().split(lengths)
    for index, sequence in enumerate(sequences):
        sequence.trajectory.trainer_logprobs = array("f", logprobs[index].numpy())
        sequence.trajectory.entropies = array("f", entropies[index].numpy())


def needs_old_logprobs(config: AlgorithmConfig) -> bool:
    """Return True if the policy has to score the rollouts before the step's first update.

    `top_entropy` ranks tokens by their entropy before that update. Recomputed probabilities need a
    pass of their own if the first update's forward pass would compute them too late: for a second
    update, for a KL in the reward, or for a teacher's advantages.
    """
    recomputed = config.behaviour is Behaviour.recomputed
    adds_to_rewards = config.kl_in_reward is not None or config.teacher is not None
    needs_early = config.updates > 1 or adds_to_rewards
    return config.top_entropy < 1 or (recomputed and needs_early)
