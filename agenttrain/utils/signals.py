"""SIGTERM, SIGUSR1 and SIGHUP: stop at the next point from which the run can go on.

Schedulers send the first two some time before they kill, a closed terminal the third. While nothing
would be lost (imports, the model is being loaded) the first one interrupts at once, as Ctrl-C does.
Within `deferred` it is only recorded: `cut_short` ends what is to be done again anyway, everything
else is finished first, and `check` stands where the run can stop. A second SIGTERM, at least
GRACE_S after the first, interrupts at once, wherever the run is; a quicker one repeats the first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Generic, TypeVar

from agenttrain.types import AgenttrainError

HEARD = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
GRACE_S = 2.0
"""Seconds between a SIGTERM and the next that counts: GNU timeout sends two, to its child and to
the group; so do schedulers that signal a job and each of its steps."""
SETTLE_S = 0.1
"""Seconds that the first signal's handler stays, so that a repetition is met at once, and not at
the end of a backward pass that takes longer than the grace."""
NOTED = (
    "{}: the run stops at the next safe point, with a checkpoint; "
    f"SIGTERM again after {GRACE_S:g} s: at once\n"
)

Result = TypeVar("Result")


class Preempted(AgenttrainError):
    """The run was told to stop, and stands where it can go on."""


@dataclass(frozen=True, slots=True)
class _Finished(Generic[Result]):
    value: Result


@dataclass(slots=True)
class Insistence:
    """Tells a SIGTERM that was meant as a second one from a repetition of the first."""

    _first: float | None = None

    def arrive(self) -> bool:
        """Record a SIGTERM; return True if it insists, having come GRACE_S after the first."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= GRACE_S


@dataclass(slots=True)
class StopRequest:
    """A request to stop this process, if one arrived, and its signal."""

    name: str | None = None
    """Name of the first signal, e.g. ``"SIGTERM"``; None: there was none."""
    passed_on: Callable[[], str | None] = field(default=lambda: None)
    """Returns the signal that the sender of this one got, where it passes on another one."""
    insisted: bool = False
    """True once there was a second SIGTERM that counts."""
    at_once: bool = False
    """True if the first one arrived with nothing to save, and interrupted."""
    agree: Callable[[bool], bool] = field(default=lambda stopping: stopping)
    """Maps whether this process is to stop to whether any process of the run is; with several of
    them all have to ask at the same points:
    ``lambda stopping: world.max(float(stopping), "a signal") > 0``."""
    _terms: Insistence = field(default_factory=Insistence, repr=False)
    _deferred: bool = False
    _cancel: Callable[[], None] | None = field(default=None, repr=False)

    def arrive(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal. Raises KeyboardInterrupt, or has asyncio cancel its main task, where
        the run is to end at once."""
        first = self.name is None
        self.name = self.name or self.passed_on() or signal.Signals(number).name
        leave_terminal()
        if number == signal.SIGTERM and self._terms.arrive():
            self.insisted = True
            raise KeyboardInterrupt
        if not first:
            return
        if not self._deferred:
            self.at_once = True
            # As Ctrl-C: while asyncio runs this is its handler, which cancels the main task in good
            # order; a process that a shell put into the background inherits SIGINT as ignored.
            handler = signal.getsignal(signal.SIGINT)
            (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, None)
            return
        with suppress(OSError):  # its reader may be gone
            # Not through sys.stderr, whose lock the interrupted code may hold.
            os.write(2, NOTED.format(self.name).encode())
        if self._cancel is not None:
            self._cancel()
        time.sleep(SETTLE_S)

    @contextmanager
    def deferred(self, save: Callable[[], object]) -> Iterator[None]:
        """Only record the first signal within the context; Preempted passes after `save` was
        called."""
        self._deferred = True
        try:
            yield
        except Preempted:
            save()
            raise
        finally:
            self._deferred = False

    async def cut_short(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, which a signal cancels. Raises Preempted as `check`, at its
        end.

        `work` is this process's alone: it waits for no other process.
        """
        try:
            finished = await self._until_signal(work)
        except Exception:
            self.check()  # every process asks, however its work ended
            raise
        self.check()
        assert finished is not None, "what was cut short had a signal"
        return finished.value

    async def _until_signal(self, work: Coroutine[Any, Any, Result]) -> _Finished[Result] | None:
        """Return the result of `work`; None where a signal came before its end."""
        if self.name is not None:
            work.close()
            return None
        task = asyncio.create_task(work)
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        try:
            return _Finished(await task)
        except asyncio.CancelledError:
            outer = asyncio.current_task()
            if self.name is None or (outer is not None and outer.cancelling()):
                raise
        except Exception:
            # A signal to a whole process group ends the processes of tools and engines too.
            if self.name is None:
                raise
        finally:
            self._cancel = None
        return None

    def check(self) -> None:
        """Raise Preempted where any process of the run was told to stop."""
        if self.agree(self.name is not None):
            raise Preempted(self.name or "a signal to another process of the run")


def leave_terminal() -> None:
    """Put the null device in place of a closed terminal, so that writing to it is no error."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


_heard_by: StopRequest | None = None


@contextmanager
def listening() -> Iterator[StopRequest]:
    """Give a request that hears the signals HEARD within the context; the outermost counts.

    Signals are the main thread's: elsewhere nothing is heard. Nor is a SIGHUP that nohup ignores.
    """
    global _heard_by
    if _heard_by is not None or current_thread() is not main_thread():
        yield _heard_by or StopRequest()
        return
    _heard_by = request = StopRequest()
    numbers = [n for n in HEARD if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, request.arrive) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _heard_by = None
