"""The groups of a training step: more tasks where groups teach nothing, and which ones are kept.

A group whose rewards are all exactly equal has no advantage. Dropping single rollouts instead of
whole groups would bias what is left: of rewards [1, 0, 0, 0] only the 1 differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agenttrain.algorithms.config import AlgorithmConfig, Rewards
from agenttrain.rewards.function import RewardError
from agenttrain.rollout.collector import Collected, Collector
from agenttrain.rollout.config import tasks_of_round
from agenttrain.rollout.sharing import Costs, Group, GroupInfo, Peers, SingleProcess, collect_share
from agenttrain.types import Rollout, Sampling, Task


@dataclass(slots=True, kw_only=True)
class StepGroups:
    """The groups of one step, as this process sees them."""

    collected: Collected = field(default_factory=Collected)
    """Everything that this process sampled, in the order of the tasks."""
    trained: list[Group] = field(default_factory=list)
    """The groups to train on, of all processes and in the same order: another's is empty here."""
    tasks: int = 0
    """Tasks that were drawn: how far the data cursor moves."""
    rounds: int = 0
    """Extra rounds."""
    uninformative: int = 0
    """Groups of all processes that are not trained on, and whose rewards are all equal."""
    surplus: int = 0
    """Other groups that are not trained on."""

    def metrics(self) -> dict[str, float]:
        """Return counts of the tasks and groups of all processes."""
        return {
            "data/tasks": float(self.tasks),
            "resample/rounds": float(self.rounds),
            "resample/uninformative": float(self.uninformative),
            "resample/surplus": float(self.surplus),
        }

    def keep(self, notes: Sequence[GroupInfo], count: int, rank: int) -> None:
        """Choose `count` of the groups that the notes are of; `rank` is this process."""
        chosen = select([note.informative for note in notes], count)
        left = [note.informative for index, note in enumerate(notes) if index not in set(chosen)]
        self.uninformative, self.surplus = left.count(False), left.count(True)
        mine = dict(zip(self.collected.places, self.collected.groups, strict=True))
        kept = [notes[index] for index in chosen]
        self.trained = [mine[note.place] if note.owner == rank else [] for note in kept]


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
    """The groups of a step that trains on `count` of them, this process's share sampled here.

    `tasks(start, n)` gives the n tasks from the start-th after the data cursor. The first round
    takes `oversample` tasks for each group that is wanted; while informative groups are missing,
    each of at most `dynamic_sampling` further rounds takes as many for each missing one. Raises as
    `collect`, for the first round only.
    """
    peers, costs = peers or SingleProcess(), costs or Costs()
    weights = collector.rubric.weights
    drawn, notes = StepGroups(), list[GroupInfo]()
    missing = count
    for number in range(config.dynamic_sampling + 1):
        wanted = tasks_of_round(missing, config.oversample)
        try:
            collected, found = await collect_share(
                collector,
                tasks(drawn.tasks, wanted),
                peers=peers,
                costs=costs,
                samples=config.group_size,
                sampling=sampling,
                seed_path=(*seed_path, f"r{number}") if number else seed_path,
                look=lambda group: informative(group, config.rewards, weights),
                parts=config.minibatches,
                may_be_empty=number > 0,
            )
        except RewardError as error:
            error.rollouts = (*drawn.collected.rollouts, *error.rollouts)
            raise
        # A round counts its places from 0, as its seeds do; a step from its first task.
        collected.places = [drawn.tasks + place for place in collected.places]
        notes += [replace(note, place=drawn.tasks + note.place) for note in found]
        drawn.collected.extend(collected)
        drawn.tasks += wanted
        drawn.rounds = number
        missing = count - sum(note.informative for note in notes)
        if missing <= 0:
            break
    drawn.keep(notes, count, peers.rank)
    return drawn


def informative(
    group: Sequence[Rollout], rewards: Rewards, weights: Mapping[str, float] | None = None
) -> bool:
    """Return True if a group's rewards differ; where each function counts alone, those of any one.

    A function of weight 0 is only measured; one that `weights` lacks has weight 1. Example: rewards
    1, 1, None do not differ; 1, 0, None do; one alone does not.
    """
    if rewards is Rewards.sum:
        return len({r.reward for r in group if r.reward is not None}) > 1
    weights = weights or {}
    names = {name for r in group for name in r.rewards if weights.get(name, 1.0) != 0}
    return any(
        len({value for r in group if (value := r.rewards.get(name)) is not None}) > 1
        for name in names
    )


def select(informative: Sequence[bool], count: int) -> list[int]:
    """Indices of at most `count` groups, in order: informative ones first, the earliest of each.

    What is missing is filled with groups of equal rewards: they count in the loss's normaliser,
    whose value then does not depend on how many there were.
    """
    ranked = sorted(range(len(informative)), key=lambda i: (not informative[i], i))
    return sorted(ranked[:count])
