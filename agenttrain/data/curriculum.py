"""Choose tasks by measured success: those that are sometimes solved come up more often.

A group of rollouts that all succeed, or all fail, has no advantage and teaches nothing.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, NamedTuple

from agenttrain.data.config import CurriculumConfig
from agenttrain.data.tasks import TaskSource
from agenttrain.types import Rollout, Task


class Result(NamedTuple):
    """Outcome of a group."""

    task_id: str
    successes: int
    """Rollouts that succeeded."""
    rewards: int
    """Rollouts with a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """The success so far on one row."""

    rate: float | None
    """Moving average of the share of rollouts that succeed. None: no score yet."""
    step: int
    """The last step that used the row."""


class Curriculum:
    """A TaskSource whose next tasks depend on the results of earlier ones.

    The tasks of a step are a function of (seed, state): processes with the same results choose the
    same tasks, and so does a resumed run. A step repeats a row only if it needs more tasks than
    there are rows. A step whose tasks are all drawn may be closed before its results are known, so
    that the next one can draw its own. Example::

        curriculum = Curriculum(source, config, seed=0)
        tasks = curriculum.tasks(0, 8)
        curriculum.learn(8, [("shop-17", 3, 8), …])     # shop-17: 3 of 8 rollouts succeeded
        curriculum.tasks(8, 8)                          # shop-17 is likelier than a task of 0 of 8
    """

    def __init__(self, source: TaskSource, config: CurriculumConfig, *, seed: int) -> None:
        self._source, self._config, self._seed = source, config, seed
        self._measures: dict[int, Measure] = {}
        """Row -> the success so far on it."""
        self._fresh = 0
        """New rows used so far. They come in the source's own order."""
        self._steps = 0
        """Steps whose results were learnt."""
        self._start = 0
        """The data cursor at the beginning of this step."""
        self._ahead: list[list[int]] = []
        """The rows of closed steps without results, the oldest first."""
        self._upcoming = self._rows()
        """Yields the next rows of this step."""
        self._step_rows: list[int] = []
        """The rows of this step that were chosen so far."""

    def tasks(self, start: int, count: int) -> list[Task]:
        """Return `count` tasks from task `start` of the run on, counted from 0.

        All must belong to one step: this one, or a closed one without results. Raises ValueError
        for tasks of earlier steps.
        """
        ahead_start = self._start - sum(map(len, self._ahead))
        if ahead_start <= start < self._start:  # of a closed step
            ahead = [row for rows in self._ahead for row in rows]
            rows = ahead[start - ahead_start : start - ahead_start + count]
        else:
            rows = self._choose(start - self._start, count)
        return [self._source.row(row) for row in rows]

    def close(self, cursor: int) -> None:
        """Close the step of the tasks up to `cursor`, whose results come later.

        Does nothing for a step that is closed.
        """
        if cursor <= self._start:
            return
        rows = self._choose(0, cursor - self._start)
        # Rows of closed steps are used, though they have no measure yet.
        used_rows = {*self._measures, *(row for step in self._ahead for row in step)}
        self._fresh += len({*rows} - used_rows)  # rows that this step uses for the first time
        self._ahead.append(rows)
        self._start, self._upcoming, self._step_rows = cursor, self._rows(), []

    def results(self, groups: Iterable[Sequence[Rollout]]) -> list[Result]:
        """Return the outcome of each of a step's groups that has a reward."""
        results = []
        for group in groups:
            rewards = [rollout.reward for rollout in group if rollout.reward is not None]
            # 1e-6: a sum of rewards may miss the threshold by rounding.
            successes = sum(reward >= self._config.success - 1e-6 for reward in rewards)
            if rewards:
                results.append(Result(group[0].task.task_id, successes, len(rewards)))
        return results

    def learn(self, cursor: int, results: Iterable[Result]) -> None:
        """Finish the oldest step that has no results yet, whose tasks end at `cursor`.

        `results` are those of all groups of the step. It is closed first if it is still open.
        """
        # By task id: rollouts that succeeded, and rollouts with a reward.
        success_counts, reward_counts = Counter[str](), Counter[str]()
        for task_id, successes, rewards in results:
            success_counts[task_id] += successes
            reward_counts[task_id] += rewards
        self.close(cursor)
        rows = dict.fromkeys(self._ahead.pop(0))  # each row once
        self._steps += 1
        for row in rows:
            task_id = self._source.row(row).task_id
            rate = self._measures[row].rate if row in self._measures else None
            if reward_counts[task_id]:
                new_rate = success_counts[task_id] / reward_counts[task_id]
                memory = self._config.memory
                rate = new_rate if rate is None else memory * rate + (1 - memory) * new_rate
            self._measures[row] = Measure(rate=rate, step=self._steps)
        if not self._step_rows:  # the next step has not begun, and can still use these results
            self._upcoming = self._rows()

    def metrics(self) -> dict[str, float]:
        """Return the sizes of the pools of `_pool` and the mean success, as metrics.

        `curriculum/new`, the rows never used, is there for a finite dataset only.
        """
        pools = Counter(self._pool(measure) for measure in self._measures.values())
        rates = [m.rate for m in self._measures.values() if m.rate is not None]
        metrics = {}
        if not self._source.endless:
            metrics["curriculum/new"] = float(len(self._source) - self._fresh)
        for pool in ("band", "easy", "hard", "unmeasured"):
            metrics[f"curriculum/{pool}"] = float(pools[pool])
        metrics["curriculum/success"] = math.fsum(rates) / len(rates) if rates else math.nan
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later choices depend, as JSON.

        ``rows`` has the row, its share of successes and the step of this measure; ``ahead`` the
        rows of each closed step whose results are missing.
        """
        rows = [[row, m.rate, m.step] for row, m in sorted(self._measures.items())]
        state: dict[str, Any] = {
            "start": self._start,
            "steps": self._steps,
            "fresh": self._fresh,
            "rows": rows,
        }
        if self._ahead:
            state["ahead"] = self._ahead
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict()`."""
        self._steps, self._fresh = state["steps"], state["fresh"]
        self._measures = {row: Measure(rate=rate, step=step) for row, rate, step in state["rows"]}
        self._ahead = [list(rows) for rows in state.get("ahead", ())]
        self._start, self._upcoming, self._step_rows = state["start"], self._rows(), []

    def _choose(self, offset: int, count: int) -> list[int]:
        """Return `count` rows of this step from its `offset`-th on; choose those not chosen yet."""
        if offset < 0:
            raise ValueError(f"curriculum: task {self._start + offset} belongs to an earlier step")
        while len(self._step_rows) < offset + count:
            self._step_rows.append(next(self._upcoming))
        return self._step_rows[offset : offset + count]

    def _rows(self) -> Iterator[int]:
        """Yield the rows of this step, without end."""
        rng = random.Random(f"{self._seed}-curriculum-{self._start}")
        # Rows of closed steps have no result yet, and come up again as rarely as hard ones.
        weights = {row: self._config.floor for rows in self._ahead for row in rows}
        for row, measure in sorted(self._measures.items()):
            is_stale = self._steps - measure.step >= self._config.revisit
            in_band = self._pool(measure) == "band"
            weights[row] = 1.0 if in_band or is_stale else self._config.floor
        # Measured rows in random order, weighted: the greater a row's weight, the nearer to the end
        # it stands and the earlier it is popped (Efraimidis and Spirakis 2006,
        # https://doi.org/10.1016/j.ipl.2005.11.003: by u^(1/weight), here by its logarithm).
        keys = {row: math.log(1 - rng.random()) / weight for row, weight in weights.items()}
        measured = sorted(keys, key=lambda row: keys[row])
        next_new, step_rows = self._fresh, list[int]()  # number of the next row never used
        while measured or next_new < len(self._source):
            wants_new = rng.random() < self._config.explore
            # The next measured row gives way to a new one as its weight says: outside the band,
            # with the chance 1 - floor.
            rejected = bool(measured) and rng.random() >= weights[measured[-1]]
            if next_new < len(self._source) and (wants_new or rejected or not measured):
                step_rows.append(self._source.index(next_new))
                next_new += 1
            else:
                step_rows.append(measured.pop())
            yield step_rows[-1]
        yield from cycle(step_rows)  # the step needs more tasks than there are rows

    def _pool(self, measure: Measure) -> str:
        """Return the pool of a row: ``unmeasured``, ``hard``, ``band`` or ``easy``."""
        if measure.rate is None:
            return "unmeasured"
        if measure.rate < self._config.low:
            return "hard"
        return "easy" if measure.rate > self._config.high else "band"
