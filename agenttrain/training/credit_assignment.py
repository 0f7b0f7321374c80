"""The advantages of a step's rollouts, from their rewards in all processes.

Shapes: F reward functions, P groups, G rollouts of the largest group, K turns of a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

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


def assign_advantages(
    groups: Sequence[Sequence[Rollout]],
    config: AlgorithmConfig,
    world: World,
    *,
    penalties: Mapping[str, float],
    reward_weights: Mapping[str, float],
) -> MetricParts:
    """Set the advantages of every rollout; None for one without a reward. Return their metrics.

    `penalties` (rollout id -> KL over its sampled tokens) are subtracted from the rewards, times
    beta, before the baseline. `reward_weights` are the rubric's; a missing function has weight 1.
    Statistics of the batch are taken over all processes.
    """

    def penalty_of(rollout: Rollout) -> float:
        return config.beta * penalties.get(rollout.rollout_id, 0.0)

    if config.credit is not Credit.rollout:
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
) -> MetricParts:
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
    if config.credit is Credit.gigpo:
        metrics["credit/step_groups"] = mean_parts(torch.tensor(flags))
    for turn, values in enumerate(by_turn, start=1):
        # Their mean is near 0: the mean square is the variance, also over processes.
        metrics[f"credit/variance/turn_{turn}"] = mean_parts(torch.tensor(values).square())
    return metrics
