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
    there are rows.

    A row is a number of `source`. A step goes through three states. While it is open, `tasks`
    chooses its rows. `close` ends it and opens the next step, which can choose rows before the
    results of the closed step are known. `learn` takes the results of the oldest closed step, which
    is then learnt. A row is used if a closed or learnt step has it, else it is new. Example::

        curriculum = Curriculum(source, config, seed=0)
        tasks = curriculum.tasks(0, 8)
        curriculum.learn(8, [("shop-17", 3, 8), …])     # shop-17: 3 of 8 rollouts succeeded
        curriculum.tasks(8, 8)                          # shop-17 is likelier than a task of 0 of 8
    """

    def __init__(self, source: TaskSource, config: CurriculumConfig, *, seed: int) -> None:
        self._source, self._config, self._seed = source, config, seed
        self._measures: dict[int, Measure] = {}
        """Row -> the success so far on it, for the rows of learnt steps."""
        self._learnt_steps = 0
        """Steps whose results were learnt."""
        self._closed_rows: list[list[int]] = []
        """The rows of each closed step that is not learnt yet, the oldest first."""
        self._used_count = 0
        """Rows used in any closed step. They were first used in the source's own order, so this is
        also the number of the next new one."""
        self._start = 0
        """Tasks of the run before the open step: the number of its first task."""
        self._step_rows: list[int] = []
        """The rows of the open step that were chosen so far."""
        self._upcoming = self._rows()
        """Yields the further rows of the open step."""

    def tasks(self, start: int, count: int) -> list[Task]:
        """Return `count` tasks from task `start` of the run on, counted from 0.

        All must belong to one step: the open one, or a closed one that is not learnt. Raises
        ValueError for tasks of learnt steps.
        """
        closed_rows = [row for rows in self._closed_rows for row in rows]
        closed_start = self._start - len(closed_rows)  # number of the first task of these
        if closed_start <= start < self._start:
            rows = closed_rows[start - closed_start : start - closed_start + count]
        else:
            # Refuses a negative offset, which is that of a learnt step.
            rows = self._choose(start - self._start, count)
        return [self._source.row(row) for row in rows]

    def close(self, cursor: int) -> None:
        """End the open step, whose tasks are those before `cursor`, and open the next one.

        Its results come later, by `learn`. Does nothing for a step that is closed.
        """
        if cursor <= self._start:
            return
        rows = self._choose(0, cursor - self._start)  # all rows of the step
        # Rows of closed steps are used, though they have no measure yet.
        used_rows = {*self._measures, *(row for step in self._closed_rows for row in step)}
        self._used_count += len({*rows} - used_rows)  # rows that this step uses for the first time
        self._closed_rows.append(rows)
        self._start, self._step_rows = cursor, []
        self._upcoming = self._rows()  # reads all of the above

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
        """Learn the results of the oldest step that is not learnt.

        `results` are those of all groups of the step. `cursor` is the number of tasks of the run up
        to the end of this step. If the step is still open, it is closed first.
        """
        # By task id: rollouts that succeeded, and rollouts with a reward.
        success_counts, reward_counts = Counter[str](), Counter[str]()
        for task_id, successes, rewards in results:
            success_counts[task_id] += successes
            reward_counts[task_id] += rewards
        self.close(cursor)  # does nothing if the step is closed
        rows = dict.fromkeys(self._closed_rows.pop(0))  # each row once
        self._learnt_steps += 1
        for row in rows:
            task_id = self._source.row(row).task_id
            rate = self._measures[row].rate if row in self._measures else None
            if reward_counts[task_id]:
                new_rate = success_counts[task_id] / reward_counts[task_id]
                memory = self._config.memory
                rate = new_rate if rate is None else memory * rate + (1 - memory) * new_rate
            self._measures[row] = Measure(rate=rate, step=self._learnt_steps)
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
            metrics["curriculum/new"] = float(len(self._source) - self._used_count)
        for pool in ("band", "easy", "hard", "unmeasured"):
            metrics[f"curriculum/{pool}"] = float(pools[pool])
        metrics["curriculum/success"] = math.fsum(rates) / len(rates) if rates else math.nan
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Return the state on which later choices depend, as JSON.

        ``start``: number of the open step's first task. ``steps``: number of learnt steps.
        ``fresh``: number of rows used so far. ``rows``: the row, its share of successes and the
        step of this measure. ``ahead``: the rows of each step that was closed, so that its tasks
        are all drawn, and whose results are not learnt.
        """
        rows = [[row, m.rate, m.step] for row, m in sorted(self._measures.items())]
        state: dict[str, Any] = {
            "start": self._start,
            "steps": self._learnt_steps,
            "fresh": self._used_count,
            "rows": rows,
        }
        if self._closed_rows:
            state["ahead"] = self._closed_rows
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of `state_dict()`."""
        self._learnt_steps, self._used_count = state["steps"], state["fresh"]
        self._measures = {row: Measure(rate=rate, step=step) for row, rate, step in state["rows"]}
        self._closed_rows = [list(rows) for rows in state.get("ahead", ())]
        self._start, self._step_rows = state["start"], []
        self._upcoming = self._rows()  # reads all of the above

    def _choose(self, offset: int, count: int) -> list[int]:
        """Return `count` rows of the open step from its `offset`-th on; choose missing ones.

        Raises ValueError for an offset below 0.
        """
        if offset < 0:
            raise ValueError(f"curriculum: task {self._start + offset} belongs to an earlier step")
        while len(self._step_rows) < offset + count:
            self._step_rows.append(next(self._upcoming))
        return self._step_rows[offset : offset + count]

    def _rows(self) -> Iterator[int]:
        """Yield the rows of the open step, without end.

        Each is a new row (one that no step has used) with the chance `explore`, else a used one.
        """
        rng = random.Random(f"{self._seed}-curriculum-{self._start}")
        weights = self._weights()
        # Used rows in random order, weighted: the greater a row's weight, the nearer to the end it
        # stands and the earlier it is popped (Efraimidis and Spirakis 2006,
        # https://doi.org/10.1016/j.ipl.2005.11.003: by u^(1/weight), here by its logarithm).
        keys = {row: math.log(1 - rng.random()) / weight for row, weight in weights.items()}
        used_rows = sorted(keys, key=lambda row: keys[row])
        next_new, step_rows = self._used_count, list[int]()  # number of the next new row
        while used_rows or next_new < len(self._source):
            wants_new = rng.random() < self._config.explore
            # The next used row may have the weight `floor`, because few are in the band: the order
            # only ranks used rows among themselves. With the chance 1 - floor a new row is chosen
            # instead. The used one stays the next, for the following task.
            gives_way = bool(used_rows) and rng.random() >= weights[used_rows[-1]]
            if next_new < len(self._source) and (wants_new or gives_way or not used_rows):
                step_rows.append(self._source.index(next_new))
                next_new += 1
            else:
                step_rows.append(used_rows.pop())
            yield step_rows[-1]
        yield from cycle(step_rows)  # the step needs more tasks than there are rows

    def _weights(self) -> dict[int, float]:
        """Return the weight of each used row: 1 in the band, `floor` outside it."""
        # Rows of closed steps may have no result yet: they come up as rarely as hard ones.
        weights = {row: self._config.floor for rows in self._closed_rows for row in rows}
        for row, measure in sorted(self._measures.items()):
            in_band = self._pool(measure) == "band"
            # After `revisit` steps a measure is too old to keep a row out.
            is_stale = self._learnt_steps - measure.step >= self._config.revisit
            weights[row] = 1.0 if in_band or is_stale else self._config.floor
        return weights

    def _pool(self, measure: Measure) -> str:
        """Return the pool of a row: ``unmeasured``, ``hard``, ``band`` or ``easy``."""
        if measure.rate is None:
            return "unmeasured"
        if measure.rate < self._config.low:
            return "hard"
        return "easy" if measure.rate > self._config.high else "band"
