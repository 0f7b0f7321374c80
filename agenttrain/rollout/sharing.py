"""The tasks of a step over all processes: each runs its share, then they exchange a summary.

`assign_tasks` balances expected costs, so that all processes finish at about the same time. It is a
pure function of the tasks and of the costs of earlier ones, which every process computes alike: no
process waits for another before the exchange at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeVar

from agenttrain.rollout.collector import Collected, Collector, NoRollouts, collect
from agenttrain.rollout.request import BatchRequest
from agenttrain.types import Rollout, Task
from agenttrain.utils.signals import Preempted

Item = TypeVar("Item")
Group = list[Rollout]


class Peers(Protocol):
    """The processes of a run (`agenttrain.training.world.World` implements this protocol)."""

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
        """Return the objects of all processes, by rank. A `failure` of one is raised in all.

        `what` names the exchange in errors. With `patient` there is no time limit.
        """
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
        """Return the objects, or raise the failure: there is no other process.

        `what` and `patient` have no effect here: they are for errors and waits between processes.
        """
        if failure is not None:
            raise failure
        return list(objects)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """Summary of a group that every process has, whichever of them has the rollouts."""

    place: int
    """Position of its task among those of the step."""
    owner: int
    """Rank of the process that has the rollouts."""
    kind: str
    """Kind of the task (`Costs.kind`)."""
    tokens: float
    """Mean tokens of a rollout after its prompt."""
    informative: bool
    """True if its rewards differ, as `is_informative` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShareSummary:
    """Summary of a process's share."""

    groups: tuple[GroupInfo, ...]
    tasks: int
    why_empty: str | None
    """Why the process has no rollout to learn from, although it has tasks; None: it has one."""


async def collect_share(
    collector: Collector,
    request: BatchRequest,
    *,
    peers: Peers,
    costs: Costs,
    is_informative: Callable[[Group], bool] = lambda group: True,
    minibatches: int = 1,
) -> tuple[Collected, list[GroupInfo]]:
    """Collect this process's share of a request; also return the summaries of all groups, in order.

    All processes pass the same request, for tasks at the places 0, 1, …. Every minibatch's tasks
    are spread evenly over the processes. `costs` learns the tokens of the groups.

    Raises Preempted when the run is to stop, in all processes, and NoRollouts when no process has a
    rollout, unless the request `may_be_empty`. Any other error of one process is raised in all: the
    others raise PeerFailed, which names it.
    """
    tasks = request.tasks
    owners = assign_tasks([costs.expected(task) for task in tasks], peers.size, minibatches)
    share = request.share([place for place, owner in enumerate(owners) if owner == peers.rank])
    collected = Collected()
    no_rollouts: NoRollouts | None = None
    failure: Exception | None = None
    try:
        collected = await collector.stop.cut_short(collect(collector, share))
    except Preempted:  # all processes stop, so none waits in the exchange below
        raise
    except NoRollouts as error:  # an error of the step only if all processes have it
        collected, no_rollouts = error.collected, error
    except Exception as error:  # raised in all processes by the exchange below
        failure = error
    groups = [
        GroupInfo(
            place=place,
            owner=peers.rank,
            kind=costs.kind(tasks[place]),
            tokens=mean_tokens(group),
            informative=is_informative(group),
        )
        for place, group in zip(collected.places, collected.groups, strict=True)
    ]
    why_empty = None if no_rollouts is None else str(no_rollouts)
    own_summary = _ShareSummary(groups=tuple(groups), tasks=len(share.tasks), why_empty=why_empty)
    # Patient: the slowest process may need minutes more than the others.
    summaries = peers.exchange([own_summary], "the end of the rollouts", failure, patient=True)
    # A process without tasks has no rollouts either, and says nothing about the others'.
    reasons = [summary.why_empty for summary in summaries if summary.tasks]
    if reasons and all(reasons):
        if no_rollouts is not None:
            raise no_rollouts
        raise NoRollouts(str(reasons[0]), collected)  # this process had no tasks
    infos = [info for summary in summaries for info in summary.groups]
    infos.sort(key=lambda info: info.place)
    costs.learn([(info.kind, info.tokens) for info in infos])
    return collected, infos


