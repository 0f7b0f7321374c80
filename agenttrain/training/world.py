"""The processes of a run, and everything that crosses between them besides gradients.

Every method of `World` is called by all processes or by none, in the same order. Late and dead
processes are detected through the key-value store in which the processes met, without a device.
Each process records the last barrier it reached, so that a waiting process can name the missing
ones.
"""

from __future__ import annotations

import atexit
import itertools
import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from agenttrain.types import AgenttrainError

Value = TypeVar("Value")
WAKE = timedelta(seconds=0.5)
"""Length of one wait of the store: the longest time that the handling of signals is delayed."""
LATE = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""Texts in the errors of gloo and NCCL when another process does not arrive."""
NCCL = {
    # End the process when a collective times out: its results are wrong from then on.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # Record the collectives that each rank reached: /tmp/nccl_trace_rank_<rank>, see torchfrtrace.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Environment variables for NCCL, unless the user has set them."""
WARNINGS = 4
"""Number of checks for stopped ranks within the timeout of a collective."""
TIMEOUT_S = 600.0
"""Timeout of torch's own collectives."""


_numbers = itertools.count(1)
"""Numbers of the worlds of this process."""


class WorldTimeout(AgenttrainError):
    """Not every process reached a barrier in time. The message names the ranks and the barrier."""

    def __init__(self, message: str, *, missing: Sequence[int]) -> None:
        """`missing` are ranks. It is empty if the process that holds the store is gone."""
        super().__init__(message)
        self.missing = tuple(missing)


class PeerFailed(AgenttrainError):
    """Another process failed. The message names its rank and its error."""


