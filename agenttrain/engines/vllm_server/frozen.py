"""`FrozenFleet`: servers of a model that is not trained, with the weights that they started with.

Health, routing and resending work as for the policy's servers. There are no weight updates: a
server serves as soon as it has started.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.engines.base import EngineDead
from agenttrain.engines.config import StartedServers
from agenttrain.engines.vllm_server.client import ServerClient
from agenttrain.engines.vllm_server.health import Member, MemberState, watch
from agenttrain.engines.vllm_server.routing import choose
from agenttrain.engines.vllm_server.server_records import ServerRecord
from agenttrain.engines.vllm_server.status import StatusFile
from agenttrain.engines.vllm_server.watched import WatchedServers

T = TypeVar("T")


class RoleLost(EngineDead):
    """No server of a role is left."""


class FrozenFleet(WatchedServers):
    """Servers of a model that is not trained and has a role in the run: a judge, user or teacher.

    Their weights are frozen: a server that answers is `live`. `WatchedServers` watches them, picks
    a server for each request, and sends it to another one if the server fails. Several processes
    may use the servers: the others start them, and this one reads their records.
    """

    def __init__(self, folder: Path, role: str, servers: StartedServers) -> None:
        """Start watching the servers, whose records are in `folder`.

        Call it in the event loop that sends the requests.
        """
        members = [Member(number, role=role) for number in range(servers.count)]
        super().__init__(members, folder, StatusFile(folder, per_process=True))
        self._role, self._servers = role, servers
        self._watch(watch(member, self, folder, servers) for member in members)

    async def send(self, session: str, call: Callable[[ServerClient], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a call of any server. Raises EngineError and RoleLost."""

        async def send_to(member: Member) -> T:
            assert member.client is not None
            try:
                return await member.until_lost(call(member.client))
            finally:
                self._status.write(self.members)  # the number of its requests has changed

        return await self._call(session, send_to, name=f"role:{self._role}")  # name in errors

    async def _pick(self, session: str) -> Member:
        while True:
            loads = {m.number: m.requests for m in self.members if m.state is MemberState.live}
            if loads:
                return self.members[choose(session, loads)]
            await self._wait()

    def _loss_error(self, text: str) -> RoleLost:
        return RoleLost(f"roles.{self._role}: {text}")

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Implement `Members.joined`: the server has its weights."""
        await member.join(record, self._servers.request_s)
        member.state = MemberState.live

    async def aclose(self) -> None:
        """Stop watching the servers, which go on. Requests in flight fail."""
        await self._close(self.members, "its client was closed")
