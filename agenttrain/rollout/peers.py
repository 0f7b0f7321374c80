"""The tasks of a step over all processes: each runs its share alone, then all tell each other.

Between the dealing and the telling no process waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from agenttrain.rollout.collect import Collected, Collector, NoRollouts, collect
from agenttrain.rollout.deal import Costs, deal, spent
from agenttrain.signals import Preempted
from agenttrain.types import Rollout, Sampling, Task

Item = TypeVar("Item")
Group = list[Rollout]


class Peers(Protocol):
    """The processes of a run (`agenttrain.training.world.World` is one)."""

    rank: int
    size: int

    def exchange(
        self,
        objects: Sequence[Item],
        what: str,
        failure: Exception | None = None,
        *,
        patient: bool = False,
    ) -> list[Item]:
        """Every process's objects in the order of ranks; raises where one says that it failed."""
        ...


class Alone:
    """A run of one process."""

    rank = 0
    size = 1

    def exchange(
        self,
        objects: Sequence[Item],
        what: str,
        failure: Exception | None = None,
        *,
        patient: bool = False,
    ) -> list[Item]:
        """The objects; raises the failure."""
        if failure is not None:
            raise failure
        return list(objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What every process knows of a group, whoever has it."""

    place: int
    owner: int
    kind: str
    tokens: float
    """Of a rollout after its prompt, on average."""
    seen: Any
    """What `look` says of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    notes: tuple[Note, ...]
    tasks: int
    empty: str | None
    """Why a process with tasks has nothing to learn from."""


async def collect_share(
    collector: Collector,
    tasks: Sequence[Task],
    *,
    peers: Peers,
    costs: Costs,
    samples: int,
    sampling: Sampling,
    seed_path: tuple[int | str, ...],
    look: Callable[[Group], Any] = lambda group: None,
    parts: int = 1,
    may_be_empty: bool = False,
) -> tuple[Collected, list[Note]]:
    """`collect` this process's share of `tasks`; notes of the groups of all, in task order.

    An error of one process is raised by all: the others raise one that names it. Raises NoRollouts
    when not one process has a rollout, unless the call `may_be_empty`; Preempted.
    """
    owners = deal([costs.expected(task) for task in tasks], peers.size, parts)
    mine = [place for place, owner in enumerate(owners) if owner == peers.rank]
    collected, empty, failure = Collected(), None, None
    share = collect(
        collector,
        [tasks[place] for place in mine],
        samples=samples,
        sampling=sampling,
        seed_path=seed_path,
        may_be_empty=may_be_empty,
        places=mine,
    )
    try:
        collected = await collector.stop.cut_short(share)
    except Preempted:  # by all processes
        raise
    except NoRollouts as error:
        collected, empty = error.collected, error
    except Exception as error:
        failure = error
    report = _Report(
        notes=tuple(_notes(collected, tasks, costs, peers.rank, look)),
        tasks=len(mine),
        empty=str(empty) if empty else None,
    )
    reports = peers.exchange([report], "the end of the rollouts", failure, patient=True)
    reasons = [report.empty for report in reports if report.tasks]
    if reasons and all(reasons):
        raise empty or NoRollouts(str(reasons[0]), collected)
    everyone = sorted((note for r in reports for note in r.notes), key=lambda note: note.place)
    costs.learn([(note.kind, note.tokens) for note in everyone])
    return collected, everyone


def _notes(
    collected: Collected,
    tasks: Sequence[Task],
    costs: Costs,
    rank: int,
    look: Callable[[Group], Any],
) -> Iterator[Note]:
    for place, group in zip(collected.places, collected.groups, strict=True):
        yield Note(
            place=place,
            owner=rank,
            kind=costs.kind(tasks[place]),
            tokens=spent(group),
            seen=look(group),
        )


def merge(shares: Sequence[Collected]) -> Collected:
    """What all processes collected, in task order; seconds are the slowest one's."""
    whole = Collected()
    for share in shares:
        longest_s = max(whole.reward_s, share.reward_s)
        whole.extend(share)
        whole.reward_s = longest_s
    order = sorted(range(len(whole.places)), key=whole.places.__getitem__)
    whole.groups = [whole.groups[index] for index in order]
    whole.places = [whole.places[index] for index in order]
    return whole
