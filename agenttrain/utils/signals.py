"""SIGTERM, SIGUSR1 and SIGHUP: stop at the next point from which the run can go on.

Schedulers send the first two some time before they kill; a closed terminal sends the third. While
nothing would be lost (imports, loading the model) the first signal interrupts at once, as Ctrl-C
does. Within `deferred` it is only recorded: `cut_short` cancels work that will be done again
anyway, all other work is finished first, and `check` marks the places where the run can stop. A
second SIGTERM, at least GRACE_S after the first, interrupts at once, wherever the run is; an
earlier one counts as a repetition. A run that Python code starts (`train`) defers SIGINT too.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, TypeVar

from agenttrain.types import AgenttrainError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
GRACE_S = 2.0
"""Seconds between a SIGTERM and the next that counts. GNU timeout sends two, to its child and to
the group; so do schedulers that signal a job and each of its steps."""
SETTLE_S = 0.1
"""Seconds that the first signal's handler waits for a repetition. Later ones are only handled at
the end of a backward pass, which may take longer than the grace."""
NOTICE = (
    "{}: the run stops at the next safe point, with a checkpoint; "
    f"{{}} again after {GRACE_S:g} s: at once\n"
)

Result = TypeVar("Result")


def signal_name(number: int) -> str:
    """Return a signal's name: ``SIGKILL``, ``SIGRTMIN+1`` for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


class Preempted(AgenttrainError):
    """The run got a signal to stop, and has reached a point from which it can go on."""


