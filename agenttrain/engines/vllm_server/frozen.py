"""`FrozenFleet`: servers of a model that is not trained, with the weights that they started with.

Membership, health, routing and sending again are as for the policy's servers, without updates: a
server that has started serves at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.config import StartedServers
from agenttrain.engines.vllm_server.client import ServerClient, ServerFailed
from agenttrain.engines.vllm_server.health import Member, MemberState, watch
from agenttrain.engines.vllm_server.records import ServerRecord, last_lines, log_path
from agenttrain.engines.vllm_server.routing import choose
from agenttrain.engines.vllm_server.status import StatusFile

SENDS = 5
"""Servers that a request may kill, or see die, before it counts as the cause."""
T = TypeVar("T")


class RoleLost(EngineDead):
    """No server of a role is left."""


class FrozenFleet:
    """The servers of a role, whose folder has their records; several processes may have one."""

    def __init__(self, folder: Path, role: str, servers: StartedServers) -> None:
        """Begin to watch the servers; call it in the event loop that sends the requests."""
        self.members = [Member(number, role=role) for number in range(servers.count)]
        self._folder, self._role, self._servers = folder, role, servers
        self._change = asyncio.Event()
        self._status = StatusFile(folder, own=True)
        self._watchers = [
            asyncio.create_task(watch(member, self, folder, servers)) for member in self.members
        ]
        for watcher in self._watchers:
            watcher.add_done_callback(lambda _: self.changed())

    async def send(self, session: str, call: Callable[[ServerClient], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a call of a server; wait until there is one.

        Requests of one session go to one server while it lives. Raises EngineError for a request
        that servers refuse or die of, RoleLost.
        """
        error: ServerFailed | None = None
        for _ in range(SENDS):
            member = await self._pick(session)
            boot = member.boot
            assert member.client is not None
            member.sent += 1
            try:
                result = await member.until_lost(call(member.client))
            except ServerFailed as failed:
                error = failed
                # Requests that fail together are one fault: only the first meets a live server.
                if member.boot == boot and member.state is MemberState.live:
                    member.fault(str(failed))
            else:
                member.failures = 0
                member.served += 1
                return result
            finally:
                self._status.write(self.members)
        raise EngineError(
            f"role:{self._role}: {SENDS} servers one after the other failed at a request; the "
            f"last: {error}"
        )

    async def _pick(self, session: str) -> Member:
        while True:
            loads = {m.number: m.requests for m in self.members if m.state is MemberState.live}
            if loads:
                return self.members[choose(session, loads)]
            if all(member.state is MemberState.gone for member in self.members):
                raise RoleLost(f"roles.{self._role}: no server is left: {self._ends()}")
            for watcher in self._watchers:
                if watcher.done():  # only a bug ends it
                    watcher.result()
            await self._change.wait()

    def _ends(self) -> str:
        return "\n".join(
            f"{member.name} {member.reason}; the end of {log_path(self._folder, member.number)}:\n"
            f"{last_lines(self._folder, member.number)}"
            for member in self.members
        )

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Implement `Members.joined`: the server has its weights."""
        if member.client is not None:
            await member.client.aclose()
        member.join(record, self._servers.request_s)
        member.state = MemberState.live

    def changed(self) -> None:
        """Implement `Members.changed`: wake all that wait for a server."""
        self._change.set()
        self._change = asyncio.Event()
        self._status.write(self.members)

    async def aclose(self) -> None:
        """Stop watching; requests in flight fail, and the servers go on."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._status.write(self.members, ended=True)
        for member in self.members:
            member.close("its client was closed")
            if member.client is not None:
                await member.client.aclose()
        self._change.set()
