"""Health: one server as the fleet sees it, and the task that watches it.

    starting -> syncing -> loaded -> live <-> suspect
        ^                                        |
        '------------ restarting <---------------'  (or gone, without restarts left)

Only a `live` server gets requests: one whose weights were sent and checked.
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
"""Calls that fail one after the other until a server that still runs is killed."""
ARRIVAL_S = 600.0
"""Longest wait for the wrapper of another machine, which is there before the run or comes with it,
and then has `servers.start_s` for its server."""
SILENCES = 4
"""Times servers.dead_s without a sign of life until the wrapper of another machine is given up: a
shared file system may show its record a minute late. A server that hangs is found without it."""
GRACE_S = 0.5
"""Further seconds for an answer that came while this process's event loop was busy training."""

T = TypeVar("T")


class MemberState(StrEnum):
    """State of a server in the fleet."""

    starting = "starting"
    syncing = "syncing"
    """It answers, and has not the current weights."""
    loaded = "loaded"
    """It has the current weights, which are not checked yet."""
    live = "live"
    suspect = "suspect"
    """A request failed; it gets none until it has been examined."""
    restarting = "restarting"
    gone = "gone"
    """It has died, and is not started again."""


EXAMINED = (MemberState.loaded, MemberState.live, MemberState.suspect)
ANSWERING = (MemberState.syncing, MemberState.loaded, MemberState.live, MemberState.suspect)


@dataclass(slots=True)
class Member:
    """One server of the fleet."""

    number: int
    outside: bool = False
    """Somebody else started it: it is neither killed nor started again by the run."""
    order: Path | None = None
    """File that orders its wrapper to kill it, if that is on another machine."""
    unfit: bool = False
    """Another one than the run needs: `reason` says why."""
    answers: bool = False
    """An outside server answered when it was last asked."""
    url: str = ""
    role: str = ""
    """Role of its frozen model; empty: it serves the policy."""
    state: MemberState = MemberState.starting
    boot: int = 0
    """The start that the fleet knows; answers of an earlier one are dropped."""
    pid: int = 0
    record: ServerRecord | None = None
    """That of this start."""
    client: ServerClient | None = None
    initialised: bool = False
    """Its weight transfer was opened."""
    requests: int = 0
    """In flight."""
    sent: int = 0
    """Requests since the metrics were last read."""
    served: int = 0
    """Completions of this run."""
    version: int | None = None
    """Newest weights that were sent to it since its start."""
    deaths: int = 0
    failures: int = 0
    """Calls that failed since the last completion."""
    reason: str = ""
    """Why it was killed, or how it ended."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when this start of the server has ended."""

    def join(self, record: ServerRecord, timeout_s: float) -> None:
        """Take a server that has started."""
        self.state, self.boot, self.pid = MemberState.syncing, record.boot, record.pid
        self.url, self.version, self.record = record.url, None, record
        self.client = ServerClient(record.url, record.token, timeout_s=timeout_s)
        self.initialised, self.failures, self.lost = False, 0, asyncio.Event()

    @property
    def name(self) -> str:
        """Name in messages: ``server 1``, ``judge server 1``, with an outside one's address."""
        role = f"{self.role} " if self.role else ""
        return f"{role}server {self.number}{f' ({self.url})' if self.outside else ''}"

    async def until_lost(self, call: Coroutine[Any, Any, T]) -> T:
        """Return the result of a call of this server; ServerFailed as soon as the server is lost.

        A cancelled call aborts its request at the server.
        """
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
        """Count a failed call; the server gets no request before it has been examined."""
        self.failures += 1
        self.state = MemberState.suspect
        if self.failures >= FAULTS:
            self.kill(f"{FAULTS} calls failed one after the other; the last: {reason}")

    def kill(self, reason: str) -> None:
        """Kill all processes of the server, which its wrapper starts again.

        An outside server is only left alone, until it has been sent the weights anew.
        """
        if self.state in ANSWERING and self.outside:
            self.leave(MemberState.restarting, f"is not used: {reason}")
        elif self.state in ANSWERING and self.order is not None:
            with suppress(OSError):
                self.order.write_text(str(self.boot), encoding="utf-8")
            self.leave(MemberState.restarting, f"is to be killed: {reason}")
        elif self.state in ANSWERING:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self.leave(MemberState.restarting, f"was killed: {reason}")

    def leave(self, state: MemberState, reason: str) -> None:
        """Drop the server's requests: it has ended."""
        if self.state is not MemberState.restarting:
            self.deaths += 1
        what = "it is started again" if state is MemberState.restarting else "it is gone for good"
        if self.outside:
            what = "it is asked again" if state is MemberState.restarting else "it is given up"
        print(f"{self.name} {reason}; {what}", file=sys.stderr, flush=True)
        self.state, self.reason = state, reason
        self.lost.set()

    def give_up(self, servers: StartedServers) -> None:
        """Drop a server of another machine whose wrapper has not come, or has gone."""
        if self.state is MemberState.starting:
            start = f"agenttrain engine-server <run folder> number={self.number}"
            limit = f"within {arrival_s(servers):g} s"
            self.leave(MemberState.gone, f"was not started {limit} on its node ({start})")
        elif self.state is not MemberState.gone:
            self.leave(MemberState.gone, "was ended")

    def close(self, reason: str) -> None:
        """Fail the server's requests: nothing is asked of it any more."""
        self.state, self.reason = MemberState.gone, reason
        self.lost.set()


