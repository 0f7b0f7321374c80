"""`GroupQueue`: groups sampled ahead of the steps that train on them, and taken in serial order.

Every task of a run has a serial, 0, 1, 2, …; with P tasks a step, serial s belongs to step
s // P + 1. With weights of version v the groups of steps up to v + k + 1 may be sampled, where k is
`async_training.max_staleness`. Step n trains what version n - 1 becomes, so no token of it is older
than k updates: the bound is one of admission, and nothing ever has to be dropped::

    P = 2, k = 1     weights 0                 weights 1             weights 2
    admitted         serials 0 1 2 3           4 5                   6 7
    trained          step 1: 0 1               step 2: 2 3           step 3: 4 5
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from agenttrain.rollout.asynchronous.journal import Journal
from agenttrain.rollout.collector import (
    Collected,
    NoRewards,
    check_usable,
    collect,
    why_unrewarded,
)
from agenttrain.rollout.monitoring import LoopMonitor, Throttle
from agenttrain.rollout.sharing import Costs, mean_tokens
from agenttrain.rollout.source import RolloutSource, nothing_to_learn
from agenttrain.rollout.step_batch import StepBatch
from agenttrain.tracking.rollouts import staleness
from agenttrain.types import Rollout, Task


class GroupQueue:
    """Samples the groups of a `RolloutSource` in tasks of the event loop, from `begin` on.

    The rollout process calls `begin` once and `take` for each step. After each weight sync it calls
    `admit`, which starts the groups that the new version allows.

    The source keeps the cursor and the curriculum. `RolloutSource.finish` moves both on after each
    step, as in a synchronous run. So the tasks that a step draws depend on the steps that trained
    the weights it waits for, and not on the clock.

    The curriculum chooses tasks by the results of earlier steps. The journal has each sampled group
    on disk, for a run that is stopped and resumed.
    """

    def __init__(
        self,
        source: RolloutSource,
        journal: Journal,
        monitor: LoopMonitor,
        *,
        max_staleness: int,
        steps: int,
    ) -> None:
        """`steps` is the last step of the run; `monitor` watches the event loop all the time.

        `rollout.deterministic` must be off: groups begin at any time, so no batch repeats.
        """
        self._source, self._journal, self._monitor = source, journal, monitor
        self._max_staleness, self._steps = max_staleness, steps
        collector = source.collector
        # Each group is collected by its own call of `collect`; these calls share the gate, the
        # monitor and the throttle. `progress` would count the rollouts of one group, while the
        # queue's own counts those of a step.
        self._collector = replace(
            collector,
            progress=None,
            gate=asyncio.Semaphore(collector.limits.concurrency),
            monitor=monitor,
            throttle=Throttle(),
        )
        self._groups: dict[int, asyncio.Task[Collected]] = {}
        """Groups that are sampled or ready, by serial: the number of the task in the run."""
        self._admitted = 0
        """Last step whose groups were started; the steps up to it are all admitted."""
        self._step = 0
        """Step whose groups the trainer waits for, or took last; 0 before `begin`."""
        self.taking = False
        """True while the trainer waits for groups; the run's status shows it."""
        self._journalled: dict[int, Collected] = {}
        """Groups of a run that was stopped, until their step is admitted."""
        self._dropped = 0
        """Groups of the journal that `begin` could not use; the next `take` reports them."""
        self._open = asyncio.Event()
        """Set while groups may start; `held` clears it."""
        self._open.set()

    @property
    def begun(self) -> bool:
        """Return True once `begin` was called."""
        return self._step > 0

    async def begin(self, step: int) -> None:
        """Begin at `step`: take this and later steps' groups from the journal, start the others.

        The engine has the weights that the step trains, the source its state before the step. The
        journal has groups of a run that was stopped, by serial: the number of the task in the run.
        """
        version = step - 1  # weights have the number of the step that made them
        files, self._dropped = await asyncio.to_thread(
            self._journal.resume,
            step=step,
            version=version,
            max_staleness=self._max_staleness,
        )
        for serial, file in files.items():
            self._journalled[serial] = await asyncio.to_thread(self._journal.read, file)
        self._step = step
        self._admitted = step - 1  # so that `admit` starts the groups of `step` first
        # Discards the idle time so far: that of the first step begins here.
        self._source.collector.in_flight.take_idle_s()
        self.admit(version)

    def admit(self, version: int) -> None:
        """Start the groups that may start with the weights of `version`."""
        # Step version + 1 is trained next, without staleness. Each later step adds an update of the
        # weights, and so 1 to the staleness of groups that are sampled with `version`.
        last_admitted = version + 1 + self._max_staleness
        while self._admitted < min(last_admitted, self._steps):
            self._admitted += 1
            self._start(self._admitted)

    def _start(self, step: int) -> None:
        """Draw the tasks of a step, and start a task of the event loop for each group."""
        source = self._source
        first_serial = (step - 1) * source.tasks_per_step
        tasks = (source.curriculum or source.tasks).tasks(first_serial, source.tasks_per_step)
        if source.curriculum is not None:
            # Ends the drawing of this step, so that the next step can draw although the tasks of
            # this one have no results yet. In the next step their rows count as used.
            source.curriculum.close(first_serial + source.tasks_per_step)
        for place, task in enumerate(tasks):
            sampling = self._sample(step, place, task)
            self._groups[first_serial + place] = asyncio.create_task(sampling)

    async def _sample(self, step: int, place: int, task: Task) -> Collected:
        """Return the group of a task from the journal, else sample it and write it there."""
        source = self._source
        serial = (step - 1) * source.tasks_per_step + place
        recorded = self._journalled.pop(serial, None)
        if recorded is not None:
            return recorded
        await self._open.wait()
        begun = time.time()
        try:
            # May be empty: `_check` judges the groups of a step together.
            request = replace(source.request(step, [task]), places=[place], may_be_empty=True)
            collected = await collect(self._collector, request)
        except NoRewards as error:  # other groups of the step may have some
            collected = error.collected
        ended = time.time()
        await asyncio.to_thread(self._journal.add, serial, step, task, collected, begun, ended)
        return collected

    async def take(self, step: int) -> StepBatch:
        """Return the groups of a step, once all are ready; raises the error of one that failed."""
        source = self._source
        started = time.monotonic()
        self._step = step
        # Groups of later steps count too: the number shows how far ahead the sampling is.
        ready = sum(group.done() for group in self._groups.values())
        collected = await self._take_groups(step)
        self._check(step, collected)
        dropped, self._dropped = self._dropped, 0
        return StepBatch(
            collected=collected,
            trained=tuple(collected.places),  # all groups of the step
            tasks=source.tasks_per_step,
            costs=self._costs_after(collected),
            stuck=len(self._collector.stuck),  # abandoned tool calls that still run
            ahead=True,
            metrics={
                **staleness_metrics(collected.rollouts, step, self._max_staleness),
                "async/queue": float(ready),
                "async/wait_s": time.monotonic() - started,
                "async/idle_s": source.collector.in_flight.take_idle_s(),
                "async/dropped": float(dropped),
            },
        )

    async def _take_groups(self, step: int) -> Collected:
        """Wait for the groups of a step and remove them from the queue; return them as one."""
        count = self._source.tasks_per_step
        serials = range((step - 1) * count, step * count)
        groups = [self._groups[serial] for serial in serials]
        self.taking = True
        try:
            await asyncio.wait(groups, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self.taking = False
        for group in groups:
            if group.done():
                group.result()  # raises the error of a group that failed
        collected = Collected()
        for serial in serials:
            collected.extend(self._groups.pop(serial).result())
        collected.loop_lag_s = self._monitor.take_max_lag_s()
        return collected

    def _costs_after(self, collected: Collected) -> Costs:
        """Return the source's expected tokens by kind of task, with those of a step's groups.

        A copy: `RolloutSource.finish` makes it the source's own.
        """
        costs = self._source.costs.copy()
        costs.learn([(costs.kind(group[0].task), mean_tokens(group)) for group in collected.groups])
        return costs

    def _check(self, step: int, collected: Collected) -> None:
        """Raise NoRollouts or NoRewards if the step has nothing to learn from."""
        source = self._source
        left_out = collected.overlong + collected.bad_rows  # tasks of which nothing was sampled
        attempts = (source.tasks_per_step - left_out) * source.algorithm.group_size
        max_context = self._collector.engine.max_context
        check_usable(collected, source.tasks_per_step, attempts, max_context)
        reason = why_unrewarded(collected.rollouts)
        if reason is not None:
            raise nothing_to_learn(step, reason, collected)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Start no group within the block; groups that have begun continue."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def prune(self, step: int, *, oldest: int, newest: int) -> None:
        """Remove files of groups up to `step` that no resume can use: see `Journal.prune`."""
        self._journal.prune(step=step, oldest=oldest, newest=newest)

    @property
    def progress(self) -> tuple[int, int]:
        """Return the finished and all rollouts of the step that the trainer waits for."""
        count, samples = self._source.tasks_per_step, self._source.algorithm.group_size
        serials = range((self._step - 1) * count, self._step * count)
        ready = sum(s in self._groups and self._groups[s].done() for s in serials)
        return ready * samples, count * samples

    async def aclose(self) -> None:
        """Cancel the groups that are sampled; those that were finished are in the journal."""
        for group in self._groups.values():
            group.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        await asyncio.to_thread(self._journal.close)


def staleness_metrics(rollouts: list[Rollout], step: int, max_staleness: int) -> dict[str, float]:
    """Return mean and greatest staleness of a step's rollouts, and how many have each.

    Example: of staleness 0, 1, 1 with a bound of 1: mean 0.667, max 1, one of 0, two of 1.
    """
    ages = [age for rollout in rollouts if (age := staleness(rollout, step)) is not None]
    counts = Counter(ages)
    return {
        "async/staleness/mean": sum(ages) / len(ages) if ages else float("nan"),
        "async/staleness/max": float(max(ages, default=0)),
        **{f"async/staleness/{age}": float(counts[age]) for age in range(max_staleness + 1)},
    }
