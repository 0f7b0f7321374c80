"""The groups of a training step: sample more tasks where groups teach nothing, choose the best.

A group teaches nothing if its rewards are all exactly equal or, with credit per turn, if no turn
has an advantage. Groups are replaced as a whole: dropping single rollouts would bias what is left,
since of rewards [1, 0, 0, 0] only the 1 differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from agenttrain.algorithms.config import AlgorithmConfig, Rewards
from agenttrain.rewards.function import RewardError
from agenttrain.rollout.collector import Collected, Collector
from agenttrain.rollout.config import tasks_of_round
from agenttrain.rollout.request import BatchRequest
from agenttrain.rollout.sharing import Costs, GroupInfo, Peers, SingleProcess, collect_share
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.types import Rollout, Task


async def sample_groups(
    collector: Collector,
    request: BatchRequest,
    draw_tasks: Callable[[int, int], Sequence[Task]],
    *,
    count: int,
    config: AlgorithmConfig,
    peers: Peers | None = None,
    costs: Costs | None = None,
) -> StepBatch:
    """Sample this process's share of a step's groups; choose the `count` groups to train on.

    A group is the rollouts of one task. It is informative if the policy can learn from it: its
    rewards differ (`is_informative`). `request` is the first round, with `oversample` tasks per
    wanted group. While informative groups are missing, up to `dynamic_sampling` more rounds follow,
    of `draw_tasks(start, n)`: `n` tasks from the `start`-th of the step on. Raises as
    `collect_share` does, but NoRollouts in the first round only.
    """
    peers, costs = peers or SingleProcess(), costs or Costs()
    weights = collector.reward_weights
    seed_path, missing_groups = request.seed_path, count
    batch = StepBatch(collected=Collected(), costs=costs)
    groups: list[GroupInfo] = []
    for round_number in range(config.dynamic_sampling + 1):
        if round_number > 0:  # the first round is the request as it came
            request = replace(
                request,
                tasks=draw_tasks(batch.tasks, tasks_of_round(missing_groups, config.oversample)),
                seed_path=(*seed_path, f"r{round_number}"),
                may_be_empty=True,
            )
        try:
            collected, infos = await collect_share(
                collector,
                request,
                peers=peers,
                costs=costs,
                is_informative=lambda group: is_informative(group, config, weights),
                minibatches=config.minibatches,
            )
        except RewardError as error:  # the crash bundle has the earlier rounds too
            error.rollouts = (*batch.rollouts, *error.rollouts)
            raise
        # Places within a round begin at 0, as its seeds do. In the step they go on after those of
        # the earlier rounds.
        first_place = batch.tasks
        collected.places = [first_place + place for place in collected.places]
        groups += [replace(info, place=first_place + info.place) for info in infos]
        batch.collected.extend(collected)
        batch.tasks += len(request.tasks)
        missing_groups = count - sum(info.informative for info in groups)
        if missing_groups <= 0:
            break

    selected = select([info.informative for info in groups], count)
    left_out = [info for i, info in enumerate(groups) if i not in set(selected)]
    surplus = sum(info.informative for info in left_out)
    batch.trained = tuple(groups[i].place for i in selected)
    batch.metrics = {
        "data/tasks": float(batch.tasks),
        "resample/rounds": float(round_number),  # after the first
        "resample/uninformative": float(len(left_out) - surplus),
        "resample/surplus": float(surplus),
    }
    return batch


def is_informative(
    group: Sequence[Rollout],
    config: AlgorithmConfig,
    weights: Mapping[str, float] | None = None,
) -> bool:
    """Return True if a group's rewards differ, or with credit per turn if one has an advantage.

    If the algorithm normalises each reward function by itself, those of any function must differ.
    Functions of weight 0 are only measured. A function that `weights` lacks has weight 1. Examples:
    the rewards 1, 1, None do not differ, 1, 0, None do, and a single reward does not.
    """
    if config.turn_credit is not None:
        from agenttrain.algorithms.credit import rewards_of_turns, turn_advantages  # imports torch

        rewards = [rewards_of_turns(rollout, weights or {}) for rollout in group]
        # Of one group: each rollout's advantages by turn, None for a rollout that has no reward.
        (advantages_of_group,) = turn_advantages([rewards], config).advantages
        return any(any(advantages or ()) for advantages in advantages_of_group)
    if config.rewards is Rewards.sum:
        return len({r.reward for r in group if r.reward is not None}) > 1
    weights = weights or {}
    names = {name for r in group for name in r.rewards if weights.get(name, 1.0) != 0}
    return any(
        len({value for r in group if (value := r.rewards.get(name)) is not None}) > 1
        for name in names
    )


def select(informative: Sequence[bool], count: int) -> list[int]:
    """Return the indices of at most `count` groups, in order, preferring early informative ones.

    If there are too few, the earliest groups of equal rewards fill up. They have no gradient but
    count in the loss's normaliser, which then does not depend on how many groups were informative.
    """
    ranked = sorted(range(len(informative)), key=lambda i: (not informative[i], i))
    return sorted(ranked[:count])
