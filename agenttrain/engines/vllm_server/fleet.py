"""`Fleet`: the servers of a run as one: who is in it, who gets a request, who has which weights.

A request whose server dies is sent to another one, with the same ids and the same seed: sampling
noise depends on nothing else, and tokens of an unfinished request were never seen by anybody.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.config import Sampling, ServersConfig
from agenttrain.engines.vllm_server.client import ServerFailed
from agenttrain.engines.vllm_server.health import ANSWERING, Member, MemberState, watch
from agenttrain.engines.vllm_server.records import ServerRecord, last_lines, log_path
from agenttrain.engines.vllm_server.routing import choose
from agenttrain.engines.weight_files import WeightFiles
from agenttrain.training.config import WeightSyncMode
from agenttrain.types import Completion

SENDS = 5
"""Servers that a request may kill, or see die, before it counts as the cause."""

Problem = Callable[[Sequence[float]], str | None]
"""Says what is wrong with a server's log-probabilities of the probe; None: nothing."""


class FleetLost(EngineDead):
    """No server is left."""


class Fleet:
    """Servers `0` to `servers.count - 1` of the run in `folder`, which their wrappers start."""

    def __init__(self, folder: Path, servers: ServersConfig, mode: WeightSyncMode) -> None:
        self.members = [Member(number) for number in range(servers.count)]
        self.resent = 0
        """Requests that were sent again since the metrics were last read."""
        self._folder, self._servers, self._mode = folder, servers, mode
        self._files: WeightFiles | None = None
        """The current weights."""
        self._probe: tuple[Sequence[int], Problem] | None = None
        """Check of the current weights; None until `verify` has passed."""
        self._verified = False
        """Weights have been verified before."""
        self._watchers: list[asyncio.Task[None]] = []
        self._syncing = asyncio.Lock()
        self._change = asyncio.Event()
        self._numbers = itertools.count()

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, *, session: str
    ) -> Completion:
        """Sample from a server with the current weights; wait until there is one.

        Raises EngineError for a request that servers refuse or die of, FleetLost.
        """
        error: ServerFailed | None = None
        for _ in range(SENDS):
            member = await self._pick(session)
            boot = member.boot
            member.sent += 1
            self.resent += error is not None
            try:
                completion = await self._ask(member, token_ids, sampling)
            except ServerFailed as failed:
                error = failed
                # Requests that fail together are one fault: only the first meets a live server.
                if member.boot == boot and member.state is MemberState.live:
                    member.fault(str(failed))
            else:
                member.failures = 0
                return completion
        raise EngineError(
            f"session={session!r}: {SENDS} servers one after the other failed at this request of "
            f"{len(token_ids)} ids; the last: {error}"
        )

    async def _pick(self, session: str) -> Member:
        """Return the server for a request; wait until there is one."""
        while True:
            # Before the first verification nothing is trained on: the probe's text is sampled.
            state = MemberState.live if self._verified else MemberState.loaded
            able = self._files is not None and (self._probe is not None or not self._verified)
            loads = {m.number: m.requests for m in self.members if m.state is state and able}
            if loads:
                return self.members[choose(session, loads)]
            await self._wait()

    async def _ask(
        self, member: Member, token_ids: Sequence[int], sampling: Sampling
    ) -> Completion:
        """Send a request; ServerFailed as soon as its server is lost."""
        assert member.client is not None and self._files is not None
        answer = asyncio.create_task(
            member.client.generate(
                token_ids,
                sampling,
                request_id=f"{member.boot}-{next(self._numbers)}",
                salt=str(self._files.version),
            )
        )
        lost = asyncio.create_task(member.lost.wait())
        member.requests += 1
        try:
            await asyncio.wait((answer, lost), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                raise ServerFailed(f"server {member.number} died: {member.reason}")
            return answer.result()
        finally:
            member.requests -= 1
            for task in (answer, lost):  # a cancelled call aborts its request at the server
                task.cancel()

    async def load(self, files: WeightFiles) -> None:
        """Send new weights to every server; nothing is sampled until `verify` has passed.

        A server that fails is killed, and gets them once it has started again. Raises FleetLost.
        """
        await self._started()
        self._probe = None
        async with self._syncing:
            self._files = files
            able = [member for member in self.members if member.state in ANSWERING]
            await asyncio.gather(*map(self._bring, able))
        while not any(member.state is MemberState.loaded for member in self.members):
            await self._wait()

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
            if self._files is not None:
                await self._bring(member)
            if self._probe is not None and member.state is MemberState.loaded:
                token_ids, problem = self._probe
                values = await self._score(member, token_ids)
                wrong = None if values is None else problem(values)
                if wrong is not None:
                    member.kill(wrong)
                elif values is not None:
                    member.state = MemberState.live

    async def _bring(self, member: Member) -> None:
        """Send the current weights to one server; kill it if that fails."""
        assert member.client is not None and self._files is not None
        files, boot = self._files, member.boot
        member.state = MemberState.syncing  # it need not answer examinations while it loads
        try:
            async with asyncio.timeout(self._servers.request_s):
                await member.client.load(
                    str(files.folder),
                    files.digest,
                    files.version,
                    self._mode,
                    first=not member.initialised,
                )
        except (ServerFailed, TimeoutError) as error:
            member.kill(f"weight update {files.version}: {error or 'took too long'}")
            return
        if member.boot == boot and member.state in ANSWERING:
            member.initialised, member.state = True, MemberState.loaded

    async def _score(self, member: Member, token_ids: Sequence[int]) -> list[float] | None:
        """Return a server's log-probabilities; None: it failed, and was killed."""
        assert member.client is not None
        try:
            return await member.client.score(token_ids)
        except ServerFailed as error:
            member.kill(f"the probe of its weights: {error}")
            return None

    async def _started(self) -> None:
        """Begin to watch the servers, the first time; wait until all of them have started."""
        if self._watchers:
            return
        self._watchers = [
            asyncio.create_task(watch(member, self, self._folder, self._servers))
            for member in self.members
        ]
        for watcher in self._watchers:
            watcher.add_done_callback(lambda _: self.changed())
        while any(member.state is MemberState.starting for member in self.members):
            await self._wait()
            if any(member.state is MemberState.gone for member in self.members):
                raise FleetLost(f"a server did not start: {self._ends(MemberState.gone)}")

    def changed(self) -> None:
        """Wake all that wait for a server."""
        self._change.set()
        self._change = asyncio.Event()

    async def _wait(self) -> None:
        """Wait for a change of a server's state; raises FleetLost if none is left."""
        if all(member.state is MemberState.gone for member in self.members):
            raise FleetLost(f"no server is left: {self._ends(MemberState.gone)}")
        for watcher in self._watchers:
            if watcher.done():  # only a bug ends it
                watcher.result()
        await self._change.wait()

    def _ends(self, state: MemberState) -> str:
        """Describe how the servers in a state ended, with the last lines of their logs."""
        texts = []
        for member in self.members:
            if member.state is state:
                lines = last_lines(self._folder, member.number)
                log = log_path(self._folder, member.number)
                texts.append(f"server {member.number} {member.reason}; the end of {log}:\n{lines}")
        return "\n".join(texts)

    def metrics(self) -> dict[str, float]:
        """Return the metrics since the last call."""
        sent = [member.sent for member in self.members]
        metrics = {
            "fleet/servers": float(sum(member.state in ANSWERING for member in self.members)),
            "fleet/deaths": float(sum(member.deaths for member in self.members)),
            "fleet/requests": float(sum(sent)),
            "fleet/resent": float(self.resent),
            "fleet/load": max(sent) / max(sum(sent), 1),
        }
        self.resent = 0
        for member in self.members:
            member.sent = member.deaths = 0
        return metrics

    async def aclose(self) -> None:
        """Stop watching; requests in flight fail."""
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        for member in self.members:
            member.close("the engine was closed")
            if member.client is not None:
                await member.client.aclose()
        self.changed()
