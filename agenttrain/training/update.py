"""The optimizer updates of a step: their sequences, advantages, and the divisors of their losses.

Shapes: F reward functions, P groups, G rollouts of the largest group, B sequences, S sampled tokens
of a microbatch, N tokens of all processes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from agenttrain.algorithms.advantages import advantages, normalized_advantages
from agenttrain.algorithms.config import (
    Advantage,
    AlgorithmConfig,
    Behaviour,
    Credit,
    Rewards,
    Scale,
)
from agenttrain.algorithms.credit import (
    VARIANCES,
    TurnRewards,
    rewards_of_turns,
    set_advantages,
    turn_advantages,
)
from agenttrain.algorithms.loss import LossInputs, Metrics, mean_parts
from agenttrain.algorithms.losses import top_entropy_mask
from agenttrain.training.batch import Microbatch, SequenceKey, TrainingSequence
from agenttrain.training.world import World
from agenttrain.types import Rollout

Item = TypeVar("Item")


def assign_advantages(
    groups: Sequence[Sequence[Rollout]],
    config: AlgorithmConfig,
    world: World,
    *,
    penalties: Mapping[str, float],
    reward_weights: Mapping[str, float],
) -> Metrics:
    """Set the advantages of every rollout; None for one without a reward. Return their metrics.

    `penalties` (rollout id -> KL over its sampled tokens) are subtracted from the rewards, times
    beta, before the baseline. `reward_weights` are the rubric's; a missing function has weight 1.
    Statistics of the batch are taken over all processes.
    """

    def penalty_of(rollout: Rollout) -> float:
        beta = 0.0 if config.kl is None else config.kl.beta
        return beta * penalties.get(rollout.rollout_id, 0.0)

    if config.turn_credit is not None:
        by_turn = [
            [rewards_of_turns(one, reward_weights, penalty_of(one)) for one in group]
            for group in groups
        ]
        return _assign_by_turn(groups, by_turn, config, world)
    # Of each rollout by function, or under the name "" if the algorithm uses their sum.
    rewards: list[list[dict[str, float | None]]] = [[] for _ in groups]
    for own, members in zip(rewards, groups, strict=True):
        for rollout in members:
            if config.rewards is Rewards.normalize_each:
                own.append(dict(rollout.rewards))
            else:
                reward = rollout.reward
                own.append({"": None if reward is None else reward - penalty_of(rollout)})
    first, everyone = _of_the_batch(rewards, config, world)
    names = sorted({name for group in everyone for values in group for name in values}) or [""]
    width = max((len(group) for group in everyone), default=0) or 1
    rewards_FPG = torch.full((len(names), len(everyone), width), torch.nan, dtype=torch.float64)
    for f, name in enumerate(names):
        for p, group in enumerate(everyone):
            for g, values in enumerate(group):
                reward = values.get(name)
                rewards_FPG[f, p, g] = torch.nan if reward is None else reward
    if config.rewards is Rewards.normalize_each:
        weights = [reward_weights.get(name, 1.0) for name in names]
        advantages_PG = normalized_advantages(rewards_FPG, weights, scale=config.scale)
    else:
        advantages_PG = advantages(rewards_FPG[0], baseline=config.advantage, scale=config.scale)
    own_PG = advantages_PG[first : first + len(groups)].tolist()
    for rollouts, own_G in zip(groups, own_PG, strict=True):
        for rollout, advantage in zip(rollouts, own_G, strict=False):
            # NaN although there is a reward: no function of non-zero weight gave one.
            set_advantages(rollout, None if math.isnan(advantage) else advantage)
    return {}


def _of_the_batch(
    groups: list[list[Item]], config: AlgorithmConfig, world: World
) -> tuple[int, list[list[Item]]]:
    """Return the groups of all processes if a statistic is of the batch, and the first own one."""
    if world.size == 1 or not (config.scale is Scale.batch or config.advantage is Advantage.batch):
        return 0, groups
    shares = world.gather([groups], "the rewards of a batch")
    return sum(map(len, shares[: world.rank])), [group for share in shares for group in share]


def _assign_by_turn(
    groups: Sequence[Sequence[Rollout]],
    rewards: list[list[TurnRewards]],
    config: AlgorithmConfig,
    world: World,
) -> Metrics:
    """`assign_advantages` for credit per turn; `rewards` are those of the rollouts."""
    first, everyone = _of_the_batch(rewards, config, world)
    result = turn_advantages(everyone, config)
    own = slice(first, first + len(groups))
    by_turn: list[list[float]] = [[] for _ in range(VARIANCES)]
    for rollouts, advantages_G in zip(groups, result.advantages[own], strict=True):
        for rollout, advantages_K in zip(rollouts, advantages_G, strict=True):
            set_advantages(rollout, advantages_K)
            for values, advantage in zip(by_turn, advantages_K or (), strict=False):
                values.append(advantage)
    given = [r for group in rewards for one in group for r in one.rewards or ()]
    flags = [flag for row in result.compared[own] for one in row for flag in one]
    metrics = {"credit/turn_reward": mean_parts(torch.tensor(given))}
    if config.credit.name is Credit.gigpo:
        metrics["credit/step_groups"] = mean_parts(torch.tensor(flags))
    for turn, values in enumerate(by_turn, start=1):
        # Their mean is near 0: the mean square is the variance, also over processes.
        metrics[f"credit/variance/turn_{turn}"] = mean_parts(torch.tensor(values).square())
    return metrics


@dataclass(slots=True, kw_only=True)
class Minibatch:
    """The sequences of one optimizer update, and the results of its microbatches.

    Counts of tokens are over all processes: losses are divided by them.
    """

    sequences: list[TrainingSequence]
    """Sequences of this process, with the weight of their tokens in the loss."""
    tokens: int
    """Sampled tokens of all processes."""
    epoch: int = 0
    first: bool = False
    """True for the first minibatch of a step: the policy is still the one that sampled."""
    kept: Mapping[SequenceKey, Tensor] | None = None
    """Mask of the sampled tokens of top entropy, by sequence key; None: all tokens are trained."""
    bonus_tokens: int = 0
    """Tokens of all processes that the entropy bonus acts on."""
    bonus: float = 0.0
    """Weight of the entropy of each of these tokens."""
    losses: list[Tensor] = field(default_factory=list)
    """Loss of each microbatch."""
    scores: list[tuple[Microbatch, Tensor, Tensor]] = field(default_factory=list)
    """Each microbatch with its logprobs and entropies from before the update, [S] each."""
    entropy: list[Tensor] = field(default_factory=list)
    """Sum of each microbatch's entropies over the tokens that the bonus acts on."""

    def trained(self, config: AlgorithmConfig) -> list[TrainingSequence]:
        """Return the sequences that have a gradient; the others need no forward pass."""
        everything = config.kl_in_loss is not None or config.has_bonus
        return [
            sequence
            for sequence in self.sequences
            if sequence.weight > 0 and (everything or any(sequence.trajectory.advantages or ()))
        ]

    def record(self, microbatch: Microbatch, inputs: LossInputs, loss: Tensor) -> None:
        """Store the result of a microbatch, detached from its graph."""
        assert inputs.entropy_S is not None
        entropy_S = inputs.entropy_S.detach()
        self.losses.append(loss.detach())
        self.scores.append((microbatch, inputs.logprobs_S.detach(), entropy_S))
        acting_S = entropy_S if inputs.kept_S is None else entropy_S * inputs.kept_S
        self.entropy.append(acting_S.sum())


