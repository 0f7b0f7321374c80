"""The groups of a training step: more tasks where groups teach nothing, and which ones are kept.

A group whose rewards are all exactly equal has no advantage. Dropping single rollouts instead of
whole groups would bias what is left: of rewards [1, 0, 0, 0] only the 1 differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agenttrain.config.algorithm import AlgorithmConfig, Rewards
from agenttrain.config.arithmetic import tasks_of_round
from agenttrain.rewards.base import RewardError
from agenttrain.rollout.collect import Collected, Collector, collect
from agenttrain.types import Rollout, Sampling, Task

Group = list[Rollout]


@dataclass(slots=True, kw_only=True)
class Drawn:
    """The groups of one step."""

    collected: Collected = field(default_factory=Collected)
    """Everything that was sampled, in the order of the tasks."""
    trained: list[Group] = field(default_factory=list)
    """The groups to train on, in the same order."""
    tasks: int = 0
    """Tasks that were drawn: how far the data cursor moves."""
    rounds: int = 0
    """Extra rounds."""
    rewards: Rewards = Rewards.sum
    """What makes a group informative."""

    def metrics(self) -> dict[str, float]:
        """What became of the groups; `uninformative` are those whose rewards are all equal."""
        groups = self.collected.groups
        kept = {id(group) for group in self.trained}
        left_out = [group for group in groups if id(group) not in kept]
        equal = sum(not informative(group, self.rewards) for group in left_out)
        return {
            "data/tasks": float(self.tasks),
            "resample/rounds": float(self.rounds),
            "resample/uninformative": float(equal),
            "resample/surplus": float(len(left_out) - equal),
        }


async def draw(
    collector: Collector,
    tasks: Callable[[int, int], Sequence[Task]],
    *,
    count: int,
    config: AlgorithmConfig,
    sampling: Sampling,
    seed_path: tuple[int | str, ...],
) -> Drawn:
    """The groups of a step that trains on `count` of them.

    `tasks(start, n)` gives the n tasks from the start-th after the data cursor. The first round
    takes `oversample` tasks for each group that is wanted; while informative groups are missing,
    each of at most `dynamic_sampling` further rounds takes as many for each missing one. Raises as
    `collect`, for the first round only.
    """
    drawn = Drawn(rewards=config.rewards)
    missing = count
    for number in range(config.dynamic_sampling + 1):
        wanted = tasks_of_round(missing, config.oversample)
        try:
            collected = await collect(
                collector,
                tasks(drawn.tasks, wanted),
                samples=config.group_size,
                sampling=sampling,
                seed_path=(*seed_path, f"r{number}") if number else seed_path,
                may_be_empty=number > 0,
            )
        except RewardError as error:
            error.rollouts = (*drawn.collected.rollouts, *error.rollouts)
            raise
        drawn.collected.extend(collected)
        drawn.tasks += wanted
        drawn.rounds = number
        missing = count - sum(informative(g, config.rewards) for g in drawn.collected.groups)
        if missing <= 0:
            break
    drawn.trained = select(drawn.collected.groups, count, config.rewards)
    return drawn


def informative(group: Sequence[Rollout], rewards: Rewards) -> bool:
    """Whether some rewards of a group differ; those of single functions, where each counts alone.

    Example: rewards 1, 1, None do not; 1, 0, None do; one alone does not.
    """
    if rewards is Rewards.sum:
        return len({r.reward for r in group if r.reward is not None}) > 1
    names = {name for rollout in group for name in rollout.rewards}
    return any(
        len({value for r in group if (value := r.rewards.get(name)) is not None}) > 1
        for name in names
    )


def select(groups: Sequence[Group], count: int, rewards: Rewards) -> list[Group]:
    """At most `count` groups, in their order: informative ones first, the earliest of each kind.

    What is missing is filled with groups of equal rewards: they count in the loss's normaliser,
    whose value then does not depend on how many there were.
    """
    ranked = sorted(range(len(groups)), key=lambda i: (not informative(groups[i], rewards), i))
    return [groups[i] for i in sorted(ranked[:count])]
