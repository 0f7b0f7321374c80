"""`Fleet`: the servers of a run: which of them answer, get a request, and have which weights.

A request whose server dies is sent to another server with the same ids and seed. It gets the same
sampling noise, which depends on nothing else, and its unfinished tokens have been used nowhere.
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

from agenttrain.engines.base import EngineDead
from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.vllm_server.client import ServerFailed
from agenttrain.engines.vllm_server.health import ANSWERING, Member, MemberState, watch
from agenttrain.engines.vllm_server.outside import ROUTER, Outside, Router, watch_outside
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

FindProblem = Callable[[Sequence[float]], str | None]
"""Returns what is wrong with a server's log-probabilities of the probe, or None."""


class FleetLost(EngineDead):
    """No server is left."""


class Fleet(WatchedServers):
    """The servers of the run in `folder`: started by its wrappers, or by somebody else.

    Used in one event loop. Each version of the weights comes in two steps. `load` sends it to the
    servers that answer: they are `loaded` then. `verify` scores a text on them, the probe: good
    servers become `live`, and bad ones are killed. `generate` samples from live servers, and waits
    between the two steps. Only the first version is sampled before `verify`, whose probe is a
    sample of it. `release` ends a session.

    A watcher, a task per server, calls `joined` when the server has started, at first or again, and
    `changed` whenever its state may have changed. A server that joins gets the current weights, and
    the same probe if `verify` has passed. The other states are those of `MemberState`.
    """

    def __init__(
        self,
        folder: Path,
        servers: ServersConfig,
        mode: WeightSyncMode,
        outside: Outside | None = None,
        adapters: int = ADAPTERS,
        *,
        record_routes: bool = False,
    ) -> None:
        """`outside` describes servers that somebody else started. None: the run starts them.

        `mode` is weight_sync.mode. Rollouts go on with the adapters that they began with: a server
        has at most `adapters` versions of them. With `record_routes` completions have their
        experts.
        """
        # The addresses of servers that the run starts come later, with their records.
        urls = outside.urls if outside is not None else ("",) * servers.count
        members = [
            Member(
                number,
                outside=outside is not None,
                url=url,
                # Wrappers on other nodes get no signals: they read orders from files.
                kill_order=order_path(folder, number) if servers.nodes else None,
            )
            for number, url in enumerate(urls)
        ]
        super().__init__(members, folder, StatusFile(folder))
        self._servers, self._mode = servers, mode
        self._record_routes = record_routes
        self._outside = outside
        self._router: Router | None = None
        if outside is not None and outside.router is not None:
            self._router = Router(outside.router, outside.token, servers)
        self._versions = Versions(adapters=adapters)
        self._probe: tuple[Sequence[int], FindProblem] | None = None
        """Arguments with which `verify` has passed for the current weights: a text's ids, and the
        check of their scores. Servers that start later are checked by them. None: not passed."""
        self._verified = False
        """True from the first `verify` of this run that has passed."""
        self._syncing = asyncio.Lock()
        """Held while weights are sent or verified."""
        self._numbers = itertools.count()
        """Numbers of the requests."""
        self._salt = secrets.token_hex(4)
        """Separates this run's entries in an outside server's prefix cache from another run's."""
        self._servers_of: dict[str, int] = {}
        """Number of the server that got each session's last request."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """Sample from a server with the current weights. Raises EngineError and FleetLost."""
        return await self._call(
            session,
            lambda member: self._send(member, token_ids, sampling, session),
            f"session={session!r}, {len(token_ids)} ids",
        )

    def _may_send(self, sends: int, first_failure: float) -> bool:
        """Return True if a request may be sent again, after `sends` times.

        Behind a router there is no limit for a while after the first failure: the router may not
        have noticed yet that a server is gone.
        """
        waited_s = time.monotonic() - first_failure
        return sends < SENDS or (self._router is not None and waited_s < 2 * self._servers.dead_s)

    async def _handle_failure(self, member: Member, boot: int, error: ServerFailed) -> None:
        """Count a failed request, or give a router time to notice that a server is gone."""
        if self._router is None:
            await super()._handle_failure(member, boot, error)
        else:
            await asyncio.sleep(self._servers.health_s)

    def release(self, session: str) -> None:
        """End a session. The adapters that it began with may be removed."""
        self._versions.release(session)
        self._servers_of.pop(session, None)

    def server_of(self, session: str) -> int | None:
        """Return the server of a session's last request. None: none yet, or a router chose it."""
        number = self._servers_of.get(session)
        return None if number == ROUTER else number

    async def _pick(self, session: str) -> Member:
        """Return the server for a request. Waits until there is one.

        `load` sends weights to the servers, which are `loaded` then. `verify` scores a text on
        them, and makes the good ones `live`. The first weights are sampled before that, because
        the text is a sample of theirs. Later ones are not sampled before `verify`.
        """
        while True:
            is_first = not self._verified
            state = MemberState.loaded if is_first else MemberState.live
            has_weights = self._versions.newest is not None
            # Between `load` and `verify` there is no probe.
            may_sample = has_weights and (is_first or self._probe is not None)
            candidates = [m for m in self.members if m.state is state] if may_sample else []
            loads = {member.number: member.requests for member in candidates}  # in flight
            if loads and self._router is None:
                return self.members[choose(session, loads)]
            # A router in front of the servers may choose any that answers: all have to be ready.
            if loads and self._router is not None and not self._unready_members(state):
                return self._router.member
            await self._wait()  # for a change of some server's state

    def _unready_members(self, state: MemberState) -> list[Member]:
        """Return the answering servers that are not in `state`.

        Raises FleetLost for one that was given up and answers all the same: the router may choose
        it, and it does not get the weights.
        """
        members = [
            member for member in self.members if member.answers and member.state is not state
        ]
        if gone := [member for member in members if member.state is MemberState.gone]:
            raise FleetLost(
                f"servers.url={self._servers.url}: the router may send requests to "
                f"{gone[0].name}, which {gone[0].reason}; end it, or leave it out of the router"
            )
        return members

    async def _send(
        self, member: Member, token_ids: Sequence[int], sampling: Sampling, session: str
    ) -> Completion:
        """Return a server's completion. Raises ServerFailed as soon as the server is lost."""
        assert member.client is not None
        self._servers_of[session] = member.number
        # A session samples with the newest weights. With adapters it keeps those of its first turn.
        files = self._versions.of(session)
        call = member.client.generate(
            token_ids,
            sampling,
            request_id=f"{self._salt}-{member.boot}-{next(self._numbers)}",
            session=session,
            # By the version that the session began with, a new rollout never uses a KV cache of old
            # weights, even if the sync kept it.
            salt=f"{self._salt}-{self._versions.start(session)}",
            adapter=files.version if files.adapters else None,
            record_routes=self._record_routes,
        )
        try:
            completion = await member.until_lost(call)
        finally:
            if not member.requests:  # `_score` may wait until the server has no requests
                self.changed()
        if any(version < files.version for version, _ in completion.versions):
            raise ServerFailed(f"it sampled with older weights than those of {files.version}")
        return completion

    async def load(self, files: WeightFiles) -> None:
        """Send new weights to every server; `verify` comes next. Raises FleetLost."""
        await self._await_start()
        self._probe = None  # `generate` waits until `verify` has set it for the new weights
        async with self._syncing:
            unused_adapters = self._versions.add(files)  # older ones that no session uses
            members = [member for member in self.members if member.state in ANSWERING]
            await asyncio.gather(*(self._load_member(member, [files]) for member in members))
            for old in unused_adapters:
                await asyncio.gather(*(self._unload(member, old) for member in members))
                await asyncio.to_thread(shutil.rmtree, old.folder, ignore_errors=True)
        # With the first weights enough outside servers have to be usable. Later they may be fewer.
        if self._outside is not None and not self._verified:
            self._check_count(MemberState.loaded)
        # `verify` needs a server with the weights. If all have died, wait for one that is started
        # again: its watcher calls `joined`, which sends it the weights. It takes the lock for that.
        while not any(member.state is MemberState.loaded for member in self.members):
            await self._wait()

    def _check_count(self, *states: MemberState) -> None:
        """Raise FleetLost if fewer outside servers than `servers.count` are in these states."""
        unusable = [member for member in self.members if member.state not in states]
        count = len(self.members) - len(unusable)
        if count < self._servers.count:
            raise FleetLost(
                f"servers.count={self._servers.count}: {count} of the servers of "
                f"servers.admin_urls can be used; start the others, or lower it\n"
                + "\n".join(f"{member.name} {member.reason}" for member in unusable)
            )

    async def verify(self, token_ids: Sequence[int], find_problem: FindProblem) -> list[float]:
        """Score the probe's ids on every server with the new weights, and let good servers serve.

        Bad servers are killed, and so is later any server that starts again and does not pass.
        Return the scores of a good server. If no server is good, none is killed and none serves:
        return the scores of a bad one. If none answers, wait for one that is started again.
        """
        while True:
            async with self._syncing:
                scores = await self._score_loaded(token_ids)
                problems = {number: find_problem(values) for number, values in scores.items()}
                good_servers = [number for number, problem in problems.items() if problem is None]
                if scores and not good_servers:  # the weights themselves may be bad
                    return next(iter(scores.values()))
                if good_servers:
                    for number, problem in problems.items():
                        if problem is not None:
                            self.members[number].kill(problem)
                        else:
                            self.members[number].state = MemberState.live
                    self._probe = token_ids, find_problem  # `joined` checks later servers by it
                    self._verified = True
                    self.changed()
                    return scores[good_servers[0]]
            # Without the lock, which `joined` takes to send the weights to a server.
            while not any(member.state is MemberState.loaded for member in self.members):
                await self._wait()

    async def _score_loaded(self, token_ids: Sequence[int]) -> dict[int, list[float]]:
        """Return the scores of each server with unchecked weights, by number, if it answers."""
        loaded = [member for member in self.members if member.state is MemberState.loaded]
        results = await asyncio.gather(*(self._score(member, token_ids) for member in loaded))
        pairs = zip(loaded, results, strict=True)
        return {member.number: values for member, values in pairs if values is not None}

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probability of every id after the first, by any server with weights."""
        while True:
            for member in self.members:
                if member.state in (MemberState.live, MemberState.loaded):
                    values = await self._score(member, token_ids)
                    if values is not None:
                        return values
            await self._wait()

    async def joined(self, member: Member, record: ServerRecord) -> None:
        """Give a server that has started the current weights, and check them by the probe.

        The probe is the text and check of the last `verify`. A good server becomes `live` and
        serves, a bad one is killed. If `verify` of the current weights is still to come, the server
        stays `loaded` until then.
        """
        await member.join(record, self._servers.request_s)
        async with self._syncing:
            if self._versions.newest is not None:
                await self._load_member(member, self._versions.held())
            if self._probe is not None and member.state is MemberState.loaded:
                token_ids, find_problem = self._probe
                values = await self._score(member, token_ids)
                if values is None:  # it is lost, or was killed
                    return
                problem = find_problem(values)
                if problem is not None:
                    member.kill(problem)
                else:
                    member.state = MemberState.live

    async def _load_member(self, member: Member, versions: Sequence[WeightFiles]) -> None:
        """Send weights to one server, the newest last. Kill the server if that fails.

        A server keeps several versions of adapters, and gets all of `versions`. Of all weights it
        has one version, and gets the newest.
        """
        client, files = member.client, versions[-1]
        assert client is not None
        boot = member.boot  # number of its start
        member.state = MemberState.syncing  # it need not answer examinations while it loads
        # The file stays if this process dies now: a later process then does not reuse the server.
        update = update_path(self._folder, member.number)
        if not member.outside:
            write_private(update, boot)
        try:
            async with asyncio.timeout(self._servers.request_s):
                if files.adapters:
                    for adapters in versions:
                        await client.load_adapter(adapters.version, str(adapters.folder))
                else:
                    await client.load(
                        str(files.folder),
                        files.digest,
                        files.version,
                        self._mode,
                        first=not member.initialised,
                    )
        except (ServerFailed, TimeoutError) as error:
            reason = f"weight update {files.version}: {error or 'took too long'}"
            # An outside server may be on a machine that does not have the folder of the files.
            if self._outside is not None and not files.folder.is_relative_to(self._folder):
                reason += f"; it has to see {files.folder.parent} (weight_sync.folder)"
            elif self._outside is not None:
                reason += f"; it has to see {files.folder.parent}: set weight_sync.folder"
            member.kill(reason)
            return
        update.unlink(missing_ok=True)
        # Unless it has died meanwhile, and was perhaps started again.
        if member.boot == boot and member.state in ANSWERING:
            member.initialised, member.state = True, MemberState.loaded
            member.version = files.version

    async def _unload(self, member: Member, files: WeightFiles) -> None:
        """Have a server drop adapters that no rollout uses."""
        assert member.client is not None
        # A failure does not matter: the server may have been started again, or be dying.
        with suppress(ServerFailed):
            await member.client.unload_adapter(files.version)

    async def _score(self, member: Member, token_ids: Sequence[int]) -> list[float] | None:
        """Return a server's log-probabilities of a text by the newest weights.

        None: the server is lost, or it failed and was killed here.
        """
        # Another `boot`, the number of its start: the server has died and was started again.
        files, boot = self._versions.newest, member.boot
        assert member.client is not None and files is not None
        # vLLM 0.32 dies of scores with adapters while other requests run: `ServerClient.score`.
        while files.adapters and member.requests and member.boot == boot:
            await self._wait()  # `_send` reports the end of the last one
        if member.boot != boot or member.state not in ANSWERING:
            return None
        try:
            return await member.client.score(
                token_ids,
                salt=f"{self._salt}-probe-{files.version}",  # no cached prefix of older weights
                adapter=files.version if files.adapters else None,
            )
        except ServerFailed as error:
            member.kill(f"the probe of its weights: {error}")
            return None

    async def _await_start(self) -> None:
        """Watch the servers and wait for their start, at the first call. Raises FleetLost.

        All servers that the run starts have to answer. Of outside servers, `servers.count` are
        enough once `servers.dead_s` is over.
        """
        if self._watchers:  # `_watch` has filled it at the first call
            return
        outside = self._outside
        if outside is None:
            self._watch(watch(m, self, self._folder, self._servers) for m in self.members)
        else:
            self._watch(watch_outside(m, self, outside, self._servers) for m in self.members)
        start = time.monotonic()
        progress = StartProgress(self._folder, "engine", len(self.members))
        while waiting := [m for m in self.members if m.state is MemberState.starting]:
            await self._wait()  # the watchers wake it every `servers.health_s`
            progress.report({member.number: member.name for member in waiting})
            if outside is None and any(m.state is MemberState.gone for m in self.members):
                raise FleetLost(f"a server did not start: {self._describe_ends()}")
            if unfit := [member.reason for member in self.members if member.unfit]:
                raise FleetLost("\n".join(unfit))
            has_enough = sum(m.state in ANSWERING for m in self.members) >= self._servers.count
            if outside and has_enough and time.monotonic() > start + self._servers.dead_s:
                names = ", ".join(member.name for member in waiting)
                print(f"engine: goes on without {names}, until it answers", flush=True)
                break
        if outside is not None:  # some may have been given up
            self._check_count(*ANSWERING)

    def changed(self) -> None:
        """Wake all tasks that wait for a server."""
        super().changed()
        if self._router is not None:
            self._router.follow(self.members)

    def _loss_error(self, text: str) -> FleetLost:
        return FleetLost(text)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call.

        Behind a router all requests count as sent to the router, and none to a server: then
        `fleet/load` is 1, because the share of each server is not known.
        """
        members = self.members if self._router is None else [*self.members, self._router.member]
        sent = [member.sent for member in members]
        metrics = {
            "fleet/servers": float(sum(member.state in ANSWERING for member in self.members)),
            "fleet/deaths": float(sum(member.deaths for member in self.members)),
            "fleet/requests": float(sum(sent)),
            "fleet/resent": float(self.resent),
            "fleet/load": max(sent) / max(sum(sent), 1),  # share of the busiest server
            "fleet/cached": self._cached_share(members),
            "fleet/pause_s": max(m.client.paused_s if m.client else 0.0 for m in members),
        }
        self.resent = 0
        for member in members:
            member.sent = member.deaths = 0
        return metrics

    def _cached_share(self, members: Sequence[Member]) -> float:
        """Return the share of prompt tokens that were cached, and count anew from now on."""
        clients = [member.client for member in members if member.client is not None]
        prompt_tokens = sum(client.prompt_tokens for client in clients)
        cached_tokens = sum(client.cached_tokens for client in clients)
        for client in clients:
            client.prompt_tokens = client.cached_tokens = 0
        return cached_tokens / max(prompt_tokens, 1)

    async def aclose(self) -> None:
        """Stop watching the servers. Requests in flight fail."""
        members = self.members if self._router is None else [*self.members, self._router.member]
        await self._close(members, "the engine was closed")