def top_entropy(
    sequences: Sequence[TrainingSequence], share: float, world: World
) -> dict[SequenceKey, Tensor]:
    """Return `Minibatch.kept`: the tokens of highest entropy among those of all processes.

    Ties go to the earlier position, then to the rollout with the lower id. Neither depends on which
    process holds a rollout or on what is packed with it.
    """
    own: list[tuple[tuple[Any, ...], Tensor]] = [
        ((sequence.rollout.group_id, sequence.rollout.sample, sequence.key), sequence.old_entropy_S)
        for sequence in sequences
        if sequence.weight > 0 and sequence.old_entropy_S is not None
    ]
    shares = world.gather([own], "the entropies of an update")
    everyone = [pair for pairs in shares for pair in pairs]
    rank_of = {name: rank for rank, name in enumerate(sorted(name for name, _ in everyone))}
    entropy_N = torch.cat([torch.zeros(0), *(entropy_S for _, entropy_S in everyone)])
    place_N = torch.cat(
        [
            torch.zeros(0, dtype=torch.long),
            *(torch.arange(len(e)) * len(rank_of) + rank_of[name] for name, e in everyone),
        ]
    )
    kept_N = top_entropy_mask(entropy_N, place_N, share)
    kept = kept_N.split([len(entropy_S) for _, entropy_S in everyone])
    first = sum(map(len, shares[: world.rank]))
    return {name[-1]: mask for (name, _), mask in zip(own, kept[first:], strict=False)}


