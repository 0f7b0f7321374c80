"""A reward function of either kind, called on many rollouts: one value each, in their order."""

from __future__ import annotations

import asyncio
import copy
import inspect
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

from agenttrain.rewards.base import (
    Columns,
    NoNumber,
    RewardFunction,
    RewardUnavailable,
    checked,
    failed,
)
from agenttrain.rewards.given import ChangedRollout, check_unchanged, own_copy, own_value
from agenttrain.rewards.trl import batch_arguments, batch_names, is_trl
from agenttrain.threads import DaemonThreads, Outcome, attempt, attempt_async, blocks
from agenttrain.types import Rollout

VISIT_S = 0.02
"""Seconds after which a thread that runs short calls returns the outcomes it has."""
Call = Callable[[], Any]
KNOWN = ("builtins", "numpy", "torch")
"""Packages whose numbers are read without code of the user's."""
Score = float | None | RewardUnavailable
"""A reward, None where the function does not apply, or why it could not be had."""


class Scorer:
    """Runs one reward function: a sync one in threads, an async one on the event loop."""

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        *,
        bound: Collection[str] = (),
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        """`bound` are parameters of the function that have their value already.

        `timeout_s` limits one call. At most `concurrency` calls run at once; None: one call after
        the other for a sync function, so that what it keeps between calls does not depend on
        timing, and all at once for an async one.
        """
        self.name = name
        self._function = function
        self._trl = is_trl(function)
        self._blocks = blocks(function)
        self._timeout_s = timeout_s
        self._at_once = concurrency or (1 if self._blocks else None)
        self._threads = DaemonThreads()
        self._lenient = False
        first = [] if self._trl else list(inspect.signature(function).parameters)[:1]
        self._columns = Columns(function, taken={*bound, *first})
        # A callable may name columns itself, in an attribute `columns`.
        declared = (*getattr(function, "columns", ()), *self._columns.required)
        given = batch_names() if self._trl else ()
        self.columns = tuple(dict.fromkeys(name for name in declared if name not in given))
        """Columns that every row must have."""
        self.tools: tuple[str, ...] = tuple(getattr(function, "tools", ()))
        """Tools that the function needs."""

    def lenient(self) -> Scorer:
        """Return a copy that gives NoNumber, not an error, for what is no finite number."""
        other = copy.copy(self)
        other._lenient = True
        return other

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return one value per rollout; raises RewardError naming function and rollout."""
        if not rollouts:
            return []
        if self._trl:
            return await self._score_batch(rollouts)
        gate = asyncio.Semaphore(self._at_once or len(rollouts))

        async def one(rollout: Rollout) -> Outcome:
            async with gate:
                return await self._run(self._call_of(rollout))

        if self._blocks and self._at_once == 1:
            # One call after the other, as many per visit to a thread as a moment has room for.
            calls = [self._call_of(rollout) for rollout in rollouts]
            outcomes: list[Outcome] = []
            while len(outcomes) < len(calls):
                outcomes += await self._visit(calls[len(outcomes) :])
        elif self._at_once == 1:
            outcomes = [await one(rollout) for rollout in rollouts]
        else:
            outcomes = await asyncio.gather(*map(one, rollouts))
        return [
            self._read(await self._as_number(outcome), rollout)
            for outcome, rollout in zip(outcomes, rollouts, strict=True)
        ]

    async def _visit(self, calls: Sequence[Call]) -> list[Outcome]:
        """Return the outcomes of the first calls, of at least one."""
        begun: list[Call] = []
        outcomes: list[Outcome] = []
        until = time.monotonic() + VISIT_S

        def some() -> None:
            for call in calls:
                begun.append(call)
                outcomes.append(attempt(call))
                if inspect.isawaitable(outcomes[-1].value) or time.monotonic() > until:
                    return

        try:
            # A call begins before `until`: one that runs at the limit has had all of its time.
            async with asyncio.timeout(self._timeout_s and self._timeout_s + VISIT_S):
                await self._threads.run(some, label=self.name)
                outcomes[-1] = await _settled(outcomes[-1])
        except TimeoutError:
            done = [outcome for outcome in outcomes if not inspect.isawaitable(outcome.value)]
            return [*done, self._late()] if len(done) < len(begun) else done
        return outcomes

    def _call_of(self, rollout: Rollout) -> Call:
        """Call the function on a copy of the rollout, which it must leave as it is."""

        def call() -> Any:
            given = own_copy(rollout)
            columns = self._columns.pick(rollout.task.columns)
            value = self._function(given, **{name: own_value(v) for name, v in columns.items()})
            if inspect.isawaitable(value):
                return _checked_later(value, given, rollout)
            check_unchanged(given, rollout)
            return value

        return call

    async def _score_batch(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Call a function of TRL's once, with all rollouts in lists of their own."""
        arguments = batch_arguments([own_copy(rollout) for rollout in rollouts])
        outcome = await self._run(lambda: self._function(**self._columns.pick(arguments)))
        if isinstance(outcome.error, RewardUnavailable):
            return [outcome.error] * len(rollouts)
        if outcome.error is not None:
            raise failed(self.name, rollouts[0], outcome.error) from outcome.error
        values = outcome.value
        if not isinstance(values, Sequence) or len(values) != len(rollouts):
            wrong = ValueError(f"it returned {values!r} for {len(rollouts)} completions")
            raise failed(self.name, rollouts[0], wrong)
        return [
            self._read(await self._as_number(Outcome(value=value)), rollout)
            for value, rollout in zip(values, rollouts, strict=True)
        ]

    async def _run(self, call: Call) -> Outcome:
        """Return the outcome of one call; RewardUnavailable when it took too long."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._blocks:
                    return await _settled(attempt(call))
                return await _settled(await self._threads.run(call, label=self.name))
        except TimeoutError:  # ours: what the function raises is an outcome
            return self._late()

    async def _as_number(self, outcome: Outcome) -> Outcome:
        """Read an object of the user's own as a number in a thread, under the time limit.

        Its `item`, `__float__` and `__repr__` are the user's code, which may take its time.
        """
        value = outcome.value
        known = type(value).__module__.partition(".")[0] in KNOWN
        if outcome.error is not None or known or isinstance(value, RewardUnavailable):
            return outcome

        def read() -> Score:
            try:
                return checked(value)
            except (TypeError, ValueError) as error:
                return NoNumber(str(error))

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._threads.run(read, label=self.name)
        except TimeoutError:
            return self._late()

    def _late(self) -> Outcome:
        limit = f"reward.{self.name}.timeout_s={self._timeout_s:g}"
        return Outcome(error=RewardUnavailable(f"a call took longer than {limit}"))

    def _read(self, outcome: Outcome, rollout: Rollout) -> Score:
        if isinstance(outcome.error, RewardUnavailable):
            return outcome.error
        if isinstance(outcome.error, ChangedRollout):  # raised by us: no line of the function's
            raise failed(self.name, rollout, outcome.error.with_traceback(None))
        if outcome.error is not None:
            raise failed(self.name, rollout, outcome.error) from outcome.error
        if isinstance(outcome.value, NoNumber) and not self._lenient:
            raise failed(self.name, rollout, ValueError(str(outcome.value)))
        if isinstance(outcome.value, RewardUnavailable):  # one of a batch
            return outcome.value
        try:
            return checked(outcome.value)
        except (TypeError, ValueError) as error:
            if self._lenient:
                return NoNumber(str(error))
            raise failed(self.name, rollout, error.with_traceback(None)) from error


async def _checked_later(value: Awaitable[Any], given: Rollout, rollout: Rollout) -> Any:
    result = await value
    check_unchanged(given, rollout)
    return result


async def _settled(outcome: Outcome) -> Outcome:
    """Return the outcome itself, or that of the awaitable that an async function returned."""
    if not inspect.isawaitable(outcome.value):
        return outcome
    return await attempt_async(outcome.value)