class World:
    """The processes of this run, as this one sees them. A world of one communicates nothing.

    All processes call its methods together, in the same order.

    Example, on rank 1 of 2: ``world.gather(["b"])`` is ``["a", "b"]`` on both when rank 0 called
    ``world.gather(["a"])``.

    Every exchange begins with a `barrier`, which finds out who is missing. A barrier has a deadline
    or is `patient`. With a deadline it fails when that is over, and names the ranks that have not
    come. A patient one waits as long as the heartbeats of the missing ranks go on (`Pulse`).
    `collective` guards collectives of torch, which have a timeout of their own.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Join the processes of torch's default group, if there is one. `start` makes it."""
        has_peers = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if has_peers else 0
        self.size = dist.get_world_size() if has_peers else 1
        self.is_main = self.rank == 0
        """True on the process, rank 0, that writes and prints for all."""
        self.timeout_s = timeout_s
        self.progress = 0
        """Counter that rises while this process waits in `barrier`, and with each weight that it
        reads from a file. The watchdog reads it."""
        self._count = 0
        """Number of barriers so far."""
        self._group: Any = None
        # A process alone has no store and no heartbeats: each method returns before it needs them.
        if has_peers:
            # Objects are sent over gloo, whatever backend the gradients use.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            store = distributed_c10d._get_default_store()
            # A process may make several worlds, whose keys must not meet. `_numbers` counts them;
            # every process makes them in the same order, so the number names the same world.
            self._store = dist.PrefixStore(f"agenttrain/{next(_numbers)}", store)
            # Heartbeats are those of a process, in whichever of its worlds another one waits.
            heartbeat_store = dist.PrefixStore("agenttrain", store)
            self._pulse = Pulse(heartbeat_store, rank=self.rank, limit_s=timeout_s)

    @classmethod
    def start(cls, *, timeout_s: float = TIMEOUT_S) -> World:
        """Join torch's process group as the launcher's environment (WORLD_SIZE, RANK, …) says."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            timeout = timedelta(seconds=timeout_s)
            local_rank = int(os.environ.get("LOCAL_RANK", "0"))
            if torch.cuda.is_available():
                for name, value in NCCL.items():
                    os.environ.setdefault(name, value)
                # A scheduler may show each process only its own GPU, which is then number 0.
                device = torch.device("cuda", local_rank % torch.cuda.device_count())
                torch.cuda.set_device(device)
                backend = "cpu:gloo,cuda:nccl"
                dist.init_process_group(backend, timeout=timeout, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=timeout)
        world = cls(timeout_s=timeout_s)
        if world.size > 1:
            world._pulse.start()
        return world

    def gather(
        self, objects: Sequence[Value], what: str = "gather", timeout_s: float | None = None
    ) -> list[Value]:
        """Return the objects of all processes, by rank, in every process. Raises WorldTimeout.

        The sequences are joined. To keep them apart, give a sequence of one item.
        """
        if self.size == 1:
            return list(objects)
        self.barrier(what, timeout_s)
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, list(objects), group=self._group)
        return [item for part in parts for item in part]

    def exchange(
        self,
        objects: Sequence[Value],
        what: str,
        failure: Exception | None = None,
        *,
        patient: bool = False,
    ) -> list[Value]:
        """Gather objects. A process that passes a `failure` raises it, the others PeerFailed.

        An error of one process thus ends the work of all. With `patient` there is no time limit, as
        long as the heartbeats of the others go on (`Pulse`): their own watchdogs judge them.
        """
        limit_s = math.inf if patient else None
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        shares = self.gather([(list(objects), message)], what, limit_s)
        if failure is not None:
            raise failure
        failures = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(shares) if text]
        if failures:
            raise PeerFailed("; ".join(failures))
        return [item for items, _ in shares for item in items]

    @contextmanager
    def together(self, what: str, *kinds: type[Exception], patient: bool = False) -> Iterator[None]:
        """Make the block fail in all processes if it fails in one with an error of these kinds.

        The processes meet at the end of the block. A process with an error then raises it again,
        the others raise PeerFailed. The block itself must not communicate. With `patient` they wait
        there without a time limit, as long as the heartbeats of all go on.

        An error of another kind leaves the block at once: it ends this process, and the others get
        a WorldTimeout.
        """
        failure: Exception | None = None
        try:
            yield
        except kinds as error:
            failure = error
        # Raises the failure, here or as PeerFailed.
        self.exchange((), what, failure, patient=patient)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Name the ranks that are missing when a collective of torch in the block times out.

        The processes start the block together: a barrier raises WorldTimeout, which names ranks
        that do not arrive. With gloo a rank that stops inside the block is named by WorldTimeout
        too. NCCL ends the process instead, so such ranks are printed before that.
        """
        if self.size == 1:
            yield
            return
        self.barrier(what)
        done = threading.Event()
        peers = [rank for rank in range(self.size) if rank != self.rank]

        def warn_of_stopped_ranks() -> None:
            """Print the ranks that have stopped, several times before NCCL ends the process."""
            while not done.wait(self.timeout_s / WARNINGS):
                with suppress(dist.DistError):
                    stopped = self._pulse.find_stopped(peers)
                    if stopped and not done.is_set():
                        print(
                            f"rank {self.rank} waits in {what}: {_ranks(stopped)} stood still",
                            file=sys.stderr,
                            flush=True,
                        )

        if dist.get_backend() != "gloo":  # NCCL raises no error here
            threading.Thread(target=warn_of_stopped_ranks, daemon=True).start()
        try:
            yield
        except RuntimeError as error:
            is_timeout = any(text in str(error) for text in LATE)
            if not is_timeout:
                raise
            stopped = self._pulse.find_stopped(peers)
            finding = f"{_ranks(stopped)} stood still" if stopped else "no rank stands still now"
            raise WorldTimeout(
                f"rank {self.rank} waited {self.timeout_s:g} s for another one in {what}: "
                f"{finding} (distributed.timeout_s)",
                missing=stopped,
            ) from error
        finally:
            done.set()

    def to_main(self, objects: Sequence[Value], what: str = "gather") -> list[Value]:
        """Gather in the main process only. The others get an empty list. Raises WorldTimeout."""
        if self.size == 1:
            return list(objects)
        self.barrier(what)
        parts: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(list(objects), parts, dst=0, group=self._group)
        return [item for part in parts or () for item in part]

    def broadcast(self, value: Value, what: str = "broadcast") -> Value:
        """Return the main process's value in every process. Raises WorldTimeout."""
        if self.size == 1:
            return value
        self.barrier(what)
        box: list[Any] = [value if self.is_main else None]  # torch overwrites its content
        dist.broadcast_object_list(box, src=0, group=self._group)
        received: Value = box[0]
        return received

    def scatter(self, values: Sequence[Value], what: str = "scatter") -> Value:
        """Return the value that the main process passes for this rank. Raises WorldTimeout.

        Example, on rank 1 of 2: ``world.scatter([])`` is ``"b"`` when rank 0 called
        ``world.scatter(["a", "b"])``.
        """
        if self.size == 1:
            return values[0]
        self.barrier(what)
        box: list[Any] = [None]
        dist.scatter_object_list(box, list(values) if self.is_main else None, 0, group=self._group)
        received: Value = box[0]
        return received

    def sum(self, value: float, what: str = "sum") -> float:
        """Return the sum over processes, the same bits in each of them. Raises WorldTimeout."""
        return math.fsum(self.gather([value], what)) if self.size > 1 else value

    def max(self, value: float, what: str = "max") -> float:
        """Return the maximum over processes. Raises WorldTimeout."""
        return max(self.gather([value], what))

    def barrier(self, what: str, timeout_s: float | None = None) -> None:
        """Wait for every process. `what` names the barrier in errors.

        Signals are handled meanwhile. Raises WorldTimeout after `timeout_s` (None: the world's),
        not counting time in which this process itself was stopped. Raises it at once if the process
        that holds the store is gone.
        """
        if self.size == 1:
            return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._count += 1
        number = self._count
        # Keys: rank/<rank> is the rank's last barrier, came/<number> counts the ranks at a barrier,
        # all/<number> exists once all are there.
        try:
            self._store.set(f"rank/{self.rank}", f"{number} {what}")
            is_last = self._store.add(f"came/{number}", 1) == self.size
            if is_last:
                self._store.set(f"all/{number}", "")
                # All have arrived, so no process waits for the previous barrier any more.
                for name in ("came", "all"):
                    self._store.delete_key(f"{name}/{number - 1}")
            # In short waits of the store, between which Python handles signals.
            self._wait(f"all/{number}", what, limit_s)
        except dist.DistStoreError as error:
            # `_wait` reached its limit. Of each missing rank, the barrier that it was last at.
            last_barrier_of = self._missing_ranks()
            ranks = _ranks(last_barrier_of) or "a rank that arrived while this was written"
            raise WorldTimeout(
                f"rank {self.rank} waited {limit_s:g} s for {what}: {ranks} did not come "
                f"({_last_barriers(last_barrier_of)}; distributed.timeout_s)",
                missing=list(last_barrier_of),
            ) from error
        except dist.DistNetworkError as error:
            message = (
                f"rank {self.rank} waited for {what}: the process that holds the store is gone"
            )
            raise WorldTimeout(message, missing=()) from error

    def _wait(self, key: str, what: str, limit_s: float) -> None:
        """Wait until a key of the store exists, in short waits of `WAKE`.

        Raises DistStoreError after `limit_s` seconds: `barrier` makes it a WorldTimeout that names
        all missing ranks. With an infinite limit (`patient`), raises a WorldTimeout itself as soon
        as the heartbeats of missing ranks have stopped. It names these alone.
        """
        waited_s, checked_at = 0.0, time.monotonic()
        while True:
            try:
                self._store.wait([key], WAKE)
                return
            except dist.DistStoreError as error:  # the key does not exist yet
                self.progress += 1  # this process's watchdog reads it: a wait is no standstill
                now = time.monotonic()
                # If there are more than LONGEST_CHECK_S between two checks, this process itself was
                # stopped (SIGSTOP, a suspended machine), which does not count as waiting.
                waited_s += min(now - checked_at, LONGEST_CHECK_S)
                checked_at = now
                if waited_s > limit_s:
                    raise
                if limit_s < math.inf:  # heartbeats matter only without a deadline
                    continue
                last_barrier_of = self._missing_ranks()
                if silent := self._pulse.silent(last_barrier_of):
                    last_barriers = _last_barriers({r: last_barrier_of[r] for r in silent})
                    raise WorldTimeout(
                        f"rank {self.rank} waits for {what}: {_ranks(silent)} showed no life for "
                        f"{self.timeout_s:g} s ({last_barriers}; distributed.timeout_s)",
                        missing=silent,
                    ) from error

    def _missing_ranks(self) -> dict[int, str]:
        """Return the ranks missing from the current barrier, each with its last barrier."""
        missing = {}
        for rank in range(self.size):
            number, name = 0, "the start"
            key = f"rank/{rank}"
            if self._store.check([key]):
                # ``12 the names of broken weights``: the barrier's number and name.
                text, _, name = self._store.get(key).decode().partition(" ")
                number = int(text)
            if number < self._count:
                missing[rank] = name
        return missing


