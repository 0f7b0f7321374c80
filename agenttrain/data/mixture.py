"""A mixture of sources of tasks, each of which has its share of the tasks of a run (`data=mix`).

The source of the n-th task is a function of (shares, seed, n), until a source is dropped at its
end. The sources come in turn, so that the tasks of a minibatch are mixed like those of the step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from agenttrain.data.config import AtEnd, SourceConfig
from agenttrain.data.curriculum import Curriculum, Result
from agenttrain.data.tasks import TaskSource
from agenttrain.types import Rollout, Task


def shares_of(sources: Mapping[str, SourceConfig], tasks_per_step: int) -> dict[str, Fraction]:
    """Return each source's share of the tasks, exactly; the shares add up to 1.

    A source with a `count` has that many of `tasks_per_step` tasks. The others share the rest by
    their weights. Example: a source of 4 in steps of 16 tasks, and two of the weights 1 and 2 have
    the shares 1/4, 1/4 and 1/2. The counts must leave something to sources without one.
    """
    counted = sum(source.count or 0 for source in sources.values())
    weights = {
        name: Fraction(str(1 if source.weight is None else source.weight))
        for name, source in sources.items()
        if source.count is None
    }
    uncounted = 1 - Fraction(counted, tasks_per_step)  # share of the sources without a count
    total_weight = sum(weights.values())
    return {
        name: uncounted * weights[name] / total_weight
        if source.count is None
        else Fraction(source.count, tasks_per_step)
        for name, source in sources.items()
    }


class Turns:
    """Whose turn it is: draws sources one by one, each exactly by its share.

    After any number of draws each source has its share of all draws so far, rounded up or down (the
    quota method of apportionment; Balinski and Young, American Mathematical Monthly 82, 1975). A
    source that has come to its limit drops out. The counts of the others then begin anew, so that
    the shares hold among them from there on.

    Example: the shares 2/3 and 1/3 of a and b draw a, a, b, a, a, b, …
    """

    def __init__(self, shares: Mapping[str, Fraction], limits: Mapping[str, int]) -> None:
        """`limits` are the most draws of a source; sources without a limit are missing."""
        self._shares, self._limits = shares, limits
        self.drawn = dict.fromkeys(shares, 0)
        """Draws of each source in the whole run. They decide when it comes to its limit."""
        self.counted = dict.fromkeys(shares, 0)
        """Draws of each source since one last dropped out. They decide whose turn it is."""

    def draw(self) -> str:
        """Return the source of the next task, and count it.

        A source may be drawn if it is then less than one draw ahead of its share. Of these sources,
        the one whose share reaches its next number of draws first is drawn: with a share of 2/3 the
        share comes to 1, 2, … draws after 1.5, 3, … draws of all. Ties go to the first in `shares`.
        """
        shares = {  # of the sources that have not dropped out
            name: share
            for name, share in self._shares.items()
            if self.drawn[name] < self._limits.get(name, sys.maxsize)
        }
        total_share = sum(shares.values())
        draws = sum(self.counted[name] for name in shares) + 1  # with this one
        eligible = [
            name
            for name, share in shares.items()
            if self.counted[name] < share / total_share * draws
        ]
        name = min(eligible, key=lambda name: (self.counted[name] + 1) / shares[name])
        self.drawn[name] += 1
        self.counted[name] += 1
        if self.drawn[name] == self._limits.get(name):  # it drops out: the others begin anew
            self.counted = dict.fromkeys(self.counted, 0)
        return name

    def copy(self) -> Turns:
        """Return an independent copy."""
        duplicate = copy(self)
        duplicate.drawn, duplicate.counted = dict(self.drawn), dict(self.counted)
        return duplicate


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSource:
    """One source of a mixture."""

    tasks: TaskSource
    share: Fraction
    """Share of all tasks."""
    at_end: AtEnd = AtEnd.repeat
    curriculum: Curriculum | None = None
    """Chooses among `tasks`; None: they are taken in order."""


class Mixture:
    """Tasks of several sources without end; the caller's cursor counts the tasks of all.

    Example: ``Mixture({"shop": MixedSource(tasks=shop, share=Fraction(2, 3)), "sums":
    MixedSource(tasks=sums, share=Fraction(1, 3))}, seed=0).tasks(0, 3)`` are the first two tasks of
    one source and the first of the other.

    Each step calls `tasks`, `close` when its tasks are drawn, and `learn` with its results. A
    step's tasks may be asked for again until `learn`. The next steps may draw theirs before it.
    """

    endless = True

    def __init__(self, sources: Mapping[str, MixedSource], *, seed: int) -> None:
        """`seed` shuffles the sources: where the shares leave a tie, the first of them is drawn."""
        self._sources = dict(sources)
        names = list(sources)
        random.Random(f"{seed}-mixture").shuffle(names)
        limits = {n: len(s.tasks) for n, s in sources.items() if s.at_end is AtEnd.drop}
        self._start = 0
        """The first task of the oldest step without results."""
        self._turns = Turns({name: sources[name].share for name in names}, limits)
        """Draws of the sources before `_start`, which a checkpoint keeps."""
        self._picks: list[tuple[str, int]] = []
        """Source, and number among the source's own tasks, of each task drawn from `_start` on."""
        self._turns_after_picks = self._turns.copy()
        """`_turns` with the draws of `_picks`, which the next pick continues."""

    def __len__(self) -> int:
        return sys.maxsize

    def tasks(self, start: int, count: int) -> list[Task]:
        """Return `count` tasks from task `start` of the run on, counted from 0.

        Raises ValueError for tasks of steps whose results were learnt.
        """
        if start < self._start:
            raise ValueError(f"mixture: task {start} belongs to an earlier step")
        tasks = []
        for name, number in self._picks_until(start + count)[start - self._start :]:
            source = self._sources[name]
            # A source's curriculum, if it has one, decides which is the source's n-th task.
            tasks += (source.curriculum or source.tasks).tasks(number, 1)
        return tasks

    def _picks_until(self, end: int) -> list[tuple[str, int]]:
        """Return the picks of the run's tasks `_start` … `end` - 1; draw missing ones."""
        while self._start + len(self._picks) < end:
            name = self._turns_after_picks.draw()
            self._picks.append((name, self._turns_after_picks.drawn[name] - 1))
        return self._picks[: end - self._start]

    def _cursors(self, cursor: int) -> dict[str, int]:
        """Return the tasks of each source among the first `cursor` of the run."""
        cursors = dict(self._turns.drawn)
        for name, number in self._picks_until(cursor):
            cursors[name] = number + 1
        return cursors

    def close(self, cursor: int) -> None:
        """Close the step of the tasks up to `cursor`, whose results come later."""
        for name, source_cursor in self._cursors(cursor).items():
            curriculum = self._sources[name].curriculum
            if curriculum is not None:  # does nothing if the source had no task in this step
                curriculum.close(source_cursor)

    def results(self, groups: Iterable[Sequence[Rollout]]) -> list[tuple[str, Result]]:
        """Return the source and the outcome of each group whose source has a curriculum."""
        by_source: dict[str, list[Sequence[Rollout]]] = {}
        for group in groups:
            if group:
                by_source.setdefault(group[0].task.source, []).append(group)
        return [
            (name, result)
            for name, source_groups in by_source.items()
            if (curriculum := self._sources[name].curriculum) is not None
            for result in curriculum.results(source_groups)
        ]

    def learn(self, cursor: int, results: Iterable[tuple[str, Result]]) -> None:
        """Finish the oldest step that has no results yet, whose tasks end at `cursor`."""
        by_source: dict[str, list[Result]] = {}
        for name, result in results:
            by_source.setdefault(name, []).append(result)
        for name, source_cursor in self._cursors(cursor).items():
            curriculum = self._sources[name].curriculum
            # `close` made no step in the curriculum of a source that had no task in this one.
            if curriculum is not None and source_cursor > self._turns.drawn[name]:
                curriculum.learn(source_cursor, by_source.get(name, []))
        # Repeat the step's draws, which brings `_turns` from the old `_start` to the new one.
        for _ in range(cursor - self._start):
            self._turns.draw()
        del self._picks[: cursor - self._start]
        self._start = cursor

    def metrics(self) -> dict[str, float]:
        """Return `source/<name>/epoch` of finite sources, and the metrics of curricula."""
        metrics: dict[str, float] = {}
        for name, source in self._sources.items():
            if not source.tasks.endless:
                epoch = self._turns.drawn[name] / len(source.tasks)
                metrics[f"source/{name}/epoch"] = epoch
            if source.curriculum is not None:
                for key, value in source.curriculum.metrics().items():
                    metrics[f"source/{name}/{key}"] = value
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last step with results, as JSON.

        Steps that were drawn ahead are not in it: they are drawn again. ``start`` counts the tasks
        of all sources so far. Of each source, ``cursor`` counts its tasks and ``counted`` those
        since a source last dropped out (`Turns`).
        """
        return {
            "start": self._start,
            "sources": {
                name: {
                    "cursor": self._turns.drawn[name],
                    "counted": self._turns.counted[name],
                    "curriculum": None
                    if source.curriculum is None
                    else source.curriculum.state_dict(),
                }
                for name, source in self._sources.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict()`."""
        self._start = state["start"]
        for name, saved in state["sources"].items():
            self._turns.drawn[name] = saved["cursor"]
            self._turns.counted[name] = saved["counted"]
            curriculum = self._sources[name].curriculum
            if curriculum is not None:
                curriculum.load_state_dict(saved["curriculum"])
        # Tasks that were drawn ahead are drawn again, from the loaded turns on.
        self._picks, self._turns_after_picks = [], self._turns.copy()


class Questions:
    """The held-out tasks of a mixture's evaluations: the first ones of each source."""

    endless = False

    def __init__(self, sources: Mapping[str, tuple[TaskSource | None, int]]) -> None:
        """`sources` maps names to a source's tasks, None without any, and its most questions."""
        self._sources = {
            name: (tasks, min(count, len(tasks)))
            for name, (tasks, count) in sources.items()
            if tasks is not None
        }

    def __len__(self) -> int:
        return sum(count for _, count in self._sources.values())

    def tasks(self, start: int, count: int) -> list[Task]:
        """Return `count` questions from the `start`-th on, source by source."""
        questions = [
            task for tasks, number in self._sources.values() for task in tasks.tasks(0, number)
        ]
        return questions[start : start + count]
