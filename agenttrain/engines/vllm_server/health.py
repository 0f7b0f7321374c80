"""Health: one server as the fleet sees it, and the task that watches it.

    starting -> syncing -> loaded -> live <-> suspect
                   ^                             |
                   '-------- restarting <--------'  (or gone, without restarts left)

Only a `live` server gets requests: its weights were sent and checked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agenttrain.engines.config import StartedServers
from agenttrain.engines.vllm_server.client import ServerClient, ServerFailed
from agenttrain.engines.vllm_server.server_records import Condition, ServerRecord, read_record

FAULTS = 3
"""Failed calls in a row after which a server that still runs is killed."""
ARRIVAL_S = 600.0
"""Longest wait for the first record of a wrapper on another machine. It starts before the run or
with it. Afterwards it has `servers.start_s` for its server."""
SILENCES = 4
"""A wrapper on another machine is given up after this many times servers.dead_s without heartbeat.
A shared file system may show its record a minute late. A server that hangs is noticed earlier, as
it does not answer."""
GRACE_S = 0.5
"""Seconds beyond the limit for an answer that came while this process's event loop was busy."""

T = TypeVar("T")


class MemberState(StrEnum):
    """State of a server in the fleet."""

    starting = "starting"
    syncing = "syncing"
    """It answers, but does not have the current weights."""
    loaded = "loaded"
    """It has the current weights, which are not checked yet."""
    live = "live"
    """Its weights are checked: it gets requests."""
    suspect = "suspect"
    """A request failed. It gets no further one until it has been examined."""
    restarting = "restarting"
    """It has died, or was killed, and is started again. An outside one is asked again."""
    gone = "gone"
    """It has died, and is not started again."""


EXAMINED = (MemberState.loaded, MemberState.live, MemberState.suspect)
"""States with the current weights, in which a server is asked again and again if it answers."""
ANSWERING = (MemberState.syncing, *EXAMINED)
"""States of a server that runs. While it loads weights it need not answer examinations."""


