"""`Fleet`: the servers of a run as one: who is in it, who gets a request, who has which weights.

A request whose server dies is sent to another one, with the same ids and the same seed: sampling
noise depends on nothing else, and tokens of an unfinished request were never seen by anybody.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.vllm_server.client import ServerFailed
from agenttrain.engines.vllm_server.health import ANSWERING, Member, MemberState, watch
from agenttrain.engines.vllm_server.outside import ROUTER, Front, Outside, watch_outside
from agenttrain.engines.vllm_server.routing import choose
from agenttrain.engines.vllm_server.server_records import (
    ServerRecord,
    order_path,
    update_path,
    write_private,
)
from agenttrain.engines.vllm_server.status import StatusFile
from agenttrain.engines.vllm_server.versions import ADAPTERS, Versions
from agenttrain.engines.vllm_server.watched import SENDS, StartProgress, WatchedServers
from agenttrain.engines.weight_files import WeightFiles
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion

Problem = Callable[[Sequence[float]], str | None]
"""Says what is wrong with a server's log-probabilities of the probe; None: nothing."""


class FleetLost(EngineDead):
    """No server is left."""


class Fleet(WatchedServers):
    """The servers of the run in `folder`: those that their wrappers start, or outside ones."""

    def __init__(
        self,
        folder: Path,
        servers: ServersConfig,
        mode: WeightSyncMode,
        outside: Outside | None = None,
        adapters: int = ADAPTERS,
    ) -> None:
        urls = outside.urls if outside is not None else ("",) * servers.count
        members = [
            Member(
                number,
                outside=outside is not None,
                url=url,
                order=order_path(folder, number) if servers.nodes else None,
            )
            for number, url in enumerate(urls)
        ]
        super().__init__(members, folder, StatusFile(folder))
        self.resent = 0
        """Requests that were sent again since the metrics were last read."""
        self._servers, self._mode = servers, mode
        self._outside = outside
        self._front: Front | None = None
        if outside is not None and outside.router is not None:
            self._front = Front(outside.router, outside.token, servers)
        self._versions = Versions(adapters=adapters)
        self._probe: tuple[Sequence[int], Problem] | None = None
        """Check of the current weights; None until `verify` has passed."""
        self._verified = False
        """Weights have been verified before."""
        self._syncing = asyncio.Lock()
        self._numbers = itertools.count()
        self._salt = secrets.token_hex(4)
        """Keeps this run's entries of an outside server's prefix cache apart from another run's."""
        self._servers_of: dict[str, int] = {}
        """Server of each session's last request."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """Sample from a server with the current weights; wait until there is one.

        Raises EngineError for a request that servers refuse or die of, FleetLost.
        """
        error: ServerFailed | None = None
        sends = 0
        first_failure = 0.0
        while sends < SENDS or self._front_may_recover(first_failure):
            member = await self._pick(session)
            boot = member.boot
            self._servers_of[session] = member.number
            member.sent += 1
            self.resent += error is not None
            sends += 1
            try:
                completion = await self._ask(member, token_ids, sampling, session)
            except ServerFailed as failed:
                error = failed
                first_failure = first_failure or time.monotonic()
                # Requests that fail together are one fault: only the first meets a live server.
                if member.boot == boot and member.state is MemberState.live:
                    member.fault(str(failed))
                elif self._front is not None:
                    await asyncio.sleep(self._servers.health_s)
            else:
                member.failures = 0
                member.served += 1
                return completion
        raise EngineError(
            f"session={session!r}: {sends} servers one after the other failed at this request of "
            f"{len(token_ids)} ids; the last: {error}"
        )

    def _front_may_recover(self, first_failure: float) -> bool:
        """Return True while a router may not have noticed yet that a server of it is gone."""
        waited = time.monotonic() - first_failure
        return self._front is not None and waited < 2 * self._servers.dead_s

    def release(self, session: str) -> None:
        """End a session: the adapters that it began with may go."""
        self._versions.release(session)
        self._servers_of.pop(session, None)

    def server_of(self, session: str) -> int | None:
        """Return the server of a session's last request; a router does not say."""
        number = self._servers_of.get(session)
        return None if number == ROUTER else number

    async def _pick(self, session: str) -> Member:
        """Return the server for a request; wait until there is one."""
        while True:
            # Before the first verification nothing is trained on: the probe's text is sampled.
            state = MemberState.live if self._verified else MemberState.loaded
            able = self._versions.newest is not None
            able = able and (self._probe is not None or not self._verified)
            loads = {m.number: m.requests for m in self.members if m.state is state and able}
            if loads and self._front is None:
                return self.members[choose(session, loads)]
            if loads and self._front is not None and not self._others(state):
                return self._front.member
            await self._wait()

    def _others(self, state: MemberState) -> list[Member]:
        """Return servers that a router may send requests to, and that are not in `state`.

        Raises FleetLost for one that answers, and has been given up.
        """
        others = [member for member in self.members if member.answers and member.state is not state]
        if bad := [member for member in others if member.state is MemberState.gone]:
            raise FleetLost(
                f"servers.url={self._servers.url}: the router may send requests to "
                f"{bad[0].name}, which {bad[0].reason}; end it, or leave it out of the router"
            )
        return others

    async def _ask(
        self, member: Member, token_ids: Sequence[int], sampling: Sampling, session: str
    ) -> Completion:
        """Send a request; ServerFailed as soon as its server is lost."""
        assert member.client is not None
        files = self._versions.of(session)
        call = member.client.generate(
            token_ids,
            sampling,
            request_id=f"{self._salt}-{member.boot}-{next(self._numbers)}",
            session=session,
            # A new rollout never uses keys and values of old weights, whatever the sync keeps.
            salt=f"{self._salt}-{self._versions.start(session)}",
            adapter=files.version if files.adapters else None,
        )
        try:
            completion = await member.until_lost(call)
        finally:
            if not member.requests:
                self.changed()
        if any(version < files.version for version, _ in completion.versions):
            raise ServerFailed(f"it sampled with older weights than those of {files.version}")
        return completion

    async def load(self, files: WeightFiles) -> None:
        """Send new weights to every server; nothing is sampled until `verify` has passed.

        A server that fails is killed, and gets them once it has started again. Raises FleetLost.
        """
        await self._started()
        self._probe = None
        async with self._syncing:
            unused = self._versions.add(files)
            able = [member for member in self.members if member.state in ANSWERING]
            await asyncio.gather(*(self._bring(member, [files]) for member in able))
            for one in unused:
                await asyncio.gather(*(self._unload(member, one) for member in able))
                await asyncio.to_thread(shutil.rmtree, one.folder, ignore_errors=True)
        if self._outside is not None and not self._verified:
            self._check_count(MemberState.loaded)
        while not any(member.state is MemberState.loaded for member in self.members):
            await self._wait()

    def _check_count(self, *states: MemberState) -> None:
        """Raise FleetLost if fewer outside servers than `servers.count` are in these states."""
        count = sum(member.state in states for member in self.members)
        if count < self._servers.count:
            texts = [f"{one.name} {one.reason}" for one in self.members if one.state not in states]
            raise FleetLost(
                f"servers.count={self._servers.count}: {count} of the servers of "
                f"servers.admin_urls can be used; start the others, or lower it\n"
                + "\n".join(texts)
            )

    async def verify(self, token_ids: Sequence[int], problem: Problem) -> list[float]:
        """Score a text on every server with the new weights, and let those without a problem serve.

        The others are killed, as is later any server that starts again and does not pass. Return
        the scores of a good server; if there is none, those of a bad one, and nothing serves.
        """
        while True:
            async with self._syncing:
                loaded = [member for member in self.members if member.state is MemberState.loaded]
                scores = await asyncio.gather(*(self._score(one, token_ids) for one in loaded))
                results = [
                    (member, values, problem(values))
                    for member, values in zip(loaded, scores, strict=True)
                    if values is not None
                ]
                good = [(member, values) for member, values, wrong in results if wrong is None]
                if results and not good:
                    return results[0][1]
                if good:
                    for member, _, wrong in results:
                        if wrong is not None:
                            member.kill(wrong)
                        else:
                            member.state = MemberState.live
                    self._probe, self._verified = (token_ids, problem), True
                    self.changed()
                    return good[0][1]
            while not any(member.state is MemberState.loaded for member in self.members):
                await self._wait()

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return a server's log-probability of every id after the first."""
        while True:
            for member in self.members:
                if member.state in (MemberState.live, MemberState.loaded):
                    values = await self._score(member, token_ids)
                    if values is not None:
                        return values
            await self._wait()

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Give a server that has started the current weights, and check them."""
        if member.client is not None:
            await member.client.aclose()
        member.join(record, self._servers.request_s)
        async with self._syncing:
            if self._versions.newest is not None:
                await self._bring(member, self._versions.held())
            if self._probe is not None and member.state is MemberState.loaded:
                token_ids, problem = self._probe
                values = await self._score(member, token_ids)
                wrong = None if values is None else problem(values)
                if wrong is not None:
                    member.kill(wrong)
                elif values is not None:
                    member.state = MemberState.live

    async def _bring(self, member: Member, versions: Sequence[WeightFiles]) -> None:
        """Send weights to one server, the newest last; kill it if that fails."""
        client, boot, files = member.client, member.boot, versions[-1]
        assert client is not None
        member.state = MemberState.syncing  # it need not answer examinations while it loads
        update = update_path(self._folder, member.number)
        if not member.outside:
            write_private(update, boot)
        try:
            async with asyncio.timeout(self._servers.request_s):
                for one in versions if files.adapters else ():
                    await client.load_adapter(one.version, str(one.folder))
                if not files.adapters:
                    await client.load(
                        str(files.folder),
                        files.digest,
                        files.version,
                        self._mode,
                        first=not member.initialised,
                    )
        except (ServerFailed, TimeoutError) as error:
            reason = f"weight update {files.version}: {error or 'took too long'}"
            if self._outside is not None and not files.folder.is_relative_to(self._folder):
                reason += f"; it has to see {files.folder.parent} (weight_sync.folder)"
            elif self._outside is not None:
                reason += f"; it has to see {files.folder.parent}: set weight_sync.folder"
            member.kill(reason)
            return
        update.unlink(missing_ok=True)
        if member.boot == boot and member.state in ANSWERING:
            member.initialised, member.state = True, MemberState.loaded
            member.version = files.version

    async def _unload(self, member: Member, files: WeightFiles) -> None:
        """Have a server forget adapters that no rollout uses."""
        assert member.client is not None
        # It may have been started again since, or be dying.
        with suppress(ServerFailed):
            await member.client.unload_adapter(files.version)

    async def _score(self, member: Member, token_ids: Sequence[int]) -> list[float] | None:
        """Return a server's log-probabilities; None: it failed, and was killed."""
        files, boot = self._versions.newest, member.boot
        assert member.client is not None and files is not None
        while files.adapters and member.requests and member.boot == boot:
            await self._wait()
        if member.boot != boot or member.state not in ANSWERING:
            return None
        try:
            return await member.client.score(
                token_ids,
                salt=f"{self._salt}-probe-{files.version}",
                adapter=files.version if files.adapters else None,
            )
        except ServerFailed as error:
            member.kill(f"the probe of its weights: {error}")
            return None

    async def _started(self) -> None:
        """Begin to watch the servers, the first time; wait until all of them have started."""
        if self._watchers:
            return
        outside = self._outside
        self._watch(
            watch(member, self, self._folder, self._servers)
            if outside is None
            else watch_outside(member, self, outside, self._servers)
            for member in self.members
        )
        begun = time.monotonic()
        progress = StartProgress(self._folder, "engine", len(self.members))
        while waiting := [one for one in self.members if one.state is MemberState.starting]:
            await self._wait()
            progress.report({one.number: one.name for one in waiting})
            if outside is None and any(one.state is MemberState.gone for one in self.members):
                raise FleetLost(f"a server did not start: {self._ends(MemberState.gone)}")
            if unfit := [member.reason for member in self.members if member.unfit]:
                raise FleetLost("\n".join(unfit))
            enough = sum(one.state in ANSWERING for one in self.members) >= self._servers.count
            if outside and enough and time.monotonic() > begun + self._servers.dead_s:
                names = ", ".join(one.name for one in waiting)
                print(f"engine: goes on without {names}, until it answers", flush=True)
                break
        if outside is not None:
            self._check_count(*ANSWERING)

    def changed(self) -> None:
        """Wake all that wait for a server."""
        super().changed()
        if self._front is not None:
            self._front.follow(self.members)

    def _lost(self, text: str) -> FleetLost:
        return FleetLost(text)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        members = self.members if self._front is None else [*self.members, self._front.member]
        sent = [member.sent for member in members]
        metrics = {
            "fleet/servers": float(sum(member.state in ANSWERING for member in self.members)),
            "fleet/deaths": float(sum(member.deaths for member in self.members)),
            "fleet/requests": float(sum(sent)),
            "fleet/resent": float(self.resent),
            "fleet/load": max(sent) / max(sum(sent), 1),
            "fleet/cached": self._cached_share(members),
            "fleet/pause_s": max(one.client.paused_s if one.client else 0.0 for one in members),
        }
        self.resent = 0
        for member in members:
            member.sent = member.deaths = 0
        return metrics

    def _cached_share(self, members: Sequence[Member]) -> float:
        """Return the share of the prompts' tokens that were cached since the last call."""
        clients = [member.client for member in members if member.client is not None]
        prompts, cached = (
            sum(getattr(client, name) for client in clients)
            for name in ("prompt_tokens", "cached_tokens")
        )
        for client in clients:
            client.prompt_tokens = client.cached_tokens = 0
        return cached / max(prompts, 1)

    async def aclose(self) -> None:
        """Stop watching; requests in flight fail."""
        members = self.members if self._front is None else [*self.members, self._front.member]
        await self._close(members, "the engine was closed")