class Members(Protocol):
    """The fleet, as a watcher sees it."""

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Bring a server that has started up to date."""
        ...

    def changed(self) -> None:
        """Wake what waits for a server, to look again."""
        ...


def arrival_s(servers: StartedServers) -> float:
    """Return the seconds within which the wrapper of another machine writes a record."""
    return min(servers.start_s, ARRIVAL_S)


@dataclass(slots=True)
class SignsOfLife:
    """Signs of life of a wrapper on another machine, by the clock of this one."""

    beat: tuple[str, int, int] | None = None
    """Host, process and beat of the last record; None: there was none."""
    since: float = field(default_factory=time.monotonic)
    """Time at which it was new."""

    def seen(self, record: ServerRecord | None, servers: StartedServers) -> bool:
        """Return False if the wrapper has given none for too long, or has not come."""
        beat = None if record is None else (record.host, record.wrapper, record.beat)
        if beat is not None and beat != self.beat:
            self.beat, self.since = beat, time.monotonic()
        limit_s = arrival_s(servers) if self.beat is None else SILENCES * servers.dead_s
        return time.monotonic() < self.since + limit_s


async def watch(member: Member, fleet: Members, folder: Path, servers: StartedServers) -> None:
    """Follow a server's record and examine it, for ever."""
    signs = SignsOfLife()
    while True:
        record = read_record(folder, member.number)
        if member.order is not None:
            wrapped = signs.seen(record, servers)
            if not wrapped and record is None:
                member.give_up(servers)
        else:
            wrapped = record is not None and record.wrapper_exists
            # Its last words may have come since; a first record that has come since is not
            # examined.
            if record is not None and not wrapped:
                record = read_record(folder, member.number)
        if record is not None:
            await _follow(member, record, fleet, wrapped=wrapped)
            if member.state in EXAMINED:
                await _examine(member, servers.dead_s)
        # Each time: its state may have gone and come back while this task waited for an answer.
        fleet.changed()
        await asyncio.sleep(servers.health_s)


async def _follow(member: Member, record: ServerRecord, fleet: Members, *, wrapped: bool) -> None:
    """Bring the member's state up to its record; `wrapped`: its wrapper runs."""
    if record.condition is Condition.gone or not wrapped:
        if member.state is not MemberState.gone:
            killed = member.state is MemberState.restarting and record.boot == member.boot
            end = record.end or "ended"
            if killed:
                end = f"{end} ({member.reason})"
            recorded = record.condition is Condition.gone
            lost = "lost its wrapper" if member.order is None else "is on a silent machine"
            member.leave(MemberState.gone, end if recorded else lost)
        return
    restarted = record.boot > member.boot
    # A server that was back before anybody asked has died too.
    if member.state in ANSWERING and (restarted or record.condition is Condition.ended):
        member.leave(MemberState.restarting, record.end or "ended")
    if record.condition is Condition.ready and restarted:
        await fleet.joined(member, record)


async def _examine(member: Member, dead_s: float) -> None:
    """Ask the process of a server's engine; kill the server if it does not answer."""
    assert member.client is not None
    boot, question = member.boot, asyncio.create_task(member.client.weight_version())
    try:
        for limit in (dead_s, GRACE_S):
            await asyncio.wait((question,), timeout=limit)
    finally:
        question.cancel()
    if member.boot != boot or member.state not in EXAMINED:
        return
    if not question.done():
        member.kill(f"its engine did not answer for servers.dead_s={dead_s:g} s")
    elif isinstance(question.exception(), ServerFailed):
        if member.state is not MemberState.loaded:  # the check of its weights will show it
            member.fault(f"it does not answer: {question.exception()}")
    else:
        question.result()
        if member.state is MemberState.suspect:
            member.state = MemberState.live