@dataclass(slots=True)
class Member:
    """One server, as the process that sends it requests sees it.

    A watcher (`watch`, or `watch_outside` for outside servers) keeps its state up to date. A server
    that the run starts has a wrapper, the process that starts it again after its death.
    """

    number: int
    outside: bool = False
    """Somebody else started it: it is neither killed nor started again by the run."""
    kill_order: Path | None = None
    """File by which a wrapper on another machine is ordered to kill it. None: it is on this
    machine, or it is an outside one."""
    unfit: bool = False
    """An outside server does not have what the run needs: `reason` says what."""
    answers: bool = False
    """An outside server answered when it was last asked."""
    url: str = ""
    role: str = ""
    """Role of its frozen model; empty: it serves the policy."""
    state: MemberState = MemberState.starting
    boot: int = 0
    """Number of its start. Answers of an earlier start are dropped."""
    pid: int = 0
    """Id of its process, and of the process group that ends with it."""
    record: ServerRecord | None = None
    """Record of this start."""
    client: ServerClient | None = None
    initialised: bool = False
    """Its weight transfer was initialised."""
    requests: int = 0
    """Requests in flight."""
    sent: int = 0
    """Requests since the metrics were last read. The fleet counts them."""
    served: int = 0
    """Requests that it has answered in this run. The fleet counts them."""
    version: int | None = None
    """Newest weights that it got since its start."""
    deaths: int = 0
    """Deaths since the metrics were last read."""
    failures: int = 0
    """Failed calls since the last completion."""
    reason: str = ""
    """Why it was killed, or how it ended."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this start of the server has ended."""

    async def join(self, record: ServerRecord, timeout_s: float) -> None:
        """Take over the record of a server that has started, with a new client."""
        if self.client is not None:
            await self.client.aclose()
        self.state, self.boot, self.pid = MemberState.syncing, record.boot, record.pid
        self.url, self.version, self.record = record.url, None, record
        self.client = ServerClient(record.url, record.token, timeout_s=timeout_s)
        self.initialised, self.failures, self.lost = False, 0, asyncio.Event()

    @property
    def has_remote_wrapper(self) -> bool:
        """True if the server's wrapper is on another machine: no signal reaches it."""
        return self.kill_order is not None

    @property
    def name(self) -> str:
        """Name in messages: ``server 1``, ``judge server 1``, with an outside one's address."""
        role = f"{self.role} " if self.role else ""
        return f"{role}server {self.number}{f' ({self.url})' if self.outside else ''}"

    async def until_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call. Raises ServerFailed as soon as the server is lost."""
        answer = asyncio.create_task(call)
        lost = asyncio.create_task(self.lost.wait())
        self.requests += 1
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ServerFailed(f"{self.name} died: {self.reason}")
            return answer.result()
        finally:
            self.requests -= 1
            for task in (answer, lost):
                task.cancel()

    def fault(self, reason: str) -> None:
        """Count a failed call. The server gets no request until it has been examined."""
        self.failures += 1
        self.state = MemberState.suspect
        if self.failures >= FAULTS:
            self.kill(f"{FAULTS} calls failed one after the other; the last: {reason}")

    def kill(self, reason: str) -> None:
        """Kill all processes of the server, which its wrapper starts again.

        An outside server is not killed. It is `restarting` until its watcher has it join again: it
        gets no requests before it has got the weights again.
        """
        if self.state not in ANSWERING:  # it is dead, or being killed, already
            return
        if self.outside:
            self.leave(MemberState.restarting, f"is not used: {reason}")
        elif self.kill_order is not None:  # the wrapper is on another machine
            with suppress(OSError):
                self.kill_order.write_text(str(self.boot), encoding="utf-8")
            self.leave(MemberState.restarting, f"is to be killed: {reason}")
        else:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.leave(MemberState.restarting, f"was killed: {reason}")

    def leave(self, state: MemberState, reason: str) -> None:
        """Enter the state `restarting` or `gone`. Fail the requests, count and print the death."""
        if self.state is not MemberState.restarting:  # else the death has been counted
            self.deaths += 1
        comes_back = state is MemberState.restarting
        if self.outside:
            consequence = "it is asked again" if comes_back else "it is given up"
        else:
            consequence = "it is started again" if comes_back else "it is gone for good"
        print(f"{self.name} {reason}; {consequence}", file=sys.stderr, flush=True)
        self.state, self.reason = state, reason
        self.lost.set()

    def give_up(self, servers: StartedServers) -> None:
        """Drop a server whose remote wrapper has no record: it never came, or has ended."""
        if self.state is MemberState.starting:
            start = f"agenttrain engine-server <run folder> number={self.number}"
            limit = f"within {arrival_s(servers):g} s"
            self.leave(MemberState.gone, f"was not started {limit} on its node ({start})")
        elif self.state is not MemberState.gone:
            self.leave(MemberState.gone, "was ended")

    def close(self, reason: str) -> None:
        """Fail the server's requests, and send no more. The server goes on: it has not died."""
        self.state, self.reason = MemberState.gone, reason
        self.lost.set()


class Members(Protocol):
    """The fleet, as a watcher sees it."""

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Add a server that has started, and send it the current weights."""

    def changed(self) -> None:
        """Wake the tasks that wait for a server, after any change of state."""


def arrival_s(servers: StartedServers) -> float:
    """Return the seconds within which a wrapper on another machine has to write a record."""
    return min(servers.start_s, ARRIVAL_S)


@dataclass(slots=True)
class Heartbeat:
    """Heartbeat of a wrapper on another machine, timed by this machine's clock."""

    beat: tuple[str, int, int] | None = None
    """Host, wrapper's process and beat number of the last record. None: there was no record."""
    since: float = field(default_factory=time.monotonic)
    """Time at which that beat was first read."""

    def is_alive(self, record: ServerRecord | None, servers: StartedServers) -> bool:
        """Return False if the wrapper has been silent for too long, or has not started in time."""
        beat = None if record is None else (record.host, record.wrapper, record.beat)
        if beat is not None and beat != self.beat:
            self.beat, self.since = beat, time.monotonic()
        limit_s = arrival_s(servers) if self.beat is None else SILENCES * servers.dead_s
        return time.monotonic() < self.since + limit_s


