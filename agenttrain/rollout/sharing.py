"""The tasks of a step over all processes: each runs its share alone, then they exchange notes.

`assign_tasks` assigns whole groups, so that all processes finish together. It is a pure function of the
tasks and of what earlier ones cost, which every process evaluates alike: nothing is asked, nothing
waits, and the order of arrival decides nothing. No process waits for another before the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from agenttrain.rollout.collector import Collected, Collector, NoRollouts, collect
from agenttrain.types import Rollout, Sampling, Task
from agenttrain.utils.signals import Preempted

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


class SingleProcess:
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
class GroupInfo:
    """A group as every process knows it, whichever of them has its rollouts."""

    place: int
    owner: int
    kind: str
    tokens: float
    """Tokens of a rollout after its prompt, on average."""
    informative: Any
    """Result of `look` for the group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    notes: tuple[GroupInfo, ...]
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
) -> tuple[Collected, list[GroupInfo]]:
    """`collect` this process's share of `tasks`; notes of the groups of all, in task order.

    An error of one process is raised by all: the others raise one that names it. Raises NoRollouts
    when not one process has a rollout, unless the call `may_be_empty`; Preempted.
    """
    owners = assign_tasks([costs.expected(task) for task in tasks], peers.size, parts)
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
) -> Iterator[GroupInfo]:
    for place, group in zip(collected.places, collected.groups, strict=True):
        yield GroupInfo(
            place=place,
            owner=rank,
            kind=costs.kind(tasks[place]),
            tokens=mean_new_tokens(group),
            informative=look(group),
        )


def merge_shares(shares: Sequence[Collected]) -> Collected:
    """Merge the shares of all processes in task order; seconds are the slowest one's."""
    whole = Collected()
    for share in shares:
        longest_s = max(whole.reward_s, share.reward_s)
        whole.extend(share)
        whole.reward_s = longest_s
    order = sorted(range(len(whole.places)), key=whole.places.__getitem__)
    whole.groups = [whole.groups[index] for index in order]
    whole.places = [whole.places[index] for index in order]
    return whole


CHARACTERS = 4
"""Characters of a prompt's text per token, roughly: it decides only the order of the tasks."""
UNKNOWN = 256.0
"""Tokens after the prompt that a rollout is taken to need before one was seen."""


@dataclass(slots=True)
class Costs:
    """Cost of the rollouts of each kind of task, as tokens after the prompt.

    All processes are told the same, so that they expect the same. Example: after
    ``learn([("maze", 300.0), ("maze", 500.0)])`` a maze is expected to take 400 and its prompt.
    """

    column: str | None = None
    """The column that tells tasks apart (`eval.group_by`), beside their environment."""
    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)

    def kind(self, task: Task) -> str:
        """Return the name of the tasks that are expected to cost as much as this one."""
        environment = task.columns.get("environment")
        return f"{environment}/{task.columns.get(self.column) if self.column else None}"

    def learn(self, costs: Sequence[tuple[str, float]]) -> None:
        """Take in (kind, mean tokens of a rollout) of groups."""
        for kind, tokens in costs:
            total, count = self._seen.get(kind, (0.0, 0))
            self._seen[kind] = (total + tokens, count + 1)

    def copy(self) -> Self:
        """One that may learn more, and leaves this one as it is."""
        apart = copy(self)
        apart._seen = dict(self._seen)
        return apart

    def state_dict(self) -> dict[str, Any]:
        """Return the costs of all kinds as JSON."""
        return {"seen": {kind: list(informative) for kind, informative in self._seen.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Expect what those of `state_dict()` did."""
        self._seen = {kind: (total, count) for kind, (total, count) in state["seen"].items()}

    def expected(self, task: Task) -> float:
        """Tokens of a rollout of the task, its prompt included."""
        total, count = self._seen.get(self.kind(task), (0.0, 0))
        known = sum(total for total, _ in self._seen.values())
        groups = sum(count for _, count in self._seen.values())
        later = total / count if count else known / groups if groups else UNKNOWN
        return _prompt(task) + later


def _prompt(task: Task) -> float:
    texts = (message.get("content") or "" for message in task.messages)
    return sum(len(text) for text in texts) / CHARACTERS


def mean_new_tokens(group: Sequence[Rollout]) -> float:
    """Mean tokens of a rollout after its prompts."""
    later = sum(t.length - t.prompt_length for r in group for t in r.trajectories)
    return later / len(group) if group else 0.0


def assign_tasks(costs: Sequence[float], processes: int, parts: int = 1) -> list[int]:
    """The process of each task: the longest first, each to the one with least to do.

    `parts`: as many successive parts (minibatches) are each spread evenly. Of equals the first task
    and the lowest process come first. Example: ``deal([5, 1, 1, 3], 2)`` is ``[0, 1, 1, 1]``.
    """
    loads = [0.0] * processes
    owners = [0] * len(costs)
    size = -(-len(costs) // parts)
    for start in range(0, len(costs), size or 1):
        part = range(start, min(start + size, len(costs)))
        for place in sorted(part, key=lambda place: (-costs[place], place)):
            owner = min(range(processes), key=lambda process: (loads[process], process))
            owners[place] = owner
            loads[owner] += costs[place]
    return owners