def _last_barriers(last_barrier_of: dict[int, str]) -> str:
    """Return the last barriers of the first four ranks, for a message."""
    first_ranks = list(last_barrier_of.items())[:4]
    return "; ".join(f"rank {rank} was last at {barrier}" for rank, barrier in first_ranks)


def _ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 1``, ``ranks 1, 2``, or an empty text."""
    numbers = [str(rank) for rank in ranks]
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}" if numbers else ""


LONGEST_CHECK_S = 2.0
"""Most time between two checks that counts as waiting. They are about `WAKE` apart: if there is
more, this process itself had been stopped."""
LEAVE_S = 5.0
"""Time limit for the heartbeat thread to end. Only a store that hangs needs more."""


class Pulse:
    """Heartbeats: a process that waits without a deadline notices when another one has died.

    Each process counts up in the store from a thread of its own. The counter stops when the process
    is stopped, when its machine hangs, or when C code never releases the interpreter. There are two
    questions to ask:

    - `silent`: which ranks have not counted for `limit_s`? A `World` that waits without a deadline
      asks it again and again, and each call adds the time since the last one.
    - `find_stopped`: which ranks do not count right now? It is asked once a collective is late, and
      watches for some seconds by itself.
    """

    def __init__(self, store: Any, rank: int, limit_s: float) -> None:
        """Take torch's store. A process whose counter stops for `limit_s` is silent."""
        self._store = store.clone()  # a connection of its own, which no wait blocks
        self._rank, self._limit_s = rank, limit_s
        self._every_s = min(limit_s / 8, 5.0)  # several counts within the limit
        self._counters: dict[int, _Counter] = {}
        self._checked_at = time.monotonic()
        self._ending = threading.Event()

    def start(self) -> None:
        """Start to count in a thread, until the process ends or the store is gone."""

        def count() -> None:
            """Increment this process's counter in the store from time to time."""
            number = 0
            with suppress(dist.DistError):  # without the store no process can wait for this one
                # The first count is written at once.
                while not self._ending.wait(self._every_s if number else 0):
                    number += 1
                    self._store.set(f"alive/{self._rank}", str(number))

        thread = threading.Thread(target=count, name="pulse", daemon=True)
        thread.start()

        def end() -> None:
            self._ending.set()
            thread.join(LEAVE_S)

        # A thread in C++ code at the end of the interpreter would abort the process.
        atexit.register(end)

    def silent(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose counter has not moved for `limit_s`.

        Each rank increments its counter as a heartbeat. Call this method again and again while
        waiting: the time between two calls in which a counter has not moved is added up.

        A difference of clocks would not do. If this process itself is stopped for an hour, all
        counters seem to have stood still. So of the time between two calls at most
        `LONGEST_CHECK_S` counts. A rank that has not started to count is never silent.
        """
        now = time.monotonic()
        elapsed_s = min(now - self._checked_at, LONGEST_CHECK_S)
        self._checked_at = now
        silent = []
        for rank in ranks:
            counter = self._counters.setdefault(rank, _Counter())
            count = self._read_counter(rank)
            if count is not None and count == counter.count:
                counter.idle_s += elapsed_s
            else:
                counter.idle_s = 0.0
            counter.count = count
            if counter.idle_s > self._limit_s:
                silent.append(rank)
        return silent

    def find_stopped(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks whose counter does not move, after watching all for some seconds."""
        counts = {rank: self._read_counter(rank) for rank in ranks}
        time.sleep(3 * self._every_s)  # a live counter moves meanwhile
        return [rank for rank, count in counts.items() if self._read_counter(rank) == count]

    def _read_counter(self, rank: int) -> bytes | None:
        """Return a rank's counter. None: it has not started to count."""
        key = f"alive/{rank}"
        return self._store.get(key) if self._store.check([key]) else None  # `get` would wait


@dataclass(slots=True)
class _Counter:
    """Last value of a rank's heartbeat counter, and the time for which it has not moved."""

    count: bytes | None = None
    idle_s: float = 0.0
