"""`WatchedServers`: servers that a process watches and waits for; `StartProgress`: their start."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.engines.base import EngineDead, EngineError
from agenttrain.engines.vllm_server.client import ServerFailed
from agenttrain.engines.vllm_server.health import Member, MemberState
from agenttrain.engines.vllm_server.server_records import last_lines, log_path
from agenttrain.engines.vllm_server.status import StatusFile

SENDS = 5
"""Times that a request is sent, to servers that fail, before the request counts as the cause."""
PROGRESS_S = 5.0
"""Seconds between two reports on servers that start."""
LINE_CHARS = 100
"""Most characters of a log's line in a report."""
T = TypeVar("T")


class WatchedServers(ABC):
    """Base of `Fleet`, the policy's servers, and of `FrozenFleet`, the servers of a role.

    Picks a server for each request (`_pick`), and sends the request to another one if the server
    fails. A watcher per server, a task of `_watch`, keeps its `Member` up to date: `live` if it may
    get requests, `gone` if it is not started again. After each change it calls `changed`, which
    wakes the tasks in `_wait`.
    """

    def __init__(self, members: list[Member], folder: Path, status: StatusFile) -> None:
        """`folder` has their records and logs."""
        self.members = members
        self._folder, self._status = folder, status
        self.resent = 0
        """Requests that were sent again, since the metrics were last read."""
        self._watchers: list[asyncio.Task[None]] = []
        self._change = asyncio.Event()

    @abstractmethod
    async def _pick(self, session: str) -> Member:
        """Return the server for a request. Waits until there is one."""

    async def _call(
        self, session: str, send: Callable[[Member], Coroutine[Any, Any, T]], name: str
    ) -> T:
        """Return the answer to a request, sent until a server answers. Raises EngineError.

        `name` describes the request in messages. Raises `_loss_error` if no server is left.
        """
        failure: ServerFailed | None = None
        sends, first_failure = 0, 0.0
        while self._may_send(sends, first_failure):
            member = await self._pick(session)
            # The server may be started again meanwhile: a failure counts for this start alone.
            boot = member.boot  # number of the start
            member.sent += 1
            sends += 1
            if failure is not None:
                self.resent += 1
            try:
                answer = await send(member)
            except ServerFailed as error:
                failure = error
                if not first_failure:
                    first_failure = time.monotonic()
                await self._handle_failure(member, boot, error)
            else:
                member.failures = 0
                member.served += 1
                return answer
        raise EngineError(
            f"{name}: {sends} servers one after the other failed at this request; the last: "
            f"{failure}"
        )

    def _may_send(self, sends: int, first_failure: float) -> bool:
        """Return True if a request may be sent again, after `sends` times.

        `first_failure` is the time at which it failed first, for subclasses. 0: it has not failed.
        """
        return sends < SENDS

    async def _handle_failure(self, member: Member, boot: int, error: ServerFailed) -> None:
        """Count a failed request, which was sent at the server's start number `boot`."""
        # Requests that fail together count once: `fault` makes the server `suspect`, and it is
        # examined before it is live again.
        if member.boot == boot and member.state is MemberState.live:
            member.fault(str(error))

    @abstractmethod
    def _loss_error(self, text: str) -> EngineDead:
        """Return the error for the case that no server is left."""

    def _watch(self, watchers: Iterable[Coroutine[Any, Any, None]]) -> None:
        self._watchers = [asyncio.create_task(watcher) for watcher in watchers]
        for task in self._watchers:
            # Only a bug or `_close` ends a watcher. Tasks that wait are woken, and `_wait` raises
            # the watcher's error.
            task.add_done_callback(lambda _: self.changed())

    def changed(self) -> None:
        """Implement `Members.changed`: wake all tasks that wait for a server."""
        # Tasks that wait have the old event. A task that waits from now on gets the new one, and
        # so sees later changes only.
        self._change.set()
        self._change = asyncio.Event()
        self._status.write(self.members)

    async def _wait(self) -> None:
        """Wait until a server's state has changed. Raises `_loss_error` if no server is left."""
        if all(member.state is MemberState.gone for member in self.members):
            raise self._loss_error(f"no server is left: {self._describe_ends()}")
        for watcher in self._watchers:
            if watcher.done():  # only a bug ends it
                watcher.result()
        await self._change.wait()

    def _describe_ends(self) -> str:
        """Describe how the servers that are gone ended, with the last lines of their logs."""
        texts = []
        for member in self.members:
            if member.state is MemberState.gone:
                text = f"{member.name} {member.reason}"
                if not member.outside:
                    lines = last_lines(self._folder, member.number)
                    log = log_path(self._folder, member.number)
                    text += f"; the end of {log}:\n{lines}"
                texts.append(text)
        return "\n".join(texts)

    async def _close(self, members: Sequence[Member], reason: str) -> None:
        """Stop watching all servers, and close `members`: their requests in flight fail.

        `reason` is the text with which they fail.
        """
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._status.write(self.members, ended=True)
        for member in members:
            member.close(reason)
            if member.client is not None:
                await member.client.aclose()
        self._change.set()  # tasks that wait for a server look again, and raise


class StartProgress:
    """Prints every `PROGRESS_S` seconds how many servers have started.

    Example: ``engine: 1 of 2 servers answer after 15 s; server 1: Loading weights took 3.2 s``
    """

    def __init__(self, folder: Path, name: str, count: int) -> None:
        """`folder` has the servers' logs, except those of outside servers."""
        self._folder, self._name, self._count = folder, name, count
        self._start = self._printed = time.monotonic()

    def report(self, waiting: Mapping[int, str]) -> None:
        """Print a report if one is due. `waiting`: names of servers that have not answered yet."""
        now = time.monotonic()
        if now < self._printed + PROGRESS_S:
            return
        self._printed = now
        answering = self._count - len(waiting)
        texts = [f"{answering} of {self._count} servers answer after {now - self._start:.0f} s"]
        for number, name in waiting.items():
            line = last_lines(self._folder, number, 1)[:LINE_CHARS]
            texts.append(f"{name}: {line}" if line else f"{name} does not answer yet")
        print(f"{self._name}: {'; '.join(texts)}", flush=True)
