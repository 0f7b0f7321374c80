"""The groups of a training step: sample more tasks where groups teach nothing, choose the best.

A group whose rewards are all exactly equal has no advantage; with credit per turn, one in which no
turn has an advantage. Groups are replaced as a whole: dropping single rollouts would bias the rest,
since of rewards [1, 0, 0, 0] only the 1 differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agenttrain.algorithms.config import AlgorithmConfig, Rewards
from agenttrain.engines.config import Sampling
from agenttrain.rewards.function import RewardError
from agenttrain.rollout.collector import Collected, Collector
from agenttrain.rollout.config import tasks_of_round
from agenttrain.rollout.sharing import Costs, Group, GroupInfo, Peers, SingleProcess, collect_share
from agenttrain.types import Rollout, Task


@dataclass(slots=True, kw_only=True)
class StepGroups:
    """The groups of one step, as one process holds them."""

    collected: Collected = field(default_factory=Collected)
    """Everything that this process sampled, in task order."""
    trained: list[Group] = field(default_factory=list)
    """Groups to train on, one entry per group of all processes in the same order; a group that
    another process sampled is an empty list."""
    tasks: int = 0
    """Tasks that all processes took: the data cursor moves by as many."""
    rounds: int = 0
    """Rounds after the first."""
    uninformative: int = 0
    """Groups of all processes left out because their rewards are all equal."""
    surplus: int = 0
    """Other groups left out, because there were enough."""

    def metrics(self) -> dict[str, float]:
        """Return counts of the tasks and groups of all processes."""
        return {
            "data/tasks": float(self.tasks),
            "resample/rounds": float(self.rounds),
            "resample/uninformative": float(self.uninformative),
            "resample/surplus": float(self.surplus),
        }


async def sample_groups(
    collector: Collector,
    tasks: Callable[[int, int], Sequence[Task]],
    *,
    count: int,
    config: AlgorithmConfig,
    sampling: Sampling,
    seed_path: tuple[int | str, ...],
    peers: Peers | None = None,
    costs: Costs | None = None,
) -> StepGroups:
    """Sample this process's share of a step's groups; choose the `count` groups to train on.

    `tasks(start, n)` returns n tasks, from the start-th after the data cursor. The first round
    takes `oversample` tasks per wanted group. As long as informative groups are missing, up to
    `dynamic_sampling` further rounds take as many tasks per missing group. Raises as `collect`
    does, in the first round only.
    """
    peers, costs = peers or SingleProcess(), costs or Costs()
    weights = collector.rubric.weights
    step, groups = StepGroups(), list[GroupInfo]()
    missing = count
    for number in range(config.dynamic_sampling + 1):
        wanted = tasks_of_round(missing, config.oversample)
        try:
            collected, infos = await collect_share(
                collector,
                tasks(step.tasks, wanted),
                peers=peers,
                costs=costs,
                samples=config.group_size,
                sampling=sampling,
                seed_path=(*seed_path, f"r{number}") if number else seed_path,
                is_informative=lambda group: informative(group, config, weights),
                minibatches=config.minibatches,
                may_be_empty=number > 0,
            )
        except RewardError as error:
            error.rollouts = (*step.collected.rollouts, *error.rollouts)
            raise
        # A round counts places from 0, as its seeds do; the step counts them from its first task.
        collected.places = [step.tasks + place for place in collected.places]
        groups += [replace(info, place=step.tasks + info.place) for info in infos]
        step.collected.extend(collected)
        step.tasks += wanted
        step.rounds = number
        missing = count - sum(info.informative for info in groups)
        if missing <= 0:
            break

    chosen = select([info.informative for info in groups], count)
    left_out = [info.informative for i, info in enumerate(groups) if i not in set(chosen)]
    step.uninformative, step.surplus = left_out.count(False), left_out.count(True)
    own = dict(zip(step.collected.places, step.collected.groups, strict=True))
    step.trained = [own[groups[i].place] if groups[i].owner == peers.rank else [] for i in chosen]
    return step


def informative(
    group: Sequence[Rollout],
    config: AlgorithmConfig,
    weights: Mapping[str, float] | None = None,
) -> bool:
    """Return True if a group's rewards differ, or with credit per turn if one has an advantage.

    If the algorithm normalises each reward function by itself, those of any function must differ.
    Functions of weight 0 are only measured; a function that `weights` lacks has weight 1. Example:
    rewards 1, 1, None do not differ; 1, 0, None do; a single reward does not.
    """
    if config.turn_credit is not None:
        from agenttrain.algorithms.credit import rewards_of_turns, turn_advantages  # imports torch

        (by_rollout,) = turn_advantages(
            [[rewards_of_turns(one, weights or {}) for one in group]], config
        ).advantages
        return any(any(advantages or ()) for advantages in by_rollout)
    if config.rewards is Rewards.sum:
        return len({r.reward for r in group if r.reward is not None}) > 1
    weights = weights or {}
    names = {name for r in group for name in r.rewards if weights.get(name, 1.0) != 0}
    return any(
        len({value for r in group if (value := r.rewards.get(name)) is not None}) > 1
        for name in names
    )


def select(informative: Sequence[bool], count: int) -> list[int]:
    """Return the indices of at most `count` groups, in order; the earliest informative ones first.

    If there are too few, the earliest groups of equal rewards fill up. They have no gradient but
    count in the loss's normaliser, which then does not depend on how many groups were informative.
    """
    ranked = sorted(range(len(informative)), key=lambda i: (not informative[i], i))
    return sorted(ranked[:count])
