"""The workers of one node under torch elastic's agent.

Signals are forwarded to all of them. The first worker that ends early makes the others stop.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
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
"""Signals of the launcher at which it signals its workers, not always by the same one."""
STOP_S = 15.0
"""Seconds until workers that were asked to stop are killed."""
AGAIN_S = 3.0
"""Seconds until running workers are signalled again once another one has stopped. They may wait for
it, and asyncio only stops a waiting task at the second Ctrl-C."""
SETTLE_S = 120.0
"""Seconds for the others once a worker has saved and left: one may still be writing."""
REPORT_S = 3.0
"""Seconds for the others to report the same error, before they are asked to stop."""
CHECK_S = 1.0
"""Seconds between two checks of the other nodes."""
KEY = "agenttrain/failed"
"""Key in the store of all nodes: the failure that made one of them stop."""
FIRST_NODE_GONE = "the node of the first rank is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnd:
    """How a worker ended."""

    rank: int
    pid: int
    code: int
    """Exit code; if a signal killed it, minus the signal's number."""


class Workers(LocalElasticAgent):
    """Elastic's agent, which starts the workers; this class decides when they have to stop.

    What happens to the workers that are still running (times are the constants above)::

        the launcher gets a signal     `_forwarded`, at once (`pass_on`)
        a worker fails                 SIGINT after REPORT_S, or at once if a signal killed it
        another node fails             SIGINT at once
        a worker has saved and left    SIGKILL after SETTLE_S

    Once they were sent SIGINT, or one of them has stopped at the signal, they get a further SIGINT
    every AGAIN_S, and SIGKILL after STOP_S. Exit codes are those of `utils/exit_codes.py`.
    """

    def __init__(
        self,
        describe: Callable[[WorkerEnd], str],
        announce: Callable[[str], object],
        **arguments: Any,
    ) -> None:
        """`describe` returns the message for other nodes about the end of a worker of this node.

        `announce` gets the name of the first signal that the launcher received, such as "SIGTERM".
        It is called before the workers are signalled, because they may get another signal
        (`_forwarded`), and report the one that was announced. The other arguments are elastic's.
        """
        super().__init__(**arguments)
        self.received: list[signal.Signals] = []
        """Signals that the launcher received."""
        self.failed: list[WorkerEnd] = []
        """Workers that ended before they had finished, and not because this class stopped them."""
        self.killed: list[int] = []
        """Ranks that did not end when they were asked to, and were killed."""
        self.other_node: str | None = None
        """The reason why another node stopped."""
        self.ended: dict[int, WorkerEnd] = {}
        """All workers that have ended, by rank."""
        self._describe = describe
        self._announce = announce
        self._hangup_stops = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
        """False under nohup, which has SIGHUP ignored."""
        self._sigterms = Insistence()
        """Tells a second SIGTERM from a repetition of the first, which schedulers send at once."""
        self._forwarded = signal.SIGUSR1
        """Signal that workers get: SIGUSR1, at which they save and stop. After Ctrl-C or a second
        SIGTERM it is SIGINT, at which they stop at once.

        Never SIGTERM: a scheduler that signals the whole job has already sent one to the workers,
        and a second one means 'stop without saving' to them."""
        self._is_only_node = True
        """False: failures are exchanged with other nodes."""
        self._pids: dict[int, int] = {}  # rank -> process id
        # Times by time.monotonic. None: not planned.
        self._interrupt_at: float | None = None
        """Running workers get a first SIGINT, because another worker or node has failed."""
        self._repeat_at: float | None = None
        """They get a further SIGINT, every AGAIN_S."""
        self._kill_at: float | None = None
        """They are killed."""
        self._check_at = 0.0
        """The other nodes are checked."""

    def listen(self) -> None:
        """Forward the signals of this process, except a SIGHUP that nohup ignores."""
        for number in PASSED_ON:
            is_ignored = number == signal.SIGHUP and not self._hangup_stops
            with suppress(ValueError):  # only the main thread may handle signals
                signal.signal(number, signal.SIG_IGN if is_ignored else self.pass_on)

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """Forward a signal to every worker, as `_forwarded`.

        After Ctrl-C or a second SIGTERM workers that are still running are killed after STOP_S.
        """
        received = signal.Signals(number)
        self.received.append(received)
        is_second_term = received is signal.SIGTERM and self._sigterms.arrive()
        if is_second_term or received is signal.SIGINT:
            self._forwarded = signal.SIGINT
        leave_terminal()  # it may be closed, which is why a SIGHUP came
        with suppress(OSError):
            # The first signal is the reason for the stop, whichever is forwarded.
            self._announce(self.received[0].name)
        if self._forwarded is signal.SIGINT:
            self._set_deadlines()
        self._signal(self._forwarded)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers (elastic's hook), and send them a signal that came before."""
        pids = super()._start_workers(worker_group)
        self._is_only_node = worker_group.group_world_size == 1
        self._pids = {w.global_rank: pids[w.local_rank] for w in worker_group.workers}
        self.listen()  # the agent has just installed its own handlers
        if self.received:  # before the workers were started
            self._signal(self._forwarded)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers (elastic's hook, every 0.1 s), and send the signals that are due."""
        self._reap()
        self._exchange_failures(worker_group.store)
        now = time.monotonic()
        if self._interrupt_at is not None and now >= self._interrupt_at:
            self._interrupt_at = None
            self._signal(signal.SIGINT)
            self._set_deadlines()  # for workers that do not end at this signal
        # Once one has ended, others may wait for it for ever: asyncio's first SIGINT only cancels
        # the main task, which may be in such a wait, and the second one interrupts it.
        if self._repeat_at is not None and now >= self._repeat_at and self.ended:
            self._repeat_at = now + AGAIN_S
            self._signal(signal.SIGINT)
        if self._kill_at is not None and now >= self._kill_at:
            running = [rank for rank in self._pids if rank not in self.ended]
            if running:  # in the checks after this one they have ended
                self.killed = running
            self._signal(signal.SIGKILL)
        if len(self.ended) < len(self._pids):
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _reap(self) -> None:
        """Record the workers that have ended, and decide whether the others have to stop.

        After a failure the others are interrupted. If workers ended because the launcher was
        signalled, so have the others been: they only get deadlines. After one that has saved its
        work and left, they have SETTLE_S to do the same.
        """
        ends = list(self._record_ends())
        # Workers that neither finished nor saved their work.
        unfinished = [ended for ended in ends if ended.code not in (DONE, PREEMPTED)]
        if self._interrupt_at is not None:
            # Another one has failed, and the others are not interrupted yet: these have failed too.
            self.failed += unfinished
            return
        if self._kill_at is not None:  # all were asked to stop: these have obeyed
            return
        if unfinished:
            # Codes of a worker that a forwarded signal has stopped, or killed (-2 is SIGINT).
            signal_codes = (INTERRUPTED, TERMINATED, *(-number for number in PASSED_ON))
            if self.received and all(ended.code in signal_codes for ended in unfinished):
                self._set_deadlines()  # the others may wait for these in vain
                return
            self.failed += unfinished
            # After an error the others get time to report it too. A killed worker had none.
            was_killed = any(ended.code < 0 for ended in unfinished)
            self._interrupt_at = time.monotonic() + (0 if was_killed else REPORT_S)
        elif any(ended.code == PREEMPTED for ended in ends):
            # The handler of a signal may have set an earlier time just now.
            kill_at = time.monotonic() + SETTLE_S
            self._kill_at = kill_at if self._kill_at is None else min(self._kill_at, kill_at)

    def _record_ends(self) -> Iterator[WorkerEnd]:
        """Record the workers that have ended since the last call, and yield their ends."""
        for rank, pid in self._pids.items():
            if rank in self.ended:
                continue
            # WNOWAIT leaves the exit status for the agent.
            status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status is not None:
                has_exited = status.si_code == os.CLD_EXITED  # else a signal killed it
                code = status.si_status if has_exited else -status.si_status
                self.ended[rank] = WorkerEnd(rank=rank, pid=pid, code=code)
                yield self.ended[rank]

    def _exchange_failures(self, store: Any) -> None:
        """Publish this node's first failure to the other nodes, or stop for one of another node.

        `store` is shared by all nodes, and lives in the launcher of the first.
        """
        now = time.monotonic()
        if self._is_only_node or now < self._check_at or self.other_node:
            return
        self._check_at = now + CHECK_S
        try:
            if self.failed:
                store.set(KEY, self._describe(self.failed[0]))
                self._check_at = float("inf")  # one failure is enough
            elif store.check([KEY]):
                self.other_node = store.get(KEY).decode()
        except (DistNetworkError, DistStoreError):
            self.other_node = FIRST_NODE_GONE  # and the store with it
        stop_is_due = self._interrupt_at is not None or self._kill_at is not None
        if self.other_node and not stop_is_due:
            self._interrupt_at = now

    def _set_deadlines(self) -> None:
        """Plan when workers that are still running are signalled again, and killed."""
        now = time.monotonic()
        self._repeat_at = now + AGAIN_S
        self._kill_at = now + STOP_S if self._kill_at is None else min(now + STOP_S, self._kill_at)

    def _signal(self, number: signal.Signals) -> None:
        """Send every running worker a signal; SIGKILL goes to its whole process group."""
        send = os.killpg if number is signal.SIGKILL else os.kill
        for rank, pid in self._pids.items():
            if rank not in self.ended:
                with suppress(ProcessLookupError):
                    send(pid, number)
