"""The workers of one node under torch elastic's agent: signals reach all of them, and the first
that ends before its time ends the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from agenttrain.utils.exit_codes import DONE, INTERRUPTED, PREEMPTED, TERMINATED
from agenttrain.utils.signals import Insistence, leave_terminal

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
STOP_S = 15.0
"""Seconds until workers that were told to stop are killed."""
AGAIN_S = 3.0
"""Seconds until a worker that still runs when another has stopped is signalled again: it may wait
for that other one, and asyncio takes only the second Ctrl-C to heart."""
SETTLE_S = 120.0
"""Seconds for the others, once a worker has ended as asked: one may still be writing."""
TELL_S = 3.0
"""Seconds for the others to report the same mistake, before they are told to stop."""
LOOK_S = 1.0
"""Seconds between two checks of the other nodes."""
KEY = "agenttrain/failed"
"""Key in the store of all nodes: what made one of them stop."""
FAR = "the node of the first rank is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended."""

    rank: int
    pid: int
    code: int
    """Exit code, or less than 0: minus the signal that killed it."""

    @property
    def as_asked(self) -> bool:
        """True if it did what it was started for, or saved its work and left."""
        return self.code in (DONE, PREEMPTED)


class Workers(LocalElasticAgent):
    """Elastic's agent, which starts them, and this, which decides when they are to stop."""

    def __init__(
        self, describe: Callable[[WorkerEnd], str], told: Callable[[str], object], **arguments: Any
    ) -> None:
        """Take `describe`, which says to other nodes how a worker of this one ended, and `told`,
        which gives the workers the signal that they are about to get another for; the other
        arguments are elastic's."""
        super().__init__(**arguments)
        self.asked: list[signal.Signals] = []
        """Signals that the launcher got."""
        self.early: list[WorkerEnd] = []
        """Workers that ended before anybody told them to, and were not done."""
        self.silent: list[int] = []
        """Ranks that did not end when they were told to, and were killed."""
        self.far: str | None = None
        """The reason why another node stopped."""
        self.ended: dict[int, WorkerEnd] = {}
        self._describe = describe
        self._announce = told
        self._hears_hangup = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        self._terms = Insistence()
        self._is_urgent = False
        self._alone = True
        self._pids: dict[int, int] = {}
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._again_at: float | None = None
        self._look_at = 0.0

    def listen(self) -> None:
        """Have the signals of this process passed on; a SIGHUP that nohup ignores is not."""
        for number in PASSED_ON:
            deaf = number == signal.SIGHUP and not self._hears_hangup
            with suppress(ValueError):  # in a thread, where signals are somebody else's
                signal.signal(number, signal.SIG_IGN if deaf else self.pass_on)

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """Tell every worker; after Ctrl-C or a second SIGTERM they have to be quick."""
        asked = signal.Signals(number)
        self.asked.append(asked)
        insists = asked is signal.SIGTERM and self._terms.arrive()
        self._is_urgent = self._is_urgent or insists or asked is signal.SIGINT
        leave_terminal()
        with suppress(OSError):
            self._announce(self.asked[0].name)
        if self._is_urgent:
            self._stop_soon()
        self._signal(self._told)

    @property
    def _told(self) -> signal.Signals:
        """Signal forwarded to workers. Never SIGTERM: a scheduler that signals the whole job has
        already sent one, and workers treat a second SIGTERM as 'stop without saving'."""
        return signal.SIGINT if self._is_urgent else signal.SIGUSR1

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._alone = worker_group.group_world_size == 1
        self._pids = {w.global_rank: pids[w.local_rank] for w in worker_group.workers}
        self.listen()  # the agent has just made them its own
        if self.asked:  # before there was anyone to tell
            self._signal(self._told)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._reap()
        self._exchange_failures(worker_group.store)
        now = time.monotonic()
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            self._stop_soon()
            self._signal(signal.SIGINT)
        if self._again_at is not None and now >= self._again_at and self.ended:
            self._again_at = now + AGAIN_S
            self._signal(signal.SIGINT)
        if self._kill_at is not None and now >= self._kill_at:
            self.silent = [rank for rank in self._pids if rank not in self.ended] or self.silent
            self._signal(signal.SIGKILL)
        if len(self.ended) < len(self._pids):
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _reap(self) -> None:
        """Record the workers that have ended; the exit status stays for the agent."""
        new = []
        for rank, pid in self._pids.items():
            if rank in self.ended:
                continue
            # WNOWAIT: it can be asked for again.
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                exited = status.si_code == os.CLD_EXITED
                code = status.si_status if exited else -status.si_status
                self.ended[rank] = WorkerEnd(rank=rank, pid=pid, code=code)
                new.append(self.ended[rank])
        early = [ended for ended in new if not ended.as_asked]
        if self._stop_at is not None or self._kill_at is not None:
            if self._stop_at is not None:  # nobody has been told yet: they ended by themselves
                self.early += early
            return
        # These codes are of workers that heard the launcher's signal, if at once.
        by_signal = (INTERRUPTED, TERMINATED, *(-number for number in PASSED_ON))
        if early and not (self.asked and all(ended.code in by_signal for ended in early)):
            self.early += early
            killed = any(ended.code < 0 for ended in early)
            self._stop_at = time.monotonic() + (0 if killed else TELL_S)
        elif early:  # without that one the others get nowhere
            self._stop_soon()
        elif any(ended.code == PREEMPTED for ended in new):
            self._kill_by(SETTLE_S)

    def _exchange_failures(self, store: Any) -> None:
        """Publish this node's failure to the other nodes, and stop for one of theirs."""
        now = time.monotonic()
        if self._alone or now < self._look_at or self.far:
            return
        self._look_at = now + LOOK_S
        try:
            if self.early:
                store.set(KEY, self._describe(self.early[0]))
                self._look_at = float("inf")
            elif store.check([KEY]):
                self.far = store.get(KEY).decode()
        except (DistNetworkError, DistStoreError):
            self.far = FAR
        if self.far and self._stop_at is None and self._kill_at is None:
            self._stop_at = now

    def _stop_soon(self) -> None:
        self._again_at = time.monotonic() + AGAIN_S
        self._kill_by(STOP_S)

    def _kill_by(self, seconds: float) -> None:
        at = time.monotonic() + seconds
        self._kill_at = at if self._kill_at is None else min(at, self._kill_at)

    def _signal(self, number: signal.Signals) -> None:
        """Signal every worker that runs; SIGKILL goes to what it started in its session too."""
        send = os.killpg if number is signal.SIGKILL else os.kill
        for rank, pid in self._pids.items():
            if rank not in self.ended:
                with suppress(ProcessLookupError):
                    send(pid, number)