def mean_tokens(group: Group) -> float:
    """Return the mean number of tokens after the prompt of a group's rollouts."""
    tokens = sum(len(t.own_ids) - t.prompt_length for r in group for t in r.trajectories)
    return tokens / len(group) if group else 0.0


def merge_shares(shares: Sequence[Collected]) -> Collected:
    """Merge the shares of all processes, in task order."""
    merged = Collected()
    for share in shares:
        # The processes work at the same time: the longest counts. `extend` adds the seconds up.
        longest_s = max(merged.reward_s, share.reward_s)
        merged.extend(share)
        merged.reward_s = longest_s
    order = sorted(range(len(merged.places)), key=merged.places.__getitem__)
    merged.groups = [merged.groups[index] for index in order]
    merged.places = [merged.places[index] for index in order]
    return merged


CHARACTERS_PER_TOKEN = 4
"""Of a prompt, roughly: it only decides the order of the tasks."""
UNKNOWN_TOKENS = 256.0
"""Tokens after the prompt that a rollout is expected to take before any was measured."""


@dataclass(slots=True)
class Costs:
    """Measured cost of the rollouts of each kind of task, in tokens after the prompt.

    Every process learns the costs of all groups, so that all expect the same. Example: after
    ``learn([("maze", 300.0), ("maze", 500.0)])`` a maze is expected to take 400 and its prompt.
    """

    column: str | None = None
    """Column whose values are kinds of tasks (`eval.group_by`), beside source and environment."""
    _measured: dict[str, tuple[float, int]] = field(default_factory=dict)
    """(sum of the groups' mean tokens, number of groups) by kind."""

    def kind(self, task: Task) -> str:
        """Return the kind of a task: tasks of one kind are expected to cost the same."""
        environment = task.columns.get("environment")
        source = f"{task.source}/" if task.source else ""
        return f"{source}{environment}/{task.columns.get(self.column) if self.column else None}"

    def learn(self, costs: Sequence[tuple[str, float]]) -> None:
        """Add (kind, mean tokens of a rollout) of groups."""
        for kind, tokens in costs:
            total, count = self._measured.get(kind, (0.0, 0))
            self._measured[kind] = (total + tokens, count + 1)

    def copy(self) -> Self:
        """Return an independent copy."""
        duplicate = copy(self)
        duplicate._measured = dict(self._measured)
        return duplicate

    def state_dict(self) -> dict[str, Any]:
        """Return the costs of all kinds as JSON."""
        return {"seen": {kind: [total, count] for kind, (total, count) in self._measured.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._measured = {kind: (total, count) for kind, (total, count) in state["seen"].items()}

    def expected(self, task: Task) -> float:
        """Return the expected tokens of a rollout of the task, its prompt included."""
        texts = (message.get("content") or "" for message in task.messages)
        prompt_tokens = sum(len(text) for text in texts) / CHARACTERS_PER_TOKEN
        # Each measured group has added its rollouts' mean tokens after the prompt.
        total, groups = self._measured.get(self.kind(task), (0.0, 0))
        if groups == 0:  # none of this kind: use the mean of the groups of all kinds
            total = sum(kind_total for kind_total, _ in self._measured.values())
            groups = sum(kind_groups for _, kind_groups in self._measured.values())
        return prompt_tokens + (total / groups if groups else UNKNOWN_TOKENS)


def assign_tasks(costs: Sequence[float], processes: int, minibatches: int = 1) -> list[int]:
    """Return the process of each task: costly tasks first, each to the least loaded process.

    The tasks of one minibatch, `minibatches` successive runs of them, are assigned before those of
    the next, so that each is spread over the processes. Loads add up over all of them: processes
    have to finish all rollouts, not each minibatch, at about the same time. Ties go to the first
    task and the lowest process. Example: ``assign_tasks([5, 1, 1, 3], 2)`` is ``[0, 1, 1, 1]``.
    """
    loads = [0.0] * processes
    owners = [0] * len(costs)
    size = -(-len(costs) // minibatches)  # rounded up; 0 only without tasks
    for start in range(0, len(costs), size or 1):
        minibatch = range(start, min(start + size, len(costs)))
        for place in sorted(minibatch, key=lambda place: (-costs[place], place)):
            owner = min(range(processes), key=lambda process: (loads[process], process))
            owners[place] = owner
            loads[owner] += costs[place]
    return owners
