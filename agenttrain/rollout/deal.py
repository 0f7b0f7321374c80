"""Which process runs which task: whole groups, so that all of them finish together.

A pure function of the tasks and of what earlier ones cost, which every process evaluates alike:
nothing is asked, nothing waits, and who came first decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Self

from agenttrain.types import Rollout, Task

CHARACTERS = 4
"""Of a prompt's text for a token, roughly: the order of the tasks is all that it decides."""
UNKNOWN = 256.0
"""Tokens after the prompt that a rollout is taken to need before one was seen."""


@dataclass(slots=True)
class Costs:
    """What rollouts of each kind of task took, as tokens after the prompt.

    All processes are told the same, so that they expect the same. Example: after
    ``learn([("maze", 300.0), ("maze", 500.0)])`` a maze is expected to take 400 and its prompt.
    """

    column: str | None = None
    """The column that tells tasks apart (`eval.group_by`), beside their environment."""
    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)

    def kind(self, task: Task) -> str:
        """What a task has in common with others that cost as much."""
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
        """What was learnt; JSON."""
        return {"seen": {kind: list(seen) for kind, seen in self._seen.items()}}

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


def spent(group: Sequence[Rollout]) -> float:
    """Mean tokens of a rollout after its prompts."""
    later = sum(t.length - t.prompt_length for r in group for t in r.trajectories)
    return later / len(group) if group else 0.0


def deal(costs: Sequence[float], processes: int, parts: int = 1) -> list[int]:
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
