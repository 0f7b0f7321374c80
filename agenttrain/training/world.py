"""The processes of a run, and everything that crosses between them besides gradients.

Every call below is made by all processes or by none, in the same order. Who is late, or gone, is
found out through the key-value store that the processes met at, which needs no device: each writes
down how far it has come, so that those who wait can say whom for.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from agenttrain.training.pulse import LONGEST_LOOK_S, Pulse
from agenttrain.types import AgenttrainError

Value = TypeVar("Value")
WAKE = timedelta(seconds=0.5)
"""How long a wait keeps the interpreter from its signals."""
LATE = ("Timed out waiting", "Watchdog caught collective operation timeout")
"""What gloo and NCCL say of another process that does not come."""
NCCL = {
    # The process ends when a collective times out: computing on would be with wrong numbers.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
    # Which collectives each rank came to: /tmp/nccl_trace_rank_<rank>, read by torchfrtrace.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Environment for NCCL, where it does not say otherwise."""
WARNINGS = 4
"""How often, within the timeout of a collective, ranks that stand still are looked for."""
TIMEOUT_S = 600.0
"""As long as torch's own collectives wait."""


class WorldTimeout(AgenttrainError):
    """Not every process came in time; the message names the missing ones and what for."""

    def __init__(self, message: str, *, missing: Sequence[int]) -> None:
        """`missing` are ranks; empty where the process that holds the store is gone."""
        super().__init__(message)
        self.missing = tuple(missing)


class PeerFailed(AgenttrainError):
    """Another process failed; the message says which one, and how."""


