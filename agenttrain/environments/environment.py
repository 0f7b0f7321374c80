"""A user's environment class: its hooks, its instances, and their life cycle.

A class may have these members, all optional, with sync or async methods::

    class Maze:
        pooled = False                       # True: an instance is used again after a reset
        done = False                         # attribute or property: True ends the rollout
        truncated = False                    # with `done`: a limit ended the episode, not the task

        def reset(self, row, seed): ...      # -> None, a text (a user message) or messages;
                                             #    `group_seed` and `machine` are given if named
        def user(self, message): ...         # -> what the user says to an answer without a call
        def state(self): ...                 # -> a JSON value: equal states are one state
        def reward(self, rollout): ...       # -> float, or None: not applicable
        def close(self): ...                 # once, whatever happened

Its other public methods are tools. A class whose tools depend on its arguments describes them::

        @classmethod
        def tools(cls, **arguments): ...     # -> schemas; the arguments are those of `__init__`
        def call_tool(self, name, arguments): ...   # runs a call; `context` is optional

        @classmethod
        def check(cls, **arguments): ...     # raises ValueError, before anything is started
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import inspect
import json
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from typing import Any, TypeVar, cast

from agenttrain.environments.config import EnvironmentSettings
from agenttrain.types import (
    Message,
    Rollout,
    RolloutMachine,
    StopReason,
    ToolUnavailable,
    TurnReward,
)
from agenttrain.utils.alarms import warn_of_alarm
from agenttrain.utils.content import read_content
from agenttrain.utils.redaction import hide_secrets
from agenttrain.utils.threads import DaemonThreads, attempt, attempt_async

RESET_ARGUMENTS = ("row", "seed", "group_seed", "machine")
"""Names of the arguments that a `reset` may have."""
MACHINE = "machine"
"""The one that a `reset` gets only if it names it: the rollout's container, or None."""


