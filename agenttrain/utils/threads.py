"""Blocking functions off the event loop, in daemon threads that never keep the process alive.

`asyncio.to_thread` shares a handful of threads, so that one blocking function delays the others,
and the interpreter waits for every one of them at exit.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import PurePath
from types import CodeType
from typing import Any

from agenttrain.utils.alarms import alarms_kept_apart, alarms_refused

Inbox = queue.SimpleQueue["_Job | None"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The value that a function returned, or the error that it raised."""

    value: object = None
    error: BaseException | None = None
    alarm: bool = False
    """True if the function tried to set an alarm (SIGALRM, to limit its time) outside of the main
    thread, and got a ValueError, which it may have swallowed. The caller may warn of it."""


def attempt(function: Callable[[], object]) -> Outcome:
    """Call `function` and return its value or its error, even SystemExit and KeyboardInterrupt.

    Alarms are refused except in the main thread. The error has a fixed text (`with_fixed_text`), so
    that no `__str__` of a user's is called later.
    """
    with alarms_refused() as alarms:
        try:
            return Outcome(value=function(), alarm=bool(alarms))
        except BaseException as error:
            return Outcome(error=with_fixed_text(error), alarm=bool(alarms))


def attempt_with_alarms(function: Callable[[], object]) -> Outcome:
    """Call `function` as `attempt` does, in the main thread, where it can set alarms.

    A KeyboardInterrupt by a signal is raised again. Raises RuntimeError in another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("alarms work in the main thread only")
    with alarms_kept_apart():
        outcome = attempt(function)
    if outcome.error is not None and _raised_by_signal(outcome.error):
        raise outcome.error
    return outcome


async def attempt_async(
    awaitable: Awaitable[object],
    *,
    threads: DaemonThreads | None = None,
    label: str = "",
    deadline: float = 0.0,
) -> Outcome:
    """Await a user's `awaitable`; return its value or its error, as `attempt` does for a function.

    A cancellation of this task and a KeyboardInterrupt by a signal are raised again. If user code
    computes the error's text, it does so in one of `threads`, because it may block the event loop;
    `label` and `deadline` are as in `DaemonThreads.run`.
    """
    # In a task that the awaitable creates, SystemExit and KeyboardInterrupt become _Stopped, or
    # asyncio would let them end the event loop. `_in_user_code` marks such tasks.
    _contain_tasks(asyncio.get_running_loop())
    token = _in_user_code.set(True)
    try:
        return Outcome(value=await awaitable)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():  # this task was cancelled
            raise
        raised: BaseException = error  # the user's code has raised it itself
    except BaseException as error:
        if _raised_by_signal(error):
            raise
        raised = error.stopped if isinstance(error, _Stopped) else error
    finally:
        # ValueError: the garbage collector closes an unfinished coroutine in any task's context.
        with suppress(ValueError):
            _in_user_code.reset(token)
    if _has_plain_text(raised):
        return Outcome(error=raised)
    fixed = await (threads or _text_threads).run(
        lambda: with_fixed_text(raised), label=label, deadline=deadline
    )
    assert isinstance(fixed.value, BaseException)
    return Outcome(error=fixed.value)


PLAIN = (str, int, float, bool, bytes, type(None))
"""Types whose text is computed without code of a user's."""


