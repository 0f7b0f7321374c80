"""The watchdog: a thread that writes a heartbeat and ends a run that makes no progress."""

from __future__ import annotations

import faulthandler
import json
import math
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from os import getpid, kill
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from agenttrain.health.config import WatchdogConfig
from agenttrain.health.stall import Stall, end_run
from agenttrain.rollout.monitoring import ENGINE, OTHER, TOOL, InFlight, Waiting
from agenttrain.tracking.run_folder import update_summary
from agenttrain.training.world import World
from agenttrain.utils.files import write_atomically

READ_ATTEMPTS = 100
"""Attempts to read the table of rollouts, which the event loop may change meanwhile."""
TICK_S = 0.25
"""Seconds between two checks."""
GIL_GRACE_S = 60.0
"""Extra seconds before `faulthandler` ends a process in which C code holds the GIL: the watchdog's
thread cannot run then. The stacks are on stderr and the exit code is 1."""
ARM_S = 5.0
"""Seconds between two resets of that timer. Independent of the heartbeat's interval, so that the
timer never ends a healthy run."""
LONGEST_TICK_S = 2.0
"""Most time between two checks that counts: if there is more, the process had been stopped."""


class Watched(Protocol):
    """Rollouts in flight: a Collector, or the handle of the process that has one."""

    @property
    def in_flight(self) -> InFlight:
        """The rollouts' counter of progress and, if they are of this process, their tasks."""
        ...

    def waiting(self) -> list[Waiting]:
        """Return the rollouts and what each waits for. Callable from any thread."""
        ...