Reward = TypeVar("Reward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The row and the seeds with which an environment's episode begins."""

    rollout_id: str
    row: Mapping[str, Any]
    """The task's columns."""
    seed: int
    """Seed of this rollout."""
    group_seed: int
    """Seed that all rollouts of the task share."""
    machine: RolloutMachine | None = None
    """The rollout's container; None with runtime=bwrap."""


class EnvironmentKind:
    """One declared environment class, and its instances.

    `start` gives a rollout an `Episode` in an instance that no other rollout uses meanwhile. The
    episode's `finish` returns the instance to the pool (`idle`) if the class is pooled, else closes
    it. `aclose` closes all instances at the end of the run. All of it runs in the event loop.

    A hook that takes too long is abandoned: its call goes on in its thread. `busy` returns the
    instances with such calls, so that a run with too many of them can be ended.
    """

    def __init__(
        self,
        name: str,
        cls: type,
        *,
        bound: Mapping[str, Any] | None = None,
        settings: EnvironmentSettings | None = None,
    ) -> None:
        """Raises ValueError, with a remedy, for a class whose hooks cannot work."""
        # What the configuration says.
        self.name, self.cls = name, cls
        self.bound = dict(bound or {})
        """Arguments of the constructor."""
        self.settings = settings or EnvironmentSettings()
        pooled = self.settings.pooled
        self.pooled = bool(getattr(cls, "pooled", False)) if pooled is None else pooled
        # The hooks that the class has.
        self.has_reset = callable(getattr(cls, "reset", None))
        self.has_reward = callable(getattr(cls, "reward", None))
        self.has_user = callable(getattr(cls, "user", None))
        self.has_state = callable(getattr(cls, "state", None))
        # The instances.
        self.episodes: dict[str, Episode] = {}
        """Episodes of the rollouts in flight, by rollout id."""
        self.idle: list[Instance] = []
        """The pool: instances that wait for their next rollout."""
        self._closed_stuck: list[Instance] = []
        """Closed instances in which an abandoned call still runs."""
        self._warned = False
        """True once a `close` that failed was reported."""
        where = f"environment.{name} ({cls.__module__}.{cls.__qualname__})"
        self._reset_arguments = _reset_arguments(cls, where) if self.has_reset else []
        if self.pooled and not self.has_reset:
            raise ValueError(
                f"{where}: it is pooled and has no reset, so an instance would begin where another "
                f"rollout left it; add a reset, or set environment.{name}.pooled=false"
            )
        if callable(inspect.getattr_static(cls, "done", None)):
            raise ValueError(
                f"{where}: `done` is a method; make it an attribute, or write @property above it"
            )

    @property
    def live(self) -> int:
        """Number of instances that are not closed."""
        return len(self.episodes) + len(self.idle)

    def busy(self) -> list[Instance]:
        """Return the instances in which a call may run, closed ones included."""
        # `threads.stuck` has a label for each abandoned call that still runs.
        self._closed_stuck = [instance for instance in self._closed_stuck if instance.threads.stuck]
        return [*(episode.instance for episode in self.episodes.values()), *self._closed_stuck]

    async def start(self, start: Start) -> Episode:
        """Give a rollout an instance, new or from the pool, and reset it.

        Raises ToolUnavailable if the instance cannot be made or reset; it is then closed.
        """
        if start.rollout_id in self.episodes:
            raise ValueError(f"rollout {start.rollout_id!r} has an environment already")
        if self.idle:
            instance = self.idle.pop()
        else:
            # The longest limit of its calls: those of tools and those of hooks.
            longest_s = max(self.settings.timeout_s, self.settings.hook_timeout_s)
            instance = Instance(f"environment {self.name}", limit_s=longest_s)
        episode = Episode(self, instance, start.rollout_id)
        self.episodes[start.rollout_id] = episode
        try:
            limit_s = self.settings.hook_timeout_s
            await limit_time(self._make_and_reset(episode, start), limit_s)
        except BaseException as error:
            await episode.finish(reusable=False)
            if not isinstance(error, Exception):  # a cancellation
                raise
            # `stage` is "its constructor" in a new episode; `_make_and_reset` sets "its reset".
            raise self.unavailable(episode.stage, error) from error
        return episode

    async def _make_and_reset(self, episode: Episode, start: Start) -> None:
        """Make the instance, unless it comes from the pool, and reset it."""
        instance = episode.instance
        if instance.obj is None:
            # Copies, so that no rollout sees another's changes to a bound list or to the row.
            await instance.make(lambda: self.cls(**copy.deepcopy(self.bound)))
        if self.has_reset:
            episode.stage = "its reset"
            row = copy.deepcopy(dict(start.row))
            available = {
                "row": row,
                "seed": start.seed,
                "group_seed": start.group_seed,
                MACHINE: start.machine,
            }
            arguments = {name: available[name] for name in self._reset_arguments}
            prompt = await instance.call(instance.obj.reset, **arguments)
            # `_to_messages` quotes a wrong prompt in its error. The prompt's repr is user code, so
            # it runs in the instance's thread too.
            episode.messages = () if prompt is None else await instance.call(_to_messages, prompt)
        if await instance.call(lambda: getattr(instance.obj, "done", False)):
            raise ValueError("`done` is true before the first turn; reset must make it false")

    def unavailable(self, part: str, error: Exception) -> ToolUnavailable:
        """Return the error that names the part of the environment that failed, and the reason."""
        if isinstance(error, TookTooLong):
            limit = f"environment.{self.name}.hook_timeout_s={self.settings.hook_timeout_s:g}"
            return ToolUnavailable(
                f"environment {self.name!r}: {part} took too long ({error}); {limit} is the limit"
            )
        text = hide_secrets(f"{type(error).__name__}: {error}")
        return ToolUnavailable(f"environment {self.name!r}: {part} failed with {text}")

    async def aclose(self) -> None:
        """Close every instance at the end of the run."""
        live = [*self.idle, *(episode.instance for episode in self.episodes.values())]
        self.idle, self.episodes = [], {}
        await asyncio.gather(*(self.close_instance(instance) for instance in live))

    async def close_instance(self, instance: Instance) -> None:
        """Close an instance. The first failure of a class's `close` is printed as a warning."""
        if instance.threads.stuck:  # an abandoned call still runs in it
            self._closed_stuck.append(instance)
        try:
            await instance.close(self.settings.hook_timeout_s)
        except Exception as error:
            if not self._warned:
                self._warned = True
                text = hide_secrets(f"{type(error).__name__}: {error}")
                print(
                    f"warning: environment {self.name!r}: its close failed with {text} "
                    "(logged once)",
                    file=sys.stderr,
                )


def _reset_arguments(cls: Any, where: str) -> list[str]:
    """Return the names in RESET_ARGUMENTS that a class's `reset` takes.

    Raises ValueError for a parameter that it cannot be given.
    """
    parameters = list(inspect.signature(cls.reset).parameters.values())[1:]  # without self
    for parameter in parameters:
        is_argument = parameter.name in RESET_ARGUMENTS
        can_be_given = is_argument and parameter.kind is not Parameter.POSITIONAL_ONLY
        is_required = (
            parameter.default is Parameter.empty and parameter.kind is not Parameter.VAR_KEYWORD
        )
        if is_required and not can_be_given:
            raise ValueError(
                f"{where}: its reset takes {parameter.name!r}; it can be given "
                f"{', '.join(RESET_ARGUMENTS)}: `def reset(self, row, seed):`"
            )
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        names = {parameter.name for parameter in parameters}
        # **kwargs takes all but the container, which a reset gets only if it names it.
        return [name for name in RESET_ARGUMENTS if name != MACHINE or name in names]
    return [p.name for p in parameters if p.name in RESET_ARGUMENTS]


class Episode:
    """One rollout in an environment's instance, from `EnvironmentKind.start` to `finish`.

    In between, the rollout loop calls the class's hooks and tools: `call`, `user` and `state` while
    the model takes turns, `reward` once after the last one.
    """

    def __init__(self, kind: EnvironmentKind, instance: Instance, rollout_id: str) -> None:
        """`EnvironmentKind.start` makes and resets the instance after this."""
        self.kind, self.instance, self.rollout_id = kind, instance, rollout_id
        self.stage = "its constructor"
        """The user code that `start` runs: "its constructor", then "its reset". Errors name it."""
        self.messages: tuple[Message, ...] = ()
        """Messages that the reset returned."""
        self.done = False
        """True once the environment declared the episode over. Updated after every call."""
        self.truncated = False
        """True if a limit of the environment ended the episode."""
        self._finished = False
        """True once `finish` has given the instance back, whether or not the episode was `done`."""

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the environment ends the rollout; None while the episode goes on."""
        if not self.done:
            return None
        return StopReason.environment_truncated if self.truncated else StopReason.environment_done

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the instance and update `done`; errors of the method are raised."""
        environment = self.instance.obj
        function = getattr(environment, method)

        # `done` may be a property that runs user code: it is read in the method's own thread.
        def read_done() -> None:
            self.done = bool(getattr(environment, "done", False))
            self.truncated = self.done and bool(getattr(environment, "truncated", False))

        def call_and_read_done() -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                read_done()

        async def await_and_read_done() -> Any:
            try:
                return await function(*args, **kwargs)
            finally:
                read_done()

        is_async = inspect.iscoroutinefunction(function)
        return await self.instance.call(await_and_read_done if is_async else call_and_read_done)

    async def user(self, message: Message) -> str | TurnReward | None:
        """Return the reply of the class's `user` to an answer without a call, or None.

        Raises ToolUnavailable if the hook fails, or returns something other than a text, None or
        a TurnReward of these.
        """
        if not self.kind.has_user:
            return None
        limit = self.kind.settings.hook_timeout_s
        try:
            reply = await limit_time(self.call("user", copy.deepcopy(message)), limit)
        except Exception as error:
            raise self.kind.unavailable("its user", error) from error
        content = reply.content if isinstance(reply, TurnReward) else reply
        if not isinstance(content, str | None):
            raise ToolUnavailable(
                f"environment {self.kind.name!r}: its user gave a {type(content).__name__}; a text "
                "is what the user says, None ends the conversation"
            )
        return cast("str | TurnReward | None", reply)

    async def state(self) -> str | None:
        """Return a digest of the class's `state`, or None if the class has no such hook.

        Raises ToolUnavailable if the hook fails, or returns something other than a JSON value.
        """
        if not self.kind.has_state:
            return None
        limit = self.kind.settings.hook_timeout_s
        try:
            value = await limit_time(self.call("state"), limit)
            # In the instance's thread: an error quotes the value, whose repr runs user code.
            return await limit_time(self.instance.call(_digest, value), limit)
        except Exception as error:
            raise self.kind.unavailable("its state", error) from error

    async def reward(self, rollout: Rollout, read: Callable[[Any], Reward]) -> Reward | None:
        """Call the class's `reward` on the finished rollout and return its value, read by `read`.

        Without such a hook, return None. `read` runs in the instance's thread too, because the
        value may be an object that runs code of the user's. Raises the errors of both, and
        ToolUnavailable if one takes too long.
        """
        if not self.kind.has_reward:
            return None
        limit = self.kind.settings.hook_timeout_s
        try:
            hook = self.instance.obj.reward
            value = await limit_time(self.instance.call(hook, rollout), limit)
            return await limit_time(self.instance.call(read, value), limit)
        except TookTooLong as error:
            raise self.kind.unavailable("its reward", error) from error

    async def finish(self, *, reusable: bool = True) -> None:
        """End the episode, once: return its instance to the pool, or close it.

        An instance returns to the pool if it is `reusable`, its class is pooled, and no call runs.
        """
        if self._finished:
            return
        self._finished = True
        kind, instance = self.kind, self.instance
        kind.episodes.pop(self.rollout_id, None)
        if reusable and kind.pooled and not (instance.running or instance.abandoned):
            kind.idle.append(instance)
        else:
            await kind.close_instance(instance)


def _digest(state: Any) -> str:
    """Return the digest of a JSON value; the order of keys does not matter."""
    try:
        text = json.dumps(state, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"it gave {state!r:.200}, which cannot be compared ({error}); return a text, a number, "
            "or lists and dicts of them"
        ) from error
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _to_messages(prompt: Any) -> tuple[Message, ...]:
    """Return the value that `reset` returned as messages; a text becomes a user message.

    A content may be a list of texts and images. Raises TypeError for another value.
    """
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    items = [prompt] if isinstance(prompt, Mapping) else prompt
    if not isinstance(items, list | tuple) or not all(
        isinstance(item, Mapping) and "role" in item and isinstance(item.get("content"), str | list)
        for item in items
    ):
        raise TypeError(
            f"it gave {prompt!r:.200}; expected None, a text, or chat messages such as "
            '{"role": "user", "content": "…"}'
        )
    return tuple(
        {**item, "content": read_content(item["content"])}
        if isinstance(item["content"], list)
        else dict(item)
        for item in items
    )


NO_ALARM = "limit the time in another way, such as a process of its own"
"""Remedy for a method that sets an alarm (`signal.alarm`), which only the main thread can."""
IDLE_S = 3600.0
"""Seconds that an object's thread waits for the next call: a model may sample for minutes."""
_ABANDONED: set[asyncio.Future[Any]] = set()
"""Abandoned calls that still run. The event loop itself has no strong reference to them."""


class TookTooLong(TimeoutError):
    """A hook's time limit is over. A class of its own, because user code may raise TimeoutError."""


async def limit_time(work: Awaitable[Any], seconds: float) -> Any:
    """Await `work` for at most `seconds`, then cancel and abandon it and raise TookTooLong.

    Unlike asyncio.timeout, this does not wait for work that ignores its cancellation.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            _ABANDONED.add(task)
            task.add_done_callback(_discard)
            task.cancel()
    if not task.done():
        raise TookTooLong(f"it took longer than {seconds:g} s")
    return task.result()


def _discard(task: asyncio.Future[Any]) -> None:
    """Forget an abandoned call that has ended."""
    _ABANDONED.discard(task)
    if not task.cancelled():
        task.exception()  # asyncio warns of an exception that is never read


class Instance:
    """An object of a user's environment class: made once, called one call at a time, closed once.

    `make` comes first, then any number of `call`, then `close`, all from the event loop.

    Blocking methods run off the event loop, always in the same thread, so an object may own things
    that are bound to a thread (an SQLite connection, a browser). Async methods run on the event
    loop.

    The caller limits the time of a call, and cancels it when the limit is over. A blocking method
    then goes on in its thread: the call is abandoned. The next call gets another thread and waits
    there for the first. `Environments.check_stuck` ends a run with too many abandoned calls that
    are overdue, which means that they also run longer than `limit_s`.
    """

    def __init__(self, label: str, limit_s: float) -> None:
        """`label` names the environment in warnings: ``environment maze``.

        An abandoned call counts as overdue after `limit_s` seconds.
        """
        self._label, self._limit_s = label, limit_s
        self.obj: Any = None
        """The object of the user's environment class; None until it is made."""
        self.running = 0
        """Number of unfinished calls: the one that runs, and those that wait for it to end."""
        self.abandoned = False
        """True once a call was cancelled: it may still run, so no other rollout gets the object."""
        self.threads = DaemonThreads(idle_s=IDLE_S)
        self._call_lock = threading.Lock()
        """Held during a blocking call: one runs at a time, also after an abandoned one."""
        self._close_lock = threading.Lock()
        """Guards `obj` and `_closing`: an object that is made during `close` is closed too."""
        self._closing = False

    async def make(self, construct: Callable[[], object]) -> None:
        """Construct the object; close it at once if `close` was called meanwhile."""

        def make_in_thread() -> None:
            obj = construct()
            with self._close_lock:
                self.obj, is_late = obj, self._closing
            if is_late:
                attempt(lambda: _close_in_thread(obj))  # an error of its `close` is dropped

        await self.call(make_in_thread)

    async def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a sync or async method of the object; its errors are raised."""
        self.running += 1
        try:
            if inspect.iscoroutinefunction(function):
                return await self._on_loop(function(*args, **kwargs))
            value = await self._in_thread(partial(function, *args, **kwargs))
            return await self._on_loop(value) if inspect.isawaitable(value) else value
        except asyncio.CancelledError:
            self.abandoned = True
            raise
        finally:
            self.running -= 1

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        """Run a blocking method in the object's thread; return its value or raise its error.

        If this is cancelled, a method that has begun goes on in the thread.
        """
        cancelled = threading.Event()

        def call_in_thread() -> Any:
            with self._call_lock:  # a call that is cancelled while it waits here never begins
                return None if cancelled.is_set() else function()

        try:
            outcome = await self.threads.run(
                call_in_thread, label=self._label, deadline=self._deadline()
            )
        except asyncio.CancelledError:
            cancelled.set()
            raise
        if outcome.alarm:  # the method called `signal.alarm`, which only the main thread can
            warn_of_alarm(self._label, NO_ALARM)
        return unwrap(outcome)

    async def close(self, seconds: float) -> None:
        """Close the object, once; errors of its `close` are raised.

        Does not wait for an abandoned call: closing the object may be the way to end it.
        """
        with self._close_lock:
            if self._closing:
                return
            self._closing, obj = True, self.obj
        close = getattr(obj, "close", None)
        try:
            if close is not None:
                # Shielded, so that a second Ctrl-C does not cancel it.
                await asyncio.shield(asyncio.ensure_future(limit_time(self._close(close), seconds)))
        finally:
            self.threads.close()

    async def _close(self, close: Callable[[], Any]) -> None:
        """Call the object's `close`, sync or async."""
        if inspect.iscoroutinefunction(close):
            await self._on_loop(close())
            return
        value = unwrap(await self.threads.run(close, label=self._label))
        if inspect.isawaitable(value):
            await self._on_loop(value)

    async def _on_loop(self, awaitable: Awaitable[Any]) -> Any:
        """Await an async method on the event loop; return its value or raise its error."""
        # If the method raises, the error's text may be user code. It is computed in a thread, which
        # may get stuck in it: so the label and the deadline.
        outcome = await attempt_async(
            awaitable, threads=self.threads, label=self._label, deadline=self._deadline()
        )
        return unwrap(outcome)

    def _deadline(self) -> float:
        """Return the time.monotonic from which a call that begins now is overdue."""
        # 0.9: the caller's timer for the same limit has begun a little earlier. When it fires and
        # the call is abandoned, the call must count as overdue already.
        return time.monotonic() + 0.9 * self._limit_s


def unwrap(outcome: Any) -> Any:
    """Return the value of an outcome, or raise its error."""
    if outcome.error is None:
        return outcome.value
    if isinstance(outcome.error, Exception):
        raise outcome.error
    # User code raised SystemExit or KeyboardInterrupt, which must not end the run.
    error = outcome.error
    raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _close_in_thread(obj: Any) -> None:
    """Close an object in a thread that has no event loop."""
    close = getattr(obj, "close", None)
    value = close() if close is not None else None
    if inspect.isawaitable(value):
        with asyncio.Runner() as runner:
            # Not `run`, which takes a coroutine and not every awaitable.
            runner.get_loop().run_until_complete(value)