class World:
    """The processes of this run, as this one sees them. A world of one touches nothing.

    Example, on rank 1 of 2: ``world.gather(["b"])`` is ``["a", "b"]`` on both when rank 0 called
    ``world.gather(["a"])``.
    """

    def __init__(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """The processes of torch's default group, where there is one; `start` makes it."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if several else 0
        self.size = dist.get_world_size() if several else 1
        self.timeout_s = timeout_s
        self.looks = 0
        """Rises while this process waits for another one in `barrier`."""
        self._count = 0
        self._group: Any = None
        if several:
            # Objects need no device: a group of their own, whatever the gradients' is.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            store = distributed_c10d._get_default_store()
            self._store = dist.PrefixStore(f"agenttrain/{_next_name()}", store)
            alive = dist.PrefixStore("agenttrain", store)
            self._pulse = Pulse(alive, rank=self.rank, limit_s=timeout_s)

    @classmethod
    def start(cls, *, timeout_s: float = TIMEOUT_S) -> World:
        """Meet the processes that a launcher's environment (WORLD_SIZE, RANK, …) speaks of."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            timeout, rank = timedelta(seconds=timeout_s), int(os.environ.get("LOCAL_RANK", "0"))
            if torch.cuda.is_available():
                for name, value in NCCL.items():
                    os.environ.setdefault(name, value)
                # A scheduler may show each process its own GPU alone, which then is number 0.
                device = torch.device("cuda", rank % torch.cuda.device_count())
                torch.cuda.set_device(device)
                backend = "cpu:gloo,cuda:nccl"
                dist.init_process_group(backend, timeout=timeout, device_id=device)
            else:
                dist.init_process_group("gloo", timeout=timeout)
        world = cls(timeout_s=timeout_s)
        if world.size > 1:
            world._pulse.start()
        return world

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def gather(
        self, objects: Sequence[Value], what: str = "gather", timeout_s: float | None = None
    ) -> list[Value]:
        """Every process's objects, in the order of ranks, on every process.

        Raises WorldTimeout, as `barrier`.
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
        """`gather`, unless a process has failed: it raises its failure, the others PeerFailed.

        So that an error of one, which the others cannot know of, ends the work of all. `patient`:
        for what may take one process as long as it likes, while it shows life (`pulse.py`); whether
        that leads anywhere is its watchdog's business.
        """
        limit_s = math.inf if patient else None
        shares = self.gather([(list(objects), _told(failure))], what, limit_s)
        if failure is not None:
            raise failure
        failed = [f"rank {rank}: {told}" for rank, (_, told) in enumerate(shares) if told]
        if failed:
            raise PeerFailed("; ".join(failed))
        return [item for items, _ in shares for item in items]

    @contextmanager
    def together(self, what: str, *kinds: type[Exception], patient: bool = False) -> Iterator[None]:
        """Within, an error of these kinds of one process is one of all, once all are done.

        Nothing may cross between the processes within; `patient` as of `exchange`.
        """
        failure: Exception | None = None
        try:
            yield
        except kinds as error:
            failure = error
        self.exchange((), what, failure, patient=patient)

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """Within, processes meet in torch's own collectives, whose timeout names nobody.

        They begin together: who does not come is named by WorldTimeout. So is who stands still
        within, where gloo raises; NCCL ends the process instead, so that a line on stderr names
        them before.
        """
        if self.size == 1:
            yield
            return
        self.barrier(what)
        over = threading.Event()
        if dist.get_backend() != "gloo":
            arguments = (what, over)
            threading.Thread(target=self._watch_collective, args=arguments, daemon=True).start()
        try:
            yield
        except RuntimeError as error:
            if not any(late in str(error) for late in LATE):
                raise
            still = self._pulse.still(rank for rank in range(self.size) if rank != self.rank)
            who = f"{_ranks(still)} stood still" if still else "no rank stands still now"
            raise WorldTimeout(
                f"rank {self.rank} waited {self.timeout_s:g} s for another one in {what}: {who} "
                "(distributed.timeout_s)",
                missing=still,
            ) from error
        finally:
            over.set()

    def _watch_collective(self, what: str, over: threading.Event) -> None:
        """Name ranks that stand still, several times within the timeout of a collective."""
        while not over.wait(self.timeout_s / WARNINGS):
            with suppress(dist.DistError):
                still = self._pulse.still(rank for rank in range(self.size) if rank != self.rank)
                if still and not over.is_set():
                    print(
                        f"rank {self.rank} waits in {what}: {_ranks(still)} stood still",
                        file=sys.stderr,
                        flush=True,
                    )

    def to_main(self, objects: Sequence[Value], what: str = "gather") -> list[Value]:
        """As `gather`, on the main process only: the others get nothing. Raises WorldTimeout."""
        if self.size == 1:
            return list(objects)
        self.barrier(what)
        parts: list[Any] | None = [None] * self.size if self.is_main else None
        dist.gather_object(list(objects), parts, dst=0, group=self._group)
        return [item for part in parts or () for item in part]

    def broadcast(self, value: Value, what: str = "broadcast") -> Value:
        """The main process's value, on every process. Raises WorldTimeout."""
        if self.size == 1:
            return value
        self.barrier(what)
        box: list[Any] = [value if self.is_main else None]
        dist.broadcast_object_list(box, src=0, group=self._group)
        received: Value = box[0]
        return received

    def sum(self, value: float, what: str = "sum") -> float:
        """Of every process's value, the same bits on every process. Raises WorldTimeout."""
        return math.fsum(self.gather([value], what)) if self.size > 1 else value

    def min(self, value: float, what: str = "min") -> float:
        """Of every process's value. Raises WorldTimeout."""
        return min(self.gather([value], what))

    def max(self, value: float, what: str = "max") -> float:
        """Of every process's value. Raises WorldTimeout."""
        return max(self.gather([value], what))

    def barrier(self, what: str, timeout_s: float | None = None) -> None:
        """Wait for every process; `what` says for what, in a sentence of WorldTimeout.

        Signals are handled while it waits. Raises WorldTimeout after `timeout_s` (None: the
        world's), not counting time in which this process was stopped, and when the process that
        holds the store is gone.
        """
        if self.size == 1:
            return
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        self._count += 1
        try:
            self._meet(what, limit_s)
        except dist.DistStoreError as error:
            raise self._late(what, limit_s) from error
        except dist.DistNetworkError as error:
            told = f"rank {self.rank} waited for {what}: the process that holds the store is gone"
            raise WorldTimeout(told, missing=()) from error

    def _meet(self, what: str, limit_s: float) -> None:
        number = self._count
        self._store.set(_progress(self.rank), f"{number} {what}")
        if self._store.add(f"came/{number}", 1) == self.size:
            self._store.set(f"all/{number}", "")
            # Everybody is here, so nobody waits for the one before any more.
            for name in ("came", "all"):
                self._store.delete_key(f"{name}/{number - 1}")
        self._wait(f"all/{number}", limit_s)

    def _wait(self, key: str, limit_s: float) -> None:
        waited_s, before = 0.0, time.monotonic()
        while True:
            try:
                self._store.wait([key], WAKE)
                return
            except dist.DistStoreError:
                self.looks += 1
                now = time.monotonic()
                waited_s, before = waited_s + min(now - before, LONGEST_LOOK_S), now
                if waited_s > limit_s:
                    raise
                if limit_s == math.inf:
                    self._check_life()

    def _check_life(self) -> None:
        """Raise WorldTimeout where a process that is waited for stands still."""
        missing = self._missing()
        if silent := self._pulse.silent(missing):
            _, what = self._where(self.rank)
            raise WorldTimeout(
                f"rank {self.rank} waits for {what}: {_ranks(silent)} showed no life for "
                f"{self.timeout_s:g} s ({_last(silent, missing)}; distributed.timeout_s)",
                missing=silent,
            )

    def _late(self, what: str, limit_s: float) -> WorldTimeout:
        missing = self._missing()
        named = _ranks(missing) or "a rank that arrived while this was written"
        return WorldTimeout(
            f"rank {self.rank} waited {limit_s:g} s for {what}: {named} did not come "
            f"({_last(missing, missing)}; distributed.timeout_s)",
            missing=list(missing),
        )

    def _missing(self) -> dict[int, str]:
        """Who has not come to this meeting -> what the last was for that it came to."""
        found = {rank: self._where(rank) for rank in range(self.size)}
        return {rank: what for rank, (number, what) in found.items() if number < self._count}

    def _where(self, rank: int) -> tuple[int, str]:
        """How many meetings a process has come to, and what the last was for."""
        if not self._store.check([_progress(rank)]):
            return 0, "the start"
        number, _, what = self._store.get(_progress(rank)).decode().partition(" ")
        return int(number), what


def _last(ranks: Sequence[int] | dict[int, str], meetings: dict[int, str]) -> str:
    return "; ".join(f"rank {rank} was last at {meetings[rank]}" for rank in list(ranks)[:4])


def _told(failure: Exception | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


_made = 0


def _next_name() -> int:
    """Worlds are made in the same order by every process: their keys must not meet."""
    global _made
    _made += 1
    return _made


def _progress(rank: int) -> str:
    return f"rank/{rank}"


def _ranks(ranks: Iterable[int]) -> str:
    named = [str(rank) for rank in ranks]
    return f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else ""