async def watch(member: Member, fleet: Members, folder: Path, servers: StartedServers) -> None:
    """Keep a member up to date with its server's record and health, until it is cancelled.

    The server's wrapper is the process that starts it, and starts it again after its death. It
    writes each change to the server's record.
    """
    heartbeat = Heartbeat()
    while True:
        record = read_record(folder, member.number)
        if member.has_remote_wrapper:
            # On another machine: it runs while the record shows its heartbeats.
            wrapper_runs = heartbeat.is_alive(record, servers)
            if not wrapper_runs and record is None:  # else `_follow` reads there how it ended
                member.give_up(servers)
        else:
            wrapper_runs = record is not None and record.wrapper_exists
            # It may have ended just after this task read its record: read what it wrote last.
            # A remote one has been silent for minutes, so its record is up to date.
            if record is not None and not wrapper_runs:
                record = read_record(folder, member.number)
        if record is not None:
            await _follow(member, record, fleet, wrapper_runs=wrapper_runs)
            if member.state in EXAMINED:  # it has the current weights
                await _examine(member, servers.dead_s)
        # Always: the state may have changed and changed back while this task waited for an answer.
        fleet.changed()
        await asyncio.sleep(servers.health_s)


async def _follow(
    member: Member, record: ServerRecord, fleet: Members, *, wrapper_runs: bool
) -> None:
    """Bring the member's state up to date with its record: gone, died, or started again.

    `wrapper_runs`: the server's wrapper still runs. Without it nobody starts the server again.
    """
    if record.condition is Condition.gone or not wrapper_runs:
        if member.state is not MemberState.gone:
            member.leave(MemberState.gone, _describe_end(member, record))
        return
    is_new_start = record.boot > member.boot
    # A server may have died and answered again since its record was last read.
    if member.state in ANSWERING and (is_new_start or record.condition is Condition.ended):
        member.leave(MemberState.restarting, record.end or "ended")
    if record.condition is Condition.ready and is_new_start:
        await fleet.joined(member, record)


def _describe_end(member: Member, record: ServerRecord) -> str:
    """Return why a server is gone: how it ended, or that its wrapper is missing."""
    if record.condition is not Condition.gone:
        return "is on a silent machine" if member.has_remote_wrapper else "lost its wrapper"
    reason = record.end or "ended"
    # This process has killed the start that ended: `member.reason` says why.
    was_killed = member.state is MemberState.restarting and record.boot == member.boot
    return f"{reason} ({member.reason})" if was_killed else reason


async def _examine(member: Member, dead_s: float) -> None:
    """Ask a server for its weights' version, which only its engine's process can answer.

    A server that is silent is killed. One that answers with an error becomes `suspect`, gets no
    requests, and is killed after `FAULTS` errors in a row. A suspect one that answers is trusted
    again.
    """
    assert member.client is not None
    boot = member.boot  # number of the start that is examined
    call = asyncio.create_task(member.client.weight_version())
    try:
        await asyncio.wait((call,), timeout=dead_s)
        # If this event loop was blocked meanwhile, an answer may have come in time and still not be
        # read. This returns at once if it was.
        await asyncio.wait((call,), timeout=GRACE_S)
        has_answered = call.done()
    finally:
        call.cancel()  # no effect on a call that is done
    if member.boot != boot or member.state not in EXAMINED:  # that start has ended meanwhile
        return
    if not has_answered:
        member.kill(f"its engine did not answer for servers.dead_s={dead_s:g} s")
    elif isinstance(call.exception(), ServerFailed):
        if member.state is not MemberState.loaded:  # else the check of its weights will fail too
            member.fault(f"it does not answer: {call.exception()}")
    else:
        call.result()  # raises any other error
        if member.state is MemberState.suspect:
            member.state = MemberState.live
