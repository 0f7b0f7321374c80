"""`BroadcastFleet`: servers that get their weights together, from the trainer's GPU.

There are no files from which a server could load weights by itself. A server that was started again
stays `syncing` until the next weight sync, and then joins the new group.
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
"""Broadcasts of one version, one after the other, that may reach no server."""


class BroadcastFleet(Fleet):
    """A `Fleet` whose weights come by a broadcast.

    For each version the trainer calls `assemble`, sends the weights to the servers of the returned
    audience, and calls `settle` with the result, until one server has them. Then `verify` follows,
    which checks them by a text, the probe.

    A server that answers is `syncing` until it has the current weights, `loaded` until they are
    checked, and `live` then. One that is started again is `syncing` until the next weight sync.
    While no server has the current weights, `generate` may wait in vain: see `_check_stranded`.
    """

    def __init__(
        self,
        folder: Path,
        servers: ServersConfig,
        mode: WeightSyncMode,
        outside: Outside | None = None,
        *,
        ahead: bool = False,
        record_routes: bool = False,
    ) -> None:
        """`ahead`: rollouts run during training, so a wait for weights may end with a weight sync.

        Otherwise the trainer waits for the rollouts, and no weight sync can come. The other
        arguments are those of `Fleet`.
        """
        super().__init__(folder, servers, mode, outside, record_routes=record_routes)
        self._patience_s = servers.request_s if ahead else 0.0
        """Seconds to wait for a weight sync when no server has the current weights. Then requests
        fail with FleetLost."""
        # Without rollouts ahead no request is in flight during a sync, so that a server pauses at
        # once. If it has not within the time of a broadcast, it hangs.
        self._pause_s = servers.request_s if ahead else min(servers.request_s, BROADCAST_S)
        """Seconds that a server has to end or hold its requests before a broadcast."""
        self._stranded_since: float | None = None
        """Time since which no server has the current weights. None: one has."""
        self._is_broadcasting = False
        """True between `assemble`, which chooses the servers of a broadcast, and the `settle` after
        which a server has the weights."""
        self._attempts = 0
        """Broadcasts of this version that have reached no server."""

    async def assemble(self, version: int) -> Audience:
        """Choose the servers that get version `version`, and return them: `Broadcasts.assemble`.

        Waits until a server answers. Raises FleetLost if none is left.
        """
        await self._await_start()
        self._probe = None  # `verify` sets it once the new weights have passed
        self._is_broadcasting = True
        # `Versions` takes files, but only their version counts here: nothing is read from disk.
        self._versions.add(WeightFiles(folder=self._folder, version=version, digest=""))
        while not (members := [member for member in self.members if member.state in ANSWERING]):
            # Not `self._wait`, which raises if only a weight sync would help: this is one.
            await super()._wait()
        for member in members:
            member.state = MemberState.syncing
        self.changed()
        records = [member.record for member in members if member.record is not None]
        return Audience(
            version=version,
            receivers=tuple(
                Receiver(
                    number=record.number,
                    boot=record.boot,
                    url=record.url,
                    token=record.token,
                    workers=record.world_size,
                )
                for record in records
            ),
            mode=self._mode,
            pause_s=self._pause_s,
        )

    async def settle(self, result: BroadcastResult) -> bool:
        """Take the result of a broadcast: let servers with the weights go on, kill the others.

        Implements `Broadcasts.settle`: return False if no server has the weights, so that they have
        to be sent again. Raises FleetLost after too many such broadcasts.
        """
        for receipt in result.receipts:
            member = self.members[receipt.number]
            # `assemble` has made it `syncing`. In another state, or with another number of its
            # start (`boot`), it has died since.
            has_died = member.boot != receipt.boot or member.state is not MemberState.syncing
            if has_died:
                continue
            if receipt.problem is not None:
                member.kill(f"weight update {result.version}: {receipt.problem}")
            elif member.client is not None:
                member.state, member.version = MemberState.loaded, result.version
                member.client.paused_s = receipt.paused_s
        has_arrived = any(member.state is MemberState.loaded for member in self.members)
        self._attempts = 0 if has_arrived else self._attempts + 1
        if self._attempts == ATTEMPTS:
            texts = [f"{member.name}: {member.reason or member.state}" for member in self.members]
            raise FleetLost(
                f"weight_sync.transport=nccl: {ATTEMPTS} broadcasts of weight update "
                f"{result.version} have reached no server; can the GPUs of the trainer and of the "
                "servers reach each other? weight_sync.transport=files goes another way\n"
                + "\n".join(texts)
            )
        # If no server has the weights, the caller assembles another broadcast at once.
        self._is_broadcasting = not has_arrived
        self._stranded_since = None  # requests wait for the weights from now on
        self.changed()
        # With the first weights, before any `verify`, enough outside servers have to be usable.
        if has_arrived and self._outside is not None and not self._verified:
            self._check_count(MemberState.loaded)
        return has_arrived

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Add a server that has started to the next audience."""
        await member.join(record, self._servers.request_s)

    async def _wait(self) -> None:
        """Wait for a change of a server's state. Raises FleetLost if none can help."""
        self._check_stranded()
        await super()._wait()

    def _check_stranded(self) -> None:
        """Raise FleetLost if no server has the current weights, and no weight sync brings them.

        A weight sync may come while rollouts run ahead of the trainer: `_patience_s` is the longest
        wait for it. None comes between the end of a broadcast and that of `verify`: the trainer
        itself waits for `verify`.
        """
        states = {member.state for member in self.members}
        # Servers in a state of EXAMINED have the weights. If all are gone, `super()._wait` raises.
        is_stranded = not states & {*EXAMINED} and states != {MemberState.gone}
        if self._versions.newest is None or not is_stranded:
            self._stranded_since = None
            return
        self._stranded_since = self._stranded_since or time.monotonic()
        # `assemble` resets the probe, and `verify` sets it once the weights have passed.
        is_before_verify = self._probe is None and not self._is_broadcasting
        patience_s = 0.0 if is_before_verify else self._patience_s
        if time.monotonic() - self._stranded_since >= patience_s:
            texts = [f"{member.name}: {member.state} {member.reason}" for member in self.members]
            raise FleetLost(
                "weight_sync.transport=nccl: no server has the policy's weights; one that was "
                "started again gets them at the next weight sync. Resume the run, with more "
                "servers (servers.count), or with weight_sync.transport=files\n" + "\n".join(texts)
            )
