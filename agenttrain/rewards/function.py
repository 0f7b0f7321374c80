"""Reward functions, ours and TRL's: one value for each rollout.

The signature of a function names the columns that it gets. It gets copies of rollouts, so that it
cannot change what is trained or what other functions see. A function that changes its copy raises
an error, because the change has no effect.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import is_dataclass, replace
from inspect import Parameter
from numbers import Real
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agenttrain.types import MAIN, AgenttrainError, Delegation, Rollout, Task, Trajectory
from agenttrain.utils.alarms import REMEDY, may_set_alarms
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.threads import (
    DaemonThreads,
    Outcome,
    attempt,
    attempt_async,
    attempt_with_alarms,
    blocks,
)

RewardFunction = Callable[..., Any]
"""``(rollout, **columns) -> float | None``, sync or async. None means not applicable.

It gets the columns that its signature names, or all of them with ``**columns``. Example::

    def short(rollout: Rollout, limit: int) -> float:
        return float(rollout.sampled_length <= limit)

If its first parameter is named `rollouts`, it gets all rollouts of a group and returns a list or an
array of numbers, or None if it does not apply to the group.
"""


class RewardError(AgenttrainError):
    """A reward function failed or returned no reward. It ends the run."""

    def __init__(self, message: str, *, culprits: Sequence[str] = ()) -> None:
        """`culprits` are the ids of the rollouts on which the function failed."""
        super().__init__(message)
        self.culprits = tuple(culprits)
        self.rollouts: Sequence[Rollout] = ()
        """All rollouts of the scoring that failed; the collector sets them."""


class RewardUnavailable(AgenttrainError):
    """Raised by a reward function that cannot score, because a judge's server is down, say.

    Returning 0 instead would teach something false. `reward.<name>.on_unavailable` decides whether
    the run stops or the rollout is dropped.
    """


class NoNumber(RewardUnavailable):
    """A function returned NaN, infinity or no number, in an evaluation, which continues."""


Schemas = tuple[Mapping[str, Any], ...]
BATCH_S = 0.02
"""Seconds after which a thread that runs a batch of short calls returns the outcomes so far."""
Call = Callable[[], Any]
TRUSTED_PACKAGES = ("builtins", "numpy", "torch")
"""Packages whose numbers can be read without running user code."""
Score = float | tuple[float, ...] | None | RewardUnavailable
"""A reward, or one for each turn, or None if the function does not apply, or the reason why there
is no reward."""


class FunctionScorer:
    """Runs one reward function: a sync one in threads, an async one on the event loop.

    A `Rubric` has one for each function. It calls `score` on the event loop, perhaps several times
    at once. `score` has three steps:

    1. Make the calls: one for all rollouts (a function with TRL's signature), one for each group,
       or one for each rollout.
    2. Run them (`_run`), each within `timeout_s`. Short calls of a sync function share a thread
       (`_run_several`). A function that sets alarms runs in the main thread.
    3. Read each outcome, a value or an error, as a Score (`_read`).
    """

    def __init__(
        self,
        name: str,
        function: RewardFunction,
        *,
        bound: Collection[str] = (),
        timeout_s: float | None = None,
        concurrency: int | None = None,
    ) -> None:
        """Read the signature of `function`, whose parameters `bound` are set already.

        `timeout_s` limits one call. At most `concurrency` calls run at once, over all concurrent
        calls of `score`. None: calls of a sync function run one by one, so that it need not be
        thread-safe, and those of an async function all at once.
        """
        # The function, and how it is called.
        self.name = name
        self._function = function
        self.scores_groups = is_of_groups(function)
        """True for a function of `rollouts`, which scores a group at once."""
        self._trl = is_trl(function) and not self.scores_groups
        """True for a function with TRL's signature, which scores a whole batch."""
        self._blocks = blocks(function)
        """True for a sync function, which would hold up the event loop: it runs in threads."""
        self._timeout_s = timeout_s
        default_concurrency = 1 if self._blocks else None  # a sync function may not be thread-safe
        self._concurrency = concurrency or default_concurrency
        self._semaphores = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]()
        """Semaphores for `concurrency` calls at once, one for each event loop."""
        self._threads = DaemonThreads()
        self.sets_alarms = False
        """True once a call has tried to set an alarm (SIGALRM): from then on calls run in the main
        thread, the only one that may set alarms."""
        self.strict = True
        """True if a value that is no number raises RewardError; False, in an evaluation, if it
        becomes NoNumber."""
        # The columns that the function gets: those that parameters name; with `**columns`, all.
        parameters = list(inspect.signature(function).parameters.values())
        # Example, with k bound: (rollout, answer, k, scale=1.0, **columns).
        # The first parameter gets the rollout, or the group. TRL passes all by name.
        rollout_parameters = [] if self._trl else parameters[:1]
        self._other_parameters = {*bound, *(parameter.name for parameter in rollout_parameters)}
        """Parameters that get no column: `rollout` and `k`. A column may have the same name."""
        column_parameters = [p for p in parameters if p.name not in self._other_parameters]
        self._takes_all = any(p.kind is Parameter.VAR_KEYWORD for p in column_parameters)
        """True for a function with `**columns`, which gets every column."""
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        column_parameters = [p for p in column_parameters if p.kind in by_name]
        self._named_columns = [parameter.name for parameter in column_parameters]
        """Columns that parameters name: `answer` and `scale`."""
        self._required = [p.name for p in column_parameters if p.default is Parameter.empty]
        """Those of `_named_columns` whose parameters have no default: `answer`."""
        # A callable may also name columns in an attribute `columns`.
        names = (*getattr(function, "columns", ()), *self._required)
        # With TRL's signature some parameters get other arguments of TRL: `completions`, say. Their
        # names are the same for any rollouts, so that an empty batch shows them.
        trl_names = batch_arguments(()).keys() if self._trl else ()
        self.columns = tuple(dict.fromkeys(name for name in names if name not in trl_names))
        """Columns that every row must have."""
        self.tools: tuple[str, ...] = tuple(getattr(function, "tools", ()))
        """Tools that the function needs."""

    async def score(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return one value per rollout. Raises RewardError naming function and rollout.

        The function is called once for all rollouts (TRL's signature), once for each group, or
        once for each rollout.
        """
        if not rollouts:
            return []
        if self._trl:
            return await self._score_batch(rollouts)
        if self.scores_groups:
            return await self._score_groups(rollouts)
        outcomes = await self._run_all(
            [functools.partial(self._call, rollout) for rollout in rollouts]
        )
        return [
            await self._read(outcome, rollout)
            for outcome, rollout in zip(outcomes, rollouts, strict=True)
        ]

    async def _run_all(self, calls: Sequence[Call]) -> list[Outcome]:
        """Return the outcomes of calls, of which at most `concurrency` run at once."""
        outcomes: list[Outcome] = []
        if self._blocks and self._concurrency == 1:  # a sync function, one call after the other
            # A thread runs the first few of the calls that are left, as many as are short.
            while len(outcomes) < len(calls):
                async with self._slot():
                    outcomes += await self._run_several(calls[len(outcomes) :])
            return outcomes

        async def run(call: Call) -> Outcome:
            async with self._slot():
                return await self._run(call)

        if self._concurrency == 1:  # an async function, one call after the other
            return [await run(call) for call in calls]
        return await asyncio.gather(*map(run, calls))  # `_slot` bounds how many run at once

    async def _score_batch(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Call a TRL function, which scores all rollouts at once."""
        arguments = batch_arguments([copy_rollout(rollout) for rollout in rollouts])
        async with self._slot():
            batch = await self._run(lambda: self._function(**self._columns_of(arguments)))
        return await self._read_batch(batch, rollouts)

    async def _score_groups(self, rollouts: Sequence[Rollout]) -> list[Score]:
        """Call a function of groups, which scores all rollouts of one `group_id` at once."""
        groups: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.group_id, []).append(rollout)

        async def run(group: Sequence[Rollout]) -> Outcome:
            async with self._slot():
                return await self._run(functools.partial(self._call_group, group))

        outcomes = await asyncio.gather(*map(run, groups.values()))
        scores: dict[int, Score] = {}  # by the identity of the rollout: ids may repeat
        for group, outcome in zip(groups.values(), outcomes, strict=True):
            group_scores = await self._read_batch(outcome, group)
            scores |= {id(r): score for r, score in zip(group, group_scores, strict=True)}
        return [scores[id(rollout)] for rollout in rollouts]

    async def _read_batch(self, batch: Outcome, rollouts: Sequence[Rollout]) -> list[Score]:
        """Return the scores of one call for several rollouts, in their order.

        Raises RewardError for an error or a bad value. RewardUnavailable is no error but a score:
        raised by the function, it is that of every rollout. A function of groups may return None in
        place of the list: it does not apply to the group. TRL's signature has no such case.
        """
        if batch.error is not None:
            # `_read` raises the error, or returns it if it is RewardUnavailable.
            return [await self._read(batch, rollout) for rollout in rollouts]
        values = batch.value
        if values is None and self.scores_groups:
            values = [None] * len(rollouts)
        if hasattr(values, "tolist") and getattr(values, "ndim", 0) >= 1:
            values = values.tolist()
        if not isinstance(values, Sequence) or len(values) != len(rollouts):
            called_with = "rollouts" if self.scores_groups else "completions"
            error = ValueError(f"it returned {values!r} for {len(rollouts)} {called_with}")
            raise scoring_error(self.name, rollouts[0], error)
        return [
            await self._read(Outcome(value=value), rollout)
            for value, rollout in zip(values, rollouts, strict=True)
        ]

    def may_set_alarms(self) -> str | None:
        """Return the name of a function that sets alarms and that this one may call, or None."""
        return may_set_alarms(self._function) if self._blocks else None

    def _slot(self) -> AbstractAsyncContextManager[object]:
        """Return a context manager that waits until a further call may run (`concurrency`)."""
        if self._concurrency is None:
            return nullcontext()
        loop = asyncio.get_running_loop()
        return self._semaphores.setdefault(loop, asyncio.Semaphore(self._concurrency))

    async def _run_several(self, calls: Sequence[Call]) -> list[Outcome]:
        """Run calls one by one in a thread, until BATCH_S have passed; return their outcomes.

        These are the first of the calls, at least one. Short calls go to the thread together,
        because handing one over takes longer than they do. The thread also stops after a call that
        cannot be finished there: one that sets an alarm is made again in the main thread, and an
        awaitable that a call returned is awaited on the event loop.
        """
        if self.sets_alarms:
            return [await self._run(calls[0])]
        started_calls: list[Call] = []
        outcomes: list[Outcome] = []  # of the started calls; that of the running one is missing
        batch_end = time.monotonic() + BATCH_S
        # Of all calls together. The last begins before `batch_end`, so that it has `timeout_s`.
        limit_s = None if self._timeout_s is None else self._timeout_s + BATCH_S

        def run_some() -> None:
            for call in calls:
                started_calls.append(call)
                outcome = attempt(call)
                outcomes.append(outcome)
                must_go_on_elsewhere = outcome.alarm or inspect.isawaitable(outcome.value)
                if must_go_on_elsewhere or time.monotonic() > batch_end:
                    return

        try:
            async with asyncio.timeout(limit_s):
                await self._threads.run(run_some, label=self.name)
                if inspect.isawaitable(outcomes[-1].value) and not outcomes[-1].alarm:
                    outcomes[-1] = await attempt_async(outcomes[-1].value)
        except TimeoutError:
            # Only the last call that was started can be late: it has no outcome yet, or an
            # awaitable as outcome. But it may have finished at the very moment of the limit.
            finished = [outcome for outcome in outcomes if not inspect.isawaitable(outcome.value)]
            last_is_late = len(finished) < len(started_calls)
            return [*finished, self._timed_out()] if last_is_late else finished
        if outcomes[-1].alarm:
            outcomes[-1] = await self._run_in_main_thread(started_calls[-1])
        return outcomes

    def _call(self, rollout: Rollout) -> Any:
        """Call the function on a copy of the rollout; ChangedRollout if it changes the copy."""
        return self._call_on_copies([rollout], lambda copies: copies[0])

    def _call_group(self, group: Sequence[Rollout]) -> Any:
        """Call the function on copies of a group; ChangedRollout if it changes one."""
        return self._call_on_copies(group, lambda copies: copies)

    def _call_on_copies(
        self, rollouts: Sequence[Rollout], as_argument: Callable[[list[Rollout]], Any]
    ) -> Any:
        """Call the function with copies of the rollouts and the columns of their task.

        `as_argument(copies)` is its first argument: a single copy, or the list. Check afterwards
        that it left the copies as they were: after a sync call at once, after an async one in the
        awaitable that is returned.
        """
        copies = [copy_rollout(rollout) for rollout in rollouts]
        columns = self._columns_of(rollouts[0].task.columns)
        column_copies = {name: copy_value(column) for name, column in columns.items()}
        value = self._function(as_argument(copies), **column_copies)

        def check_all() -> None:
            for rollout_copy, rollout in zip(copies, rollouts, strict=True):
                check_unchanged(rollout_copy, rollout)

        if not inspect.isawaitable(value):
            check_all()
            return value

        async def await_and_check() -> Any:
            result = await value
            check_all()
            return result

        return await_and_check()

    def _columns_of(self, available: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments to pass by name: columns, or in a batch those of TRL.

        `available` are all there are. Raises KeyError, naming a required one that is missing.
        """
        for name in self._required:
            if name not in available:
                raise KeyError(
                    f"it needs the column {name!r}, and the row has {sorted(available) or 'none'}"
                )
        if not self._takes_all:
            return {name: available[name] for name in self._named_columns if name in available}
        # Without columns that are named like a parameter with another value, such as `rollout`: it
        # would get two values.
        return {
            name: value for name, value in available.items() if name not in self._other_parameters
        }

    async def _run(self, call: Call) -> Outcome:
        """Return the outcome of a call; its error is RewardUnavailable if it takes too long.

        A function may set an alarm (SIGALRM), as math_verify does. That fails in a thread:
        `outcome.alarm` is true, and the call is made again in the main thread.
        """
        if self.sets_alarms:
            return await self._run_in_main_thread(call)
        try:
            async with asyncio.timeout(self._timeout_s):
                if self._blocks:
                    outcome = await self._threads.run(call, label=self.name)
                else:
                    outcome = attempt(call)
                if inspect.isawaitable(outcome.value) and not outcome.alarm:
                    outcome = await attempt_async(outcome.value)
        except TimeoutError:  # our limit: an exception of the function is an outcome
            return self._timed_out()
        return await self._run_in_main_thread(call) if outcome.alarm else outcome

    async def _run_in_main_thread(self, call: Call) -> Outcome:
        """Return the outcome of a call that sets alarms (SIGALRM); all else waits meanwhile.

        Python allows alarms in the main thread only. An error of the call is in the outcome.
        """
        if not self.sets_alarms:  # the first such call: it has just failed in another thread
            self.sets_alarms = True
            warnings.warn(alarm_text(self.name, self._timeout_s), RuntimeWarning, stacklevel=1)
        await asyncio.sleep(0)  # let rollouts go on between two calls
        try:
            outcome = attempt_with_alarms(call)
        except RuntimeError:  # its only reason: the event loop is not in the main thread
            text = f"{alarm_text(self.name)}; this run's event loop is in another thread"
            return Outcome(error=RuntimeError(text))
        if inspect.isawaitable(outcome.value):
            outcome = await attempt_async(outcome.value)
        return outcome

    def _timed_out(self) -> Outcome:
        """Return the outcome of a call that took too long."""
        limit = f"reward.{self.name}.timeout_s={self._timeout_s:g}"
        return Outcome(error=RewardUnavailable(f"a call took longer than {limit}"))

    async def _read(self, outcome: Outcome, rollout: Rollout) -> Score:
        """Return the score of a call's outcome; raise RewardError for an error or a bad value."""
        # An object of a user's class may run the user's code when it is converted to a number, so
        # it is read in a thread: the outcome's value is a score then.
        is_trusted = type(outcome.value).__module__.partition(".")[0] in TRUSTED_PACKAGES
        # A function of several rollouts may return RewardUnavailable for one of them.
        is_unavailable = isinstance(outcome.value, RewardUnavailable)
        if outcome.error is None and not is_trusted and not is_unavailable:
            outcome = await self._read_in_thread(outcome.value, rollout)
        if outcome.error is None:
            return self._read_value(outcome.value, rollout)
        if isinstance(outcome.error, RewardUnavailable):
            return outcome.error
        if isinstance(outcome.error, ChangedRollout):  # its traceback has no line of the function
            raise scoring_error(self.name, rollout, outcome.error.with_traceback(None))
        raise scoring_error(self.name, rollout, outcome.error) from outcome.error

    def _read_value(self, value: Any, rollout: Rollout) -> Score:
        """Return the score that a value is: a function's value, or a score that a thread has read.

        If the value is no number, raise RewardError, or return NoNumber unless `strict`.
        """
        if isinstance(value, NoNumber) and self.strict:  # only a thread returns NoNumber
            raise scoring_error(self.name, rollout, ValueError(str(value)))
        if isinstance(value, RewardUnavailable):  # NoNumber too
            return value
        try:
            return as_score(value, rollout)  # leaves a score as it is
        except (TypeError, ValueError) as error:
            if not self.strict:
                return NoNumber(str(error))
            raise scoring_error(self.name, rollout, error.with_traceback(None)) from error

    async def _read_in_thread(self, value: object, rollout: Rollout) -> Outcome:
        """Read a score from an object of a user's class, whose `__float__` may be slow, say.

        The value of the outcome is the score, or NoNumber for an object that is none.
        """

        def read() -> Score:
            try:
                return as_score(value, rollout)
            except (TypeError, ValueError) as error:
                return NoNumber(str(error))

        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._threads.run(read, label=self.name)
        except TimeoutError:
            return self._timed_out()


def alarm_text(name: str, timeout_s: float | None = None) -> str:
    """Return a note on a reward function whose calls set alarms."""
    limit = "" if timeout_s is None else f", and reward.{name}.timeout_s does not end a call"
    return (
        f"reward.{name}: it limits its time by an alarm (signal.alarm), which works in the main "
        f"thread only, so its calls run there and everything else waits meanwhile{limit}; {REMEDY}"
    )


MAX_REWARD = 1e100
"""Maximum absolute reward. The sum of the squares of a step's rewards stays finite."""


def as_score(value: Any, rollout: Rollout) -> float | tuple[float, ...] | None:
    """Return `value` as a reward, or a list of numbers as one reward for each turn.

    Lists, tuples, and arrays of one dimension are lists. Raises ValueError as `as_reward` does, and
    for a list with a None or with another length than the rollout's number of turns.
    """
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1:
        value = value.tolist()
    if type(value) not in (list, tuple):
        return as_reward(value)
    if len(value) != rollout.turns:
        raise ValueError(
            f"it returned {len(value)} numbers for {rollout.turns} turns; return one for each "
            "sampled turn, or one number for the rollout"
        )
    scores = [as_reward(item) for item in value]
    if not scores or None in scores:
        raise ValueError(f"it returned {_excerpt(value)}; the reward of a turn is a number")
    return tuple(score for score in scores if score is not None)  # none is: for the type checker


def as_reward(value: Any) -> float | None:
    """Return `value` as a reward; raise ValueError unless it is None or at most MAX_REWARD.

    Numbers of numpy and torch are numbers. Example: ``as_reward(True) == 1.0``
    """
    result = as_number(value)
    if result is not None and not math.isfinite(result):
        raise ValueError(f"it returned {_excerpt(value)}; a reward is a finite number, or None")
    if result is not None and abs(result) > MAX_REWARD:
        raise ValueError(
            f"it returned {result:g}; a reward is a number of at most {MAX_REWARD:g}, or None"
        )
    return result


def as_number(value: Any) -> float | None:
    """Return `value` as a float, NaN and infinity included; an integer too large is infinity."""
    if value is None:
        return None
    if not isinstance(value, Real) and hasattr(value, "item"):
        with suppress(Exception):  # an array of several values has no `item`
            value = value.item()
    if not isinstance(value, Real):
        raise ValueError(f"it returned {_excerpt(value)}; a reward is a finite number, or None")
    try:
        return float(value)
    except OverflowError:  # 10**400
        return math.inf


def _excerpt(value: Any) -> str:
    """Return the beginning of a value's repr."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "an integer of more than 4,300 digits"
    return text if len(text) <= 200 else f"{text[:199]}…"


def scoring_error(name: str, rollout: Rollout, error: BaseException) -> RewardError:
    """Return the RewardError that names the function, the rollout, and the line that raised.

    Example: ``reward 'short' on rollout 'train-1-0-3' of task '17': ZeroDivisionError: division by
    zero (my_agent.py, line 12)``.
    """
    # The text of a KeyError would be its argument in quotes.
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    message = f"{error_prefix(name, rollout)}: {type(error).__name__}: {text}{at}"
    return RewardError(hide_secrets(message), culprits=[rollout.rollout_id])


def error_prefix(name: str, rollout: Rollout) -> str:
    """Return the beginning of an error's text about a reward function and a rollout."""
    return f"reward {name!r} on rollout {rollout.rollout_id!r} of task {rollout.task.task_id!r}"


TRL_PARAMETERS = ("prompts", "completions", "completion_ids")
"""Parameters that TRL passes besides the row's columns. A function need not take all of them."""


def is_trl(function: Callable[..., Any]) -> bool:
    """Return True for a function with TRL's parameters: some of `TRL_PARAMETERS`, no `rollout`."""
    names = inspect.signature(function).parameters
    return any(name in names for name in TRL_PARAMETERS) and "rollout" not in names


def is_of_groups(function: Callable[..., Any]) -> bool:
    """Return True for a function whose first parameter is named `rollouts`: it scores a group."""
    return next(iter(inspect.signature(function).parameters), None) == "rollouts"


def batch_arguments(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the arguments that TRL would pass for these rollouts.

    TRL 1.16 passes by name `prompts`, `completions`, `completion_ids`, the dataset's columns as
    lists, `trainer_state`, `log_extra` and `log_metric`. A reward function of TRL returns
    ``list[float | None]``.

    `completions` has the messages and `completion_ids` the ids after the prompt, tool results
    included, of each rollout's last `main` trajectory. The loggers do nothing, and `trainer_state`
    is None.
    """
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.task.columns)
    trajectories = [last_main(rollout) for rollout in rollouts]
    return {
        **{name: [rollout.task.columns.get(name) for rollout in rollouts] for name in names},
        "prompts": [list(rollout.task.messages) for rollout in rollouts],
        "completions": [t.added_messages for t in trajectories],
        # `own_ids` begin with the prompt. Of a branch they leave out the ids that it shares with
        # the trajectory that it left.
        "completion_ids": [list(t.own_ids[t.prompt_length :]) for t in trajectories],
        "trainer_state": None,
        "log_extra": _no_log,
        "log_metric": _no_log,
    }


def last_main(rollout: Rollout) -> Trajectory:
    """Return the last trajectory that attempts the task itself: no summary, no sub-agent."""
    return next(t for t in reversed(rollout.trajectories) if t.role == MAIN)


def _no_log(name: str, value: object) -> None: ...


_PLAIN = (str, int, float, bool, array)
"""Types whose values are compared by `==`."""


class ChangedRollout(AgenttrainError):
    """A reward function changed the rollout that it was given."""


def copy_rollout(rollout: Rollout) -> Rollout:
    """Return a copy that shares only immutable values, such as strings and spans, with the rollout.

    Costs O(messages) and one copy of the ids.
    """
    results = [
        replace(result, call=replace(result.call, arguments=copy_value(result.call.arguments)))
        for result in rollout.tool_results
    ]
    return replace(
        rollout,
        task=copy_task(rollout.task),
        trajectories=[
            replace(
                trajectory,
                spans=list(trajectory.spans),
                messages=copy_value(trajectory.messages),
                turn_rewards=dict(trajectory.turn_rewards),
                states=list(trajectory.states),
                schemas=_copy_schemas(trajectory.schemas),
                delegation=_copy_delegation(trajectory.delegation),
                trainer_logprobs=copy.copy(trajectory.trainer_logprobs),
                entropies=copy.copy(trajectory.entropies),
                advantages=copy.copy(trajectory.advantages),
                _ids=trajectory.token_ids,  # a copy
            )
            for trajectory in rollout.trajectories
        ],
        tool_results=results,
        untrained=tuple(
            replace(conversation, messages=copy_value(conversation.messages))
            for conversation in rollout.untrained
        ),
        rewards=dict(rollout.rewards),
        grades=dict(rollout.grades),
        turn_scores=dict(rollout.turn_scores),
        counts=dict(rollout.counts),
    )


def _copy_schemas(schemas: Schemas | None) -> Schemas | None:
    return None if schemas is None else tuple(map(copy_value, schemas))


def _copy_delegation(delegation: Delegation | None) -> Delegation | None:
    if delegation is None:
        return None
    return replace(delegation, schemas=tuple(map(copy_value, delegation.schemas)))


def copy_task(task: Task) -> Task:
    """Return a copy of the task. Columns that cannot be copied (an open file, say) are shared."""
    messages = tuple(copy_value(message) for message in task.messages)
    return replace(task, messages=messages, columns=copy_value(task.columns))


def copy_value(value: Any) -> Any:
    """Return a deep copy; of JSON values, faster than `copy.deepcopy`."""
    if isinstance(value, str | int | float | None):
        return value
    if type(value) is dict:
        return {key: copy_value(item) for key, item in value.items()}
    if type(value) is list:
        return [copy_value(item) for item in value]
    try:
        return copy.deepcopy(value)
    except Exception:  # a column may hold anything, such as an open file: it is shared
        return value


def check_unchanged(rollout_copy: Rollout, rollout: Rollout) -> None:
    """Raise ChangedRollout, naming the fields, if the copy differs from the rollout."""
    fields = _different_fields(rollout_copy, rollout)
    trajectories = rollout_copy.trajectories if type(rollout_copy.trajectories) is list else []
    types = [type(trajectory) for trajectory in trajectories]
    list_is_intact = types == [Trajectory] * len(rollout.trajectories)
    if "trajectories" in fields and list_is_intact:
        # Name the changed fields of each trajectory instead: `trajectories[0].messages`.
        fields.remove("trajectories")
        for index, pair in enumerate(zip(trajectories, rollout.trajectories, strict=True)):
            fields += [f"trajectories[{index}].{name}" for name in _different_fields(*pair)]
    if fields:
        raise ChangedRollout(
            f"it changed the rollout that it was given ({', '.join(fields)}), which changes "
            "nothing that is trained or that other rewards see; change a copy, such as "
            "copy.deepcopy(rollout.trajectories), and return the reward"
        )


def _different_fields(record: Any, original: Any) -> list[str]:
    """Return the names of the fields in which a record differs from the original."""
    return [
        name.removeprefix("_")
        for name in original.__dataclass_fields__
        if not _is_equal(getattr(record, name), getattr(original, name))
    ]


def _is_equal(value: Any, original: Any) -> bool:
    """Return True if JSON values or our records are equal.

    Objects of any other type, such as an open file, count as equal: comparing them is not safe.
    """
    if value is original:
        return True
    kind = type(value)
    if kind is not type(original):
        return False
    if kind is dict:
        return value.keys() == original.keys() and all(
            _is_equal(item, original[key]) for key, item in value.items()
        )
    if kind is list or kind is tuple:
        return len(value) == len(original) and all(map(_is_equal, value, original))
    if kind in _PLAIN:
        # NaN is equal to NaN here.
        return bool(value == original or (value != value and original != original))
    if is_dataclass(value):
        return not _different_fields(value, original)
    return True