def loss_inputs(
    microbatch: Microbatch,
    logprobs_S: Tensor,
    entropy_S: Tensor,
    minibatch: Minibatch,
    config: AlgorithmConfig,
) -> LossInputs:
    """Return the inputs of a microbatch's loss."""
    kept_S = None
    if minibatch.kept is not None:
        # A stand-in has no token and no mask.
        kept = [minibatch.kept[r.key] for r in microbatch.sequences if r.sampled_length]
        kept_S = torch.cat([torch.zeros(0, dtype=torch.bool), *kept]).to(logprobs_S.device)
    behaviour_S = microbatch.behaviour_S
    if config.behaviour is Behaviour.recomputed:
        old = [sequence.old_logprobs_S for sequence in microbatch.sequences]
        known = [values for values in old if values is not None]
        # With one update per step the old policy was not scored: it is the current one.
        scored = len(known) == len(old)
        behaviour_S = torch.cat(known).to(logprobs_S) if scored else logprobs_S.detach()
    lengths = [sequence.sampled_length for sequence in microbatch.sequences]
    of_rollouts = [sequence.rollout.sampled_length for sequence in microbatch.sequences]
    parts = lengths != of_rollouts
    return LossInputs(
        logprobs_S=logprobs_S,
        behaviour_S=behaviour_S,
        engine_S=microbatch.behaviour_S,
        ref_logprobs_S=microbatch.ref_logprobs_S,
        entropy_S=entropy_S,
        kept_S=kept_S,
        sequence_S=microbatch.sequence_S,
        advantages_S=microbatch.advantages_S,
        weights_B=microbatch.weights_B,
        rollout_tokens_B=torch.tensor(of_rollouts, device=logprobs_S.device) if parts else None,
        bonus=minibatch.bonus,
    )


def store_scores(
    sequences: Sequence[TrainingSequence], logprobs_S: Tensor, entropy_S: Tensor
) -> None:
    """Set `trainer_logprobs` and `entropies` of the trajectories; scores are in their order."""
    lengths = [sequence.sampled_length for sequence in sequences]
    pieces = [values_S.float().cpu().split(lengths) for values_S in (logprobs_S, entropy_S)]
    for sequence, own_S, entropies in zip(sequences, *pieces, strict=True):
        sequence.trajectory.trainer_logprobs = array("f", own_S.numpy())
        sequence.trajectory.entropies = array("f", entropies.numpy())


def needs_old_logprobs(config: AlgorithmConfig) -> bool:
    """Return True if the policy has to score the rollouts before the step's first update.

    With one update per step, its forward pass computes these probabilities anyway.
    """
    recomputed = config.behaviour is Behaviour.recomputed
    before = config.updates > 1 or config.kl_in_reward is not None or config.has_teacher
    return config.top_entropy < 1 or (recomputed and before)
