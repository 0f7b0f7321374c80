"""The advantages of a step's rollouts, from their rewards in all processes.

Shapes: F reward functions, P groups, G rollouts of the largest group, K turns of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from agenttrain.algorithms.advantages import advantages, normalized_advantages
from agenttrain.algorithms.config import Advantage, AlgorithmConfig, Credit, Rewards, Scale
from agenttrain.algorithms.credit import (
    VARIANCES,
    TurnRewards,
    rewards_of_turns,
    set_advantages,
    turn_advantages,
)
from agenttrain.algorithms.loss import MetricParts, mean_parts
from agenttrain.training.world import World
from agenttrain.types import Rollout

Item = TypeVar("Item")

SUM = ""
"""Name under which the sum of a rollout's rewards stands among the functions."""


def assign_advantages(
    groups: Sequence[Sequence[Rollout]],
    config: AlgorithmConfig,
    world: World,
    *,
    penalties: Mapping[str, float],
    reward_weights: Mapping[str, float],
) -> MetricParts:
    """Set the advantages of every rollout; None for one without a reward. Return metrics of turns.

    `penalties` has the KL over each rollout's sampled tokens, by rollout id. Times beta it is
    subtracted from the reward before the baseline. `reward_weights` are the rubric's; a missing
    function has weight 1. Statistics of the batch are taken over all processes.

    Shapes: F reward functions, P groups, G rollouts of the largest group.
    """

    def penalty_of(rollout: Rollout) -> float:
        beta = 0.0 if config.kl is None else config.kl.beta
        return beta * penalties.get(rollout.rollout_id, 0.0)

    if config.turn_credit is not None:
        turn_rewards = [
            [rewards_of_turns(rollout, reward_weights, penalty_of(rollout)) for rollout in group]
            for group in groups
        ]
        return _assign_by_turn(groups, turn_rewards, config, world)

    # Rewards of each rollout by function. If the algorithm uses their sum, it stands as the only
    # function, named SUM.
    rewards: list[list[dict[str, float | None]]] = []
    for group in groups:
        if config.rewards is Rewards.normalize_each:  # settings refuse a KL penalty beside it
            rewards.append([dict(rollout.rewards) for rollout in group])
        else:
            rewards.append(
                [
                    {SUM: None if rollout.reward is None else rollout.reward - penalty_of(rollout)}
                    for rollout in group
                ]
            )
    # Groups of this process, or of all processes if a baseline or scale is taken over the batch.
    # Those of this process begin at `first_group`.
    first_group, compared_rewards = gather_if_batchwise(rewards, config, world)
    names, rewards_FPG = _tabulate(compared_rewards)
    if config.rewards is Rewards.normalize_each:
        weights = [reward_weights.get(name, 1.0) for name in names]
        advantages_PG = normalized_advantages(rewards_FPG, weights, scale=config.scale)
    else:
        rewards_PG = rewards_FPG[0]  # SUM is the only function
        advantages_PG = advantages(rewards_PG, baseline=config.advantage, scale=config.scale)
    local_PG = advantages_PG[first_group : first_group + len(groups)].tolist()
    for group, advantages_G in zip(groups, local_PG, strict=True):
        for rollout, advantage in zip(group, advantages_G, strict=False):  # short groups are padded
            # NaN: no reward, or none by a function of non-zero weight.
            set_advantages(rollout, None if math.isnan(advantage) else advantage)
    return {}  # credit by rollout has no metrics


def gather_if_batchwise(
    groups: list[list[Item]], config: AlgorithmConfig, world: World
) -> tuple[int, list[list[Item]]]:
    """Return the index of this rank's first group, and the groups that statistics are taken over.

    These are all ranks' groups if `scale` or `advantage` is `batch`, else this rank's.
    """
    batchwise = config.scale is Scale.batch or config.advantage is Advantage.batch
    if world.size == 1 or not batchwise:
        return 0, groups
    # `gather` joins lists: a list of one item keeps the ranks' groups apart.
    shares = world.gather([groups], "the rewards of a batch")
    first_group = sum(len(share) for share in shares[: world.rank])
    return first_group, [group for share in shares for group in share]


def _tabulate(rewards: Sequence[Sequence[Mapping[str, float | None]]]) -> tuple[list[str], Tensor]:
    """Return the names of the reward functions and their rewards, [F, P, G] in float64.

    F functions, P groups of rollouts, G rollouts of the largest group. `rewards` has for each group
    and rollout the functions' rewards by name, e.g. ``[[{"correct": 1.0}, {"correct": 0.0}]]``.

    NaN where there is none: a function gave none, or the group has fewer than G rollouts.
    """
    # Without any rollout F and G are 1, so that the advantages of no groups can be computed too.
    names = sorted({name for group in rewards for values in group for name in values}) or [SUM]
    width = max((len(group) for group in rewards), default=0) or 1
    rewards_FPG = torch.full((len(names), len(rewards), width), torch.nan, dtype=torch.float64)
    for f, name in enumerate(names):
        for p, group in enumerate(rewards):
            for g, values in enumerate(group):
                reward = values.get(name)
                rewards_FPG[f, p, g] = torch.nan if reward is None else reward
    return names, rewards_FPG


def _assign_by_turn(
    groups: Sequence[Sequence[Rollout]],
    rewards: list[list[TurnRewards]],
    config: AlgorithmConfig,
    world: World,
) -> MetricParts:
    """Set an advantage for each turn, from the `rewards` of each rollout's turns.

    A rollout without a reward has neither turn rewards nor advantages: both are None. Returns the
    metrics: the turns' mean reward, the variance of the advantages of each of the first VARIANCES
    turns, and for gigpo the share of turns that were compared with other rollouts.
    """
    # All processes' groups if statistics are taken over the batch. Those of this process begin at
    # `first_group`, which is 0 if it is the only one.
    first_group, all_rewards = gather_if_batchwise(rewards, config, world)
    result = turn_advantages(all_rewards, config)
    own_groups = slice(first_group, first_group + len(groups))  # the groups of this process
    by_turn: list[list[float]] = [[] for _ in range(VARIANCES)]  # advantages of each turn
    for group, advantages_G in zip(groups, result.advantages[own_groups], strict=True):
        for rollout, advantages_K in zip(group, advantages_G, strict=True):
            set_advantages(rollout, advantages_K)
            # Turns after the first VARIANCES have no metric, nor have rollouts without a reward.
            for values, advantage in zip(by_turn, advantages_K or (), strict=False):
                values.append(advantage)
    turn_rewards = [
        reward for group in rewards for turns in group for reward in turns.rewards or ()
    ]
    metrics = {"credit/turn_reward": mean_parts(torch.tensor(turn_rewards))}
    if config.credit.name is Credit.gigpo:
        # By group, rollout and turn: True if another rollout of the group was in the turn's state.
        compared = [
            flag for group in result.compared[own_groups] for turns in group for flag in turns
        ]
        metrics["credit/step_groups"] = mean_parts(torch.tensor(compared))
    for turn, values in enumerate(by_turn, start=1):
        # Advantages have a mean near 0, so their mean square is the variance, also over processes.
        metrics[f"credit/variance/turn_{turn}"] = mean_parts(torch.tensor(values).square())
    return metrics