@dataclass(slots=True)
class Insistence:
    """Distinguishes a second SIGTERM, or SIGINT, from a repetition of the first."""

    _first: float | None = None

    def arrive(self) -> bool:
        """Record a signal; return True if it came GRACE_S seconds or more after the first.

        An earlier one is a repetition: GNU timeout and schedulers send the same signal twice.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= GRACE_S


@dataclass(slots=True)
class StopRequest:
    """A request to stop this process, if one arrived, and its signal.

    The first signal sets `name`. Within `deferred`, `check` then raises Preempted at the next safe
    point; elsewhere KeyboardInterrupt is raised at once (`at_once`). A second signal that counts
    raises it anywhere (`insisted`).
    """

    name: str | None = None
    """Name of the first signal, e.g. ``"SIGTERM"``; None before it."""
    passed_on: Callable[[], str | None] = field(default=lambda: None)
    """Returns the name of the signal that the launcher of a worker received, since it forwards
    another one; None in a process without a launcher."""
    insisted: bool = False
    """True once a SIGTERM, or a deferred SIGINT, came GRACE_S or more after the first of them."""
    at_once: bool = False
    """True if the first signal came while there was nothing to save, and interrupted at once."""
    defers_interrupts: bool = False
    """True: within `deferred`, SIGINT (Ctrl-C) is handled as SIGTERM is."""
    agree: Callable[[bool], bool] = field(default=lambda stopping: stopping)
    """Takes True if this process is to stop, and returns True if any process of the run is. With
    several processes all have to call it at the same points:
    ``lambda stopping: world.max(float(stopping), "a signal") > 0``."""
    _insistence: Insistence = field(default_factory=Insistence, repr=False)
    """Shared by SIGTERM and a deferred SIGINT."""
    _deferred: bool = False
    """True within `deferred`: there is something to save, so the first signal is only recorded."""
    _cancel: Callable[[], object] | None = field(default=None, repr=False)
    """Cancels the work of `until_stopped`, from a signal handler; None while there is none."""

    def arrive(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: request a stop or, outside of `deferred`, interrupt at once.

        A SIGTERM or SIGINT that is repeated interrupts a pending stop too (`insisted`). Raises
        KeyboardInterrupt to interrupt, or has asyncio cancel its main task.
        """
        is_first = self.name is None
        self.name = self.name or self.passed_on() or signal.Signals(number).name
        leave_terminal()
        may_insist = number in (signal.SIGTERM, signal.SIGINT)
        # The first of them is only recorded, and so is a repetition of it within GRACE_S.
        if may_insist and self._insistence.arrive():
            self.insisted = True
            raise KeyboardInterrupt
        if not is_first:
            return
        if not self._deferred:
            self.at_once = True
            # Interrupt as Ctrl-C does: asyncio's handler cancels the main task. The handler is not
            # callable where a shell's background process has inherited SIGINT as ignored.
            handler = signal.getsignal(signal.SIGINT)
            interrupt = handler if callable(handler) else signal.default_int_handler
            interrupt(signal.SIGINT, None)
            return
        with suppress(OSError):  # its reader may be gone
            # Bypass sys.stderr, whose lock the interrupted code may hold.
            again = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            os.write(2, NOTICE.format(self.name, again.name).encode())
        if self._cancel is not None:  # work that will be done again anyway is running
            self._cancel()
        # Python calls this function again for a repetition of the signal that arrives during the
        # sleep. Handled later, it could seem to come after GRACE_S.
        time.sleep(SETTLE_S)

    @contextmanager
    def deferred(self, save: Callable[[], object]) -> Iterator[None]:
        """In the block, only record the first signal (`name`), so that the block can stop safely.

        The block calls `check` or `cut_short` where it can stop; these raise Preempted once a
        signal is recorded. Then `save` is called, and Preempted raised on. A signal after the last
        such call has no effect here: the block ends as without it, and `name` stays set.
        """
        self._deferred = True
        # `listening` has made `arrive` the handler of SIGNALS. SIGINT is Python's own otherwise.
        more_signals = (signal.SIGINT,) if self.defers_interrupts else ()
        try:
            with handling(more_signals, self.arrive):
                try:
                    yield
                except Preempted:
                    save()
                    raise
        finally:
            self._deferred = False

    async def cut_short(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`. A signal cancels it, and Preempted is raised instead.

        Preempted is also raised after `work` if another process of the run is to stop. For this all
        processes meet in `check`, so all have to call this function, and `work` must not wait for
        another process.
        """
        try:
            # [result], or [] if a signal has cancelled the work.
            zero_or_one_result = await self.until_stopped(work)
        except Exception:
            # Also after an error: the other processes wait in `check` until this one calls it.
            self.check()
            raise
        self.check()  # raises if this process or another has got a signal
        assert zero_or_one_result, "work without a result was cancelled by a signal"
        return zero_or_one_result[0]

    async def until_stopped(self, work: Coroutine[Any, Any, Result]) -> list[Result]:
        """Return the result of `work` as a list, which is empty if a signal cancelled it.

        A list, because a result may be None. Other processes are not asked, unlike in `cut_short`.
        """
        if self.name is not None:
            work.close()
            return []
        import asyncio  # not at the top: a command that ends before this starts faster without it

        task = asyncio.create_task(work)
        loop = asyncio.get_running_loop()
        # `arrive` runs between any two steps of the loop's own code: only this may be called there.
        self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        try:
            return [await task]
        except asyncio.CancelledError:
            # Raised again unless the signal alone caused it: this task may be cancelled too.
            outer = asyncio.current_task()
            if self.name is None or (outer is not None and outer.cancelling()):
                raise
        except Exception:
            # A signal to the process group also ends tools and engines, which causes errors here.
            if self.name is None:
                raise
        finally:
            self._cancel = None
        return []

    def check(self) -> None:
        """Raise Preempted if any process of the run is to stop."""
        if self.agree(self.name is not None):
            raise Preempted(self.name or "a signal to another process of the run")


@contextmanager
def handling(
    numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Give signals a handler for the block, and put the former ones back, asyncio's included.

    A SIGHUP that is ignored, as under nohup, stays ignored.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    former_handlers = {
        number: signal.signal(number, handler)
        for number in numbers
        if number != signal.SIGHUP or not is_ignored
    }
    try:
        yield
    finally:
        for number, former_handler in former_handlers.items():
            signal.signal(number, former_handler)


def hear_interrupts() -> None:
    """Handle SIGINT in a process whose parent forwards it, even if it is inherited as ignored.

    A shell without job control starts background processes with SIGINT ignored.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave_terminal() -> None:
    """Replace a closed terminal by the null device, so that writing to it is no error."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")  # writes nothing, but fails if the terminal is closed
        except OSError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream)
            os.close(null)


_active: StopRequest | None = None


@contextmanager
def listening(*, defers_interrupts: bool = False) -> Iterator[StopRequest]:
    """Yield a request that handles `SIGNALS` in the block; nested blocks share one.

    Outside the main thread, which gets the signals, the request stays empty. `defers_interrupts` is
    the request's; the outermost block decides.
    """
    global _active
    if _active is not None or current_thread() is not main_thread():
        yield _active or StopRequest()
        return
    _active = request = StopRequest(defers_interrupts=defers_interrupts)
    try:
        with handling(SIGNALS, request.arrive):
            yield request
    finally:
        _active = None
