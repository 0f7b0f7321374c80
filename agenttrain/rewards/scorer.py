"""A reward function of either kind, called on many rollouts: one value each, in their order."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from agenttrain.rewards.base import Columns, RewardFunction, checked, failed
from agenttrain.rewards.trl import batch_arguments, is_trl
from agenttrain.threads import DaemonThreads, Outcome, attempt, blocks
from agenttrain.types import Rollout

Call = Callable[[], Any]


class Scorer:
    """Runs one reward function: a sync one in a thread, an async one on all rollouts at once."""

    def __init__(self, name: str, function: RewardFunction, *, bound: Collection[str] = ()) -> None:
        """`bound` are parameters of the function that have their value already."""
        self.name = name
        self._function = function
        self._trl = is_trl(function)
        self._blocks = blocks(function)
        self._threads = DaemonThreads()
        first = [] if self._trl else list(inspect.signature(function).parameters)[:1]
        self._columns = Columns(function, taken={*bound, *first})

    async def score(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """One value per rollout; raises RewardError naming function and rollout."""
        if not rollouts:
            return []
        if self._trl:
            return await self._score_batch(rollouts)
        outcomes = await self._run([self._call_of(rollout) for rollout in rollouts])
        return [self._read(outcome, r) for outcome, r in zip(outcomes, rollouts, strict=True)]

    def _call_of(self, rollout: Rollout) -> Call:
        return lambda: self._function(rollout, **self._columns.pick(rollout.task.columns))

    async def _score_batch(self, rollouts: Sequence[Rollout]) -> list[float | None]:
        """TRL's functions see all rollouts in one call."""
        arguments = batch_arguments(rollouts)
        (outcome,) = await self._run([lambda: self._function(**self._columns.pick(arguments))])
        if outcome.error is not None:
            raise failed(self.name, rollouts[0], outcome.error) from outcome.error
        values = outcome.value
        if not isinstance(values, Sequence) or len(values) != len(rollouts):
            wrong = ValueError(f"it returned {values!r} for {len(rollouts)} completions")
            raise failed(self.name, rollouts[0], wrong)
        return [self._read(Outcome(value=v), r) for v, r in zip(values, rollouts, strict=True)]

    async def _run(self, calls: Sequence[Call]) -> list[Outcome]:
        """Outcomes in the order of the calls."""
        outcomes: list[Outcome] = []

        def work() -> None:
            outcomes.extend(attempt(call) for call in calls)

        if self._blocks:
            # One thread, one call after the other: what a function keeps between calls does not
            # depend on timing.
            await self._threads.run(work, label=self.name)
        else:
            work()
        return list(await asyncio.gather(*(_settled(outcome) for outcome in outcomes)))

    def _read(self, outcome: Outcome, rollout: Rollout) -> float | None:
        if outcome.error is not None:
            raise failed(self.name, rollout, outcome.error) from outcome.error
        try:
            return checked(outcome.value)
        except (TypeError, ValueError) as error:
            raise failed(self.name, rollout, error) from error


async def _settled(outcome: Outcome) -> Outcome:
    """The outcome itself, or that of the awaitable that an async function returned."""
    if not inspect.isawaitable(outcome.value):
        return outcome
    try:
        return Outcome(value=await outcome.value)
    except Exception as error:
        return Outcome(error=error)
