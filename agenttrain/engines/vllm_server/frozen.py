"""`FrozenFleet`: servers of a model that is not trained, with the weights that they started with.

Membership, health, routing and sending again are as for the policy's servers, without updates: a
server that has started serves at once.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.config import StartedServers
from agenttrain.engines.vllm_server.client import ServerClient, ServerFailed
from agenttrain.engines.vllm_server.health import Member, MemberState, watch
from agenttrain.engines.vllm_server.routing import choose
from agenttrain.engines.vllm_server.server_records import ServerRecord
from agenttrain.engines.vllm_server.status import StatusFile
from agenttrain.engines.vllm_server.watched import SENDS, WatchedServers

T = TypeVar("T")


class RoleLost(EngineDead):
    """No server of a role is left."""


class FrozenFleet(WatchedServers):
    """The servers of a role, whose folder has their records; several processes may have one."""

    def __init__(self, folder: Path, role: str, servers: StartedServers) -> None:
        """Begin to watch the servers; call it in the event loop that sends the requests."""
        members = [Member(number, role=role) for number in range(servers.count)]
        super().__init__(members, folder, StatusFile(folder, own=True))
        self._role, self._servers = role, servers
        self._watch(watch(member, self, folder, servers) for member in members)

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
            await self._wait()

    def _lost(self, text: str) -> RoleLost:
        return RoleLost(f"roles.{self._role}: {text}")

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Implement `Members.joined`: the server has its weights."""
        if member.client is not None:
            await member.client.aclose()
        member.join(record, self._servers.request_s)
        member.state = MemberState.live

    async def aclose(self) -> None:
        """Stop watching; requests in flight fail, and the servers go on."""
        await self._close(self.members, "its client was closed")