def with_fixed_text(error: BaseException) -> BaseException:
    """Return `error`, or a copy whose text is a constant if user code computes the text.

    A user's `__str__` may hang, or raise SystemExit. So it runs once, here, and never on an event
    loop or where an error is reported. If it raises, the text is empty. The copy's class has the
    name of the user's, which messages and tracebacks show, and is a subclass of it if possible.
    """
    if _has_plain_text(error):
        return error
    try:
        text = str.__str__(str(error))  # a plain str, even if the user's `__str__` returns another
    except BaseException:
        text = ""
    kind = type(error)
    # The builtin class that the user's is derived from: KeyError for ``class Mine(KeyError)``.
    native: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    members = {
        "__str__": lambda self: text,
        "__repr__": lambda self: f"{kind.__name__}({text!r})",
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    bases_and_makers: tuple[tuple[Any, Any], ...] = (
        (kind, native),
        (native, native),  # for a class without subclasses: pydantic's ValidationError
        (Exception, Exception),  # for an exception group, which is not made without its errors
    )
    fixed: Any
    # Made by the `__new__` of a builtin class, so that no `__new__` or `__init__` of a user's runs.
    for base, maker in bases_and_makers:
        with suppress(BaseException):
            fixed = maker.__new__(type(kind.__name__, (base,), members))
            break
    with suppress(BaseException):
        fixed.args = (text,)
        fixed.__dict__.update(error.__dict__)
        fixed.__cause__, fixed.__context__ = error.__cause__, error.__context__
        fixed.__suppress_context__ = error.__suppress_context__
    return fixed.with_traceback(error.__traceback__)


def _has_plain_text(error: BaseException) -> bool:
    """Return True if no user code runs in ``str(error)`` and ``repr(error)``.

    The errors inside of a group, which its `repr` shows, are not considered.
    """
    for name in ("__str__", "__repr__"):
        defined_by = next(cls for cls in type(error).__mro__ if name in vars(cls))
        if defined_by.__module__ != "builtins":
            return False
    # The builtin methods show these values, and so call the values' own `__str__` or `__repr__`.
    # ``str(group)`` shows its message and the number of its errors.
    shown = [error.message] if isinstance(error, BaseExceptionGroup) else [*error.args]
    if isinstance(error, OSError):
        # The `__repr__` of paths is the standard library's.
        shown += [p for p in (error.filename, error.filename2) if not isinstance(p, PurePath)]
    # Of exactly these types: a subclass may define `__str__`.
    return all(type(value) in PLAIN for value in shown)


def _raised_by_signal(error: BaseException) -> bool:
    """Return True if a signal handler raised this KeyboardInterrupt, False if user code did."""
    if not isinstance(error, KeyboardInterrupt):
        return False
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True  # Python's own handler is in no traceback; a Ctrl-C must never be swallowed
    codes: set[CodeType | None] = set()  # of the functions that handle signals
    for number in signal.Signals:
        handler: Any = signal.getsignal(number)
        if not callable(handler):
            continue
        while isinstance(handler, functools.partial):
            handler = handler.func
        function = handler if inspect.isroutine(handler) else type(handler).__call__
        codes.add(getattr(function, "__code__", None))
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


_in_user_code: contextvars.ContextVar[bool] = contextvars.ContextVar("_in_user_code", default=False)
"""True in `attempt_async`, and so in every task that is created there."""


class _Stopped(Exception):
    """Carries a SystemExit or KeyboardInterrupt of a user's task, which would stop the loop."""

    def __init__(self, stopped: BaseException) -> None:
        super().__init__(type(stopped).__name__)
        self.stopped = stopped


class _Contained(Coroutine[Any, Any, Any]):
    """Wraps the coroutine of a user's task: SystemExit becomes _Stopped, an ordinary exception.

    So does a KeyboardInterrupt that user code raised. asyncio would let either of the two, raised
    in a task, end the whole event loop. A KeyboardInterrupt by a signal (Ctrl-C) still ends it.
    """

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        # `cr_running` and `cr_frame`, which anyio and printed stacks of tasks read.
        return getattr(self._inner, name)

    def send(self, value: Any) -> Any:
        return self._step(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        return self._step(self._inner.throw, *error)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Any:
        # `Coroutine` demands it, but a task drives its coroutine by `send` and `throw` alone.
        return self._inner.__await__()

    def _step(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Run the inner coroutine until it waits again, ends or raises."""
        try:
            return step(*arguments)
        except (SystemExit, KeyboardInterrupt) as error:
            if _raised_by_signal(error):  # Ctrl-C: the person wants the whole run to stop
                raise
            raise _Stopped(error) from error


def _contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Let no task that user code creates end the event loop, by a task factory on `loop`.

    A task that raises SystemExit or KeyboardInterrupt, say after `asyncio.create_task` or
    `asyncio.gather` in a tool, would end the loop and with it the run. The factory wraps the
    coroutines of such tasks in `_Contained`, which raises an ordinary exception instead.
    """
    previous: Any = loop.get_task_factory()
    if getattr(previous, "contains", False):  # our factory is installed already
        return

    def make(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> Any:
        # The context variable is set in `attempt_async`, and inherited by the tasks made there.
        work = _Contained(work) if _in_user_code.get() else work
        if previous is None:
            return asyncio.Task(work, loop=loop, **options)
        return previous(loop, work, **options)

    make.contains = True  # type: ignore[attr-defined]
    loop.set_task_factory(make)


def current_gpu() -> int | None:
    """Return the index of the calling thread's GPU; None while this process uses none."""
    torch = sys.modules.get("torch")  # a thread that uses a GPU has imported it
    if torch is None or not torch.cuda.is_initialized():
        return None
    index: int = torch.cuda.current_device()
    return index


def use_gpu(index: int | None) -> None:
    """Make `index`, if any, the calling thread's GPU.

    CUDA's current device belongs to a thread: a new thread begins with GPU 0, even if its process
    works on another.
    """
    if index is not None:
        sys.modules["torch"].cuda.set_device(index)


def blocks(function: Callable[..., object]) -> bool:
    """Return True if a call blocks its thread: neither `function` nor its `__call__` is async."""
    routines = (function, getattr(function, "__call__", None))  # noqa: B004
    return not any(inspect.iscoroutinefunction(routine) for routine in routines)


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """A call for a thread of `DaemonThreads`, made by the caller on its event loop."""

    function: Callable[[], object]
    label: str
    """Name of the function, for `stuck` and `overdue`."""
    loop: asyncio.AbstractEventLoop
    """The caller's event loop, on which `future` gets the outcome."""
    future: asyncio.Future[Outcome]
    deadline: float
    """The time.monotonic at which the function should have ended."""
    gpu: int | None = field(default_factory=current_gpu)
    """The caller's GPU, which the thread uses too."""
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    """The caller's context variables."""
    finished: bool = False


def settle(future: asyncio.Future[Any], result: object) -> None:
    """Set the future's result, or its exception if `result` is one, unless the future is done."""
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)


class DaemonThreads:
    """Pool of daemon threads that grows with the concurrent calls, which the caller bounds.

    Each thread has an inbox, a queue from which it takes its jobs; None in it ends the thread. A
    call whose caller was cancelled keeps its thread. When its function returns after all, the
    result is discarded and the thread is idle again.

    Example: ``(await DaemonThreads().run(lambda: 2 + 2)).value == 4``
    """

    def __init__(self, *, idle_s: float = 30.0) -> None:
        """An idle thread ends after `idle_s` seconds."""
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._idle: list[Inbox] = []
        self._stuck: list[_Job] = []

    @property
    def stuck(self) -> tuple[str, ...]:
        """Labels of the functions that still run although their caller gave up."""
        with self._lock:
            return tuple(job.label for job in self._stuck)

    @property
    def overdue(self) -> tuple[str, ...]:
        """Labels of those among `stuck` whose deadline has passed."""
        now = time.monotonic()
        with self._lock:
            return tuple(job.label for job in self._stuck if job.deadline <= now)

    async def run(
        self, function: Callable[[], object], *, label: str = "", deadline: float = 0.0
    ) -> Outcome:
        """Run `function` in an idle or new thread, on the caller's GPU, and return its outcome.

        If the caller is cancelled, the function goes on in its thread (`stuck`). `deadline` is the
        time.monotonic at which it should have ended (`overdue`).
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        job = _Job(function=function, label=label, loop=loop, future=future, deadline=deadline)
        with self._lock:
            inbox: Inbox | None = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), daemon=True).start()
        inbox.put(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            with self._lock:
                if not job.finished:
                    self._stuck.append(job)
            raise

    def close(self) -> None:
        """End the idle threads."""
        with self._lock:
            idle, self._idle = self._idle, []
        for inbox in idle:
            inbox.put(None)

    def _work(self, inbox: Inbox) -> None:
        """Run jobs from the inbox until None arrives or `idle_s` pass: a thread's body."""
        while True:
            try:
                job = inbox.get(timeout=self._idle_s)
            except queue.Empty:
                with self._lock:
                    if inbox in self._idle:
                        self._idle.remove(inbox)
                        return
                continue  # a job is on its way
            if job is None:
                return
            use_gpu(job.gpu)
            outcome = job.context.run(attempt, job.function)
            with self._lock:  # idle before the caller gets the result: its next call reuses it
                job.finished = True
                if job in self._stuck:
                    self._stuck.remove(job)
                self._idle.append(inbox)
            with suppress(RuntimeError):  # the loop was closed: nobody waits
                job.loop.call_soon_threadsafe(settle, job.future, outcome)
            del job, outcome  # an idle thread must not keep a result alive


_text_threads = DaemonThreads()
"""Threads that compute the texts of errors raised on an event loop."""