class Watchdog:
    """Watches one process of a run from a thread, while it is entered.

    Without a folder it does nothing, for a trainer that is used by itself. Two timers watch:

    - The thread (`_watch`) compares counters of progress every TICK_S, writes the heartbeat, and
      ends the run if nothing has progressed for the phase's deadline.
    - faulthandler's timer (`_arm`) ends the process if that thread cannot run itself, because C
      code holds the GIL. `begin` and the thread restart it, so that it expires only then.

    Example::

        with Watchdog(folder, config.watchdog) as watchdog:
            watchdog.begin("load")
            watchdog.watch(collector)
            with watchdog.phase("rollout", step=3):
                …

    It writes `heartbeat.json` (other ranks: `heartbeat-<rank>.json`)::

        {"time": 1790000000.2, "pid": 4711, "host": "n1", "rank": 0, "phase": "rollout",
         "step": 3, "since": 1789999990.0, "last_progress": 1789999998.7,
         "in_flight": {"engine": 60, "tool": 3, "other": 1}}

    Times are seconds since 1970. `since` is when the phase began. `phase` is null between phases
    and when the run is over.
    """

    def __init__(
        self,
        folder: Path | None = None,
        config: WatchdogConfig | None = None,
        world: World | None = None,
    ) -> None:
        """With `world`, waiting for another process counts as progress."""
        self._folder, self._config = folder, config or WatchdogConfig()
        self._world, self.rank = world, 0 if world is None else world.rank
        # The current phase, its step and the time at which it began.
        self._phase: str | None = None
        self._step: int | None = None
        self._since = time.time()
        self._count = 0
        """Counter of progress. The run raises it, and the thread only compares it."""
        # The rollouts that are watched, and how to see the stacks of another process.
        self._collector: Watched | None = None
        self._print_stacks: Callable[[], None] | None = None
        # The thread, the event that ends it, and the handler of Ctrl-Z before this one.
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._former_handler: Any = None

    def __enter__(self) -> Watchdog:
        if self._folder is not None:
            self._over.clear()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
            self._former_handler = _handle_stop_with(_stop)
        return self

    def __exit__(self, *error: object) -> None:
        """End the thread, and write a last heartbeat, which has no phase."""
        self._over.set()
        self.begin(None)
        if self._thread is not None:
            self._thread.join(LONGEST_TICK_S)
            faulthandler.cancel_dump_traceback_later()
            _handle_stop_with(self._former_handler)  # at Ctrl-Z
            self._write_heartbeat(time.time())

    def begin(self, phase: str | None, step: int | None = None) -> None:
        """Enter a phase. The run has until the phase's deadline to progress."""
        self._since = time.time()
        self._step = step
        self._phase = phase
        self._count += 1
        if self._thread is not None:  # now, because C code may hold the GIL from the first line on
            _, deadline_s = self._config.deadline_of(phase)
            _arm(deadline_s)

    @contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Put the run into this phase for the block."""
        self.begin(name, step)
        try:
            yield
        finally:
            self.begin(None, step)

    def watch(
        self,
        collector: Watched | None,
        embeddings: Any = None,
        print_stacks: Callable[[], None] | None = None,
    ) -> None:
        """Watch a collector's rollouts, and count a model's forward passes by its `embeddings`.

        Each pass raises `_count`, as progress. `print_stacks` prints the stacks of the collector's
        process, if that is another one.
        """
        self._collector, self._print_stacks = collector, print_stacks
        if embeddings is not None:
            # A weak reference: a model may outlive its run if several runs share a process.
            reference = weakref.ref(self)

            def count_pass(*_: Any) -> None:
                if (watchdog := reference()) is not None:
                    watchdog._count += 1

            embeddings.register_forward_hook(count_pass)

    def _watch(self) -> None:
        """Write heartbeats and compare counters, until the run is over or has stalled."""
        last_count, idle_s = -1, 0.0
        last_tick = time.monotonic()
        last_progress, last_beat, last_arm = time.time(), -math.inf, -math.inf
        while not self._over.wait(TICK_S):
            now = time.monotonic()
            setting, deadline_s = self._config.deadline_of(self._phase)
            # At most LONGEST_TICK_S for a tick: a longer one means that the whole process was
            # stopped (Ctrl-Z, a suspended machine), which is no stall.
            idle_s += min(now - last_tick, longest_tick_s(deadline_s))
            last_tick = now
            if (count := self._progress()) != last_count:
                last_count, idle_s, last_progress = count, 0.0, time.time()
            if now - last_beat >= self._config.heartbeat_s:
                last_beat = now
                self._write_heartbeat(last_progress)
            if now - last_arm >= ARM_S:  # faulthandler's timer, in case this thread cannot run
                last_arm = now
                _arm(deadline_s)
            # Compared again: the run may have progressed while the heartbeat was written.
            if deadline_s is not None and idle_s > deadline_s and self._progress() == last_count:
                self._end_stalled_run(setting, deadline_s, idle_s)

    def _end_stalled_run(self, setting: str, deadline_s: float, idle_s: float) -> None:
        """Write the evidence and end this process. Does not return."""
        folder, phase, step = self._folder, self._phase, self._step
        assert folder is not None
        path = folder / f"stall-{self.rank}.txt"
        at = f"phase {phase}" + ("" if step is None else f" of step {step}")
        message = (
            f"stalled: {at} made no progress for {idle_s:.1f} s "
            f"(watchdog.{setting}={deadline_s:g}); stacks and rollouts in flight: {path}"
        )

        def record() -> None:
            """Write the stall into summary.json, which is the first rank's."""
            if self.rank == 0:
                update_summary(folder, status="stalled", stalled_phase=phase, error=message)

        tasks = [] if self._collector is None else self._collector.in_flight.tasks()
        # The collector may be in a child process, and the stall there: its stacks first, because
        # `end_run` writes only this process's and kills all children.
        if self._print_stacks is not None:
            self._print_stacks()
        end_run(Stall(message=message, waiting=self._waiting(), tasks=tasks), path, record)

    def _progress(self) -> int:
        """Return the sum of all counters of progress."""
        collector = self._collector
        rollouts = 0 if collector is None else collector.in_flight.progress
        waits = 0 if self._world is None else self._world.progress
        return self._count + rollouts + waits

    def _waiting(self) -> list[Waiting]:
        """Return the rollouts in flight; empty if their table changes at every attempt to read it.

        Nothing is locked: the event loop must not wait for the watchdog.
        """
        collector = self._collector
        for _ in range(READ_ATTEMPTS):
            with suppress(RuntimeError):  # a table changed while it was iterated over
                return [] if collector is None else collector.waiting()
        return []

    def _write_heartbeat(self, last_progress: float) -> None:
        """Write this process's heartbeat file."""
        assert self._folder is not None
        counts = Counter(waiting.kind for waiting in self._waiting())
        heartbeat = {
            "time": time.time(),
            "pid": getpid(),
            "host": socket.gethostname(),
            "rank": self.rank,
            "phase": self._phase,
            "step": self._step,
            "since": self._since,
            "last_progress": last_progress,
            "in_flight": {kind: counts[kind] for kind in (ENGINE, TOOL, OTHER)},
        }
        name = "heartbeat.json" if self.rank == 0 else f"heartbeat-{self.rank}.json"
        with suppress(OSError):  # a reader sees from its age that something is wrong
            write_atomically(self._folder / name, json.dumps(heartbeat) + "\n")


def longest_tick_s(deadline_s: float | None) -> float:
    """Return the most seconds between two checks that count as idle.

    If there are more, the process itself was stopped, which is no stall.
    """
    return min(LONGEST_TICK_S, max(TICK_S, (deadline_s or math.inf) / 4))


def _arm(deadline_s: float | None) -> None:
    """Restart faulthandler's timer, which ends the process if the watchdog's thread cannot run."""
    if deadline_s is None:
        faulthandler.cancel_dump_traceback_later()
        return
    with suppress(RuntimeError):  # no thread can be started now; the next check tries again
        faulthandler.dump_traceback_later(deadline_s + GIL_GRACE_S, file=2, exit=True)


def _stop(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-Z: cancel faulthandler's timer, which would go on, and stop the process.

    The watchdog's next check restarts the timer.
    """
    faulthandler.cancel_dump_traceback_later()
    kill(getpid(), signal.SIGSTOP)


def _handle_stop_with(handler: Any) -> Any:
    """Install `handler` for SIGTSTP unless other code has one. Return the former handler."""
    # None: it was installed by C code, and cannot be restored.
    former_handler = signal.getsignal(signal.SIGTSTP)
    may_install = former_handler in (signal.SIG_DFL, _stop) and handler is not None
    if may_install and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTSTP, handler)
    return former_handler
