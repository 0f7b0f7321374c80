"""`BroadcastFleet`: servers that get their weights all at once, from the trainer's GPU.

Nothing is kept that a server could load on its own. One that was started again waits in the state
`syncing` for the next weight sync, and then joins the new group.
"""

from __future__ import annotations

import time
from pathlib import Path

from agenttrain.engines.broadcast import Audience, BroadcastResult, Receiver
from agenttrain.engines.config import ServersConfig
from agenttrain.engines.vllm_server.fleet import Fleet, FleetLost
from agenttrain.engines.vllm_server.health import ANSWERING, EXAMINED, Member, MemberState
from agenttrain.engines.vllm_server.nccl_transport import BROADCAST_S
from agenttrain.engines.vllm_server.outside import Outside
from agenttrain.engines.vllm_server.server_records import ServerRecord
from agenttrain.engines.weight_files import WeightFiles
from agenttrain.training.config import WeightSyncMode

ATTEMPTS = 8
"""Broadcasts of one version that may reach nobody."""


class BroadcastFleet(Fleet):
    """A `Fleet` whose weights come by a broadcast."""

    def __init__(
        self,
        folder: Path,
        servers: ServersConfig,
        mode: WeightSyncMode,
        outside: Outside | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        """`ahead`: rollouts go on while the trainer works, so that a weight sync may still come
        where no server has weights."""
        super().__init__(folder, servers, mode, outside)
        self._patience_s = servers.request_s if ahead else 0.0
        # Without rollouts ahead no request is in flight that a pause would wait for.
        self._pause_s = servers.request_s if ahead else min(servers.request_s, BROADCAST_S)
        self._stranded: float | None = None
        """Time since which no server has the current weights."""
        self._assembled = False
        """A broadcast goes on."""
        self._attempts = 0
        """Broadcasts of this version that have reached nobody."""

    async def assemble(self, version: int) -> Audience:
        """Implement `Broadcasts.assemble`; raises FleetLost."""
        await self._started()
        self._probe, self._assembled = None, True
        # There are no files: only the version counts.
        self._versions.add(WeightFiles(folder=self._folder, version=version, digest=""))
        while not (able := [one for one in self.members if one.state in ANSWERING]):
            await super()._wait()
        for member in able:
            member.state = MemberState.syncing
        self.changed()
        receivers = [one.record for one in able if one.record is not None]
        return Audience(
            version=version,
            receivers=tuple(
                Receiver(
                    number=one.number,
                    boot=one.boot,
                    url=one.url,
                    token=one.token,
                    workers=one.world_size,
                )
                for one in receivers
            ),
            mode=self._mode,
            pause_s=self._pause_s,
        )

    async def settle(self, result: BroadcastResult) -> bool:
        """Implement `Broadcasts.settle`.

        Raises FleetLost if outside servers are too few, and after too many attempts.
        """
        for receipt in result.receipts:
            member = self.members[receipt.number]
            if member.boot != receipt.boot or member.state is not MemberState.syncing:
                continue
            if receipt.problem is not None:
                member.kill(f"weight update {result.version}: {receipt.problem}")
            elif member.client is not None:
                member.state, member.version = MemberState.loaded, result.version
                member.client.paused_s = receipt.paused_s
        arrived = any(one.state is MemberState.loaded for one in self.members)
        self._attempts = 0 if arrived else self._attempts + 1
        if self._attempts == ATTEMPTS:
            texts = [f"{one.name}: {one.reason or one.state}" for one in self.members]
            raise FleetLost(
                f"weight_sync.transport=nccl: {ATTEMPTS} broadcasts of weight update "
                f"{result.version} have reached no server; can the GPUs of the trainer and of the "
                "servers reach each other? weight_sync.transport=files goes another way\n"
                + "\n".join(texts)
            )
        self._stranded, self._assembled = None, not arrived
        self.changed()
        if arrived and self._outside is not None and not self._verified:
            self._check_count(MemberState.loaded)
        return arrived

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Take a server that has started; it is in the next audience."""
        if member.client is not None:
            await member.client.aclose()
        member.join(record, self._servers.request_s)

    async def _wait(self) -> None:
        """Wait for a change; raises FleetLost if only a weight sync could help, and none comes."""
        states = {one.state for one in self.members}
        if self._versions.newest is None or states & {*EXAMINED} or states == {MemberState.gone}:
            self._stranded = None
        else:
            self._stranded = self._stranded or time.monotonic()
            # Weights that have arrived are compared next, and no others come before that.
            comparing = self._probe is None and not self._assembled
            patience_s = 0.0 if comparing else self._patience_s
            if time.monotonic() - self._stranded >= patience_s:
                texts = [f"{one.name}: {one.state} {one.reason}" for one in self.members]
                raise FleetLost(
                    "weight_sync.transport=nccl: no server has the policy's weights; one that was "
                    "started again gets them at the next weight sync. Resume the run, with more "
                    "servers (servers.count), or with weight_sync.transport=files\n"
                    + "\n".join(texts)
                )
        await super()._wait()
