"""Servers of roles: how a run starts them, and how it calls a judge, a user or a teacher on them.

Their files are those of the policy's servers, in a folder of each role::

    <run>/roles/judge/servers/plan.json, 0.json, 0.log, …

The run's first process starts the wrappers. Every process that calls the servers reads their
addresses from the records, also after a server was started again.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import StartedServers
from agenttrain.engines.vllm_server.client import ServerClient
from agenttrain.engines.vllm_server.frozen import FrozenFleet
from agenttrain.engines.vllm_server.local import LocalServers
from agenttrain.engines.vllm_server.server_records import (
    FOLDER,
    Condition,
    ServerPlan,
    last_lines,
    read_record,
)
from agenttrain.engines.vllm_server.status import OF_PROCESSES, OF_ROLES
from agenttrain.engines.vllm_server.watched import StartProgress
from agenttrain.utils.chat_api import ChatUnavailable, Transient
from agenttrain.utils.role_names import ROLE, role_named

SALT = "frozen"
"""Salt of the servers' prefix cache. It stays the same, because the weights do: entries of earlier
requests can always be used. The policy's servers get another salt with each version."""
AT_ONCE = 64
"""Sequences that one process scores at once on each server."""
CLOSE_S = 10.0
"""Seconds in which cancelled requests have to end."""
POLL_S = 0.2
"""Seconds between two readings of the record of a server that starts."""
T = TypeVar("T")


def role_folder(run: Path, role: str) -> Path:
    """Return the folder of a role's servers in a run's."""
    return run / OF_ROLES / role


def start_role(run: Path, plan: ServerPlan) -> LocalServers:
    """Start the servers of a role. Raises EngineError if earlier ones still run."""
    assert plan.role is not None
    folder = role_folder(run.resolve(), plan.role)
    shutil.rmtree(folder / FOLDER / OF_PROCESSES, ignore_errors=True)
    servers = LocalServers(folder, plan, plan.servers["count"])
    servers.start()
    return servers


async def await_start(folder: Path, role: str, count: int) -> None:
    """Wait until all servers of a role have answered. Raises EngineError if one has ended."""
    waiting, progress = [*range(count)], StartProgress(folder, f"roles.{role}", count)
    while waiting:
        for number in [*waiting]:  # a copy: ready servers are removed
            record = read_record(folder, number)
            if record is None:
                continue
            # The wrapper, the process that starts the server and writes its record. If it ends
            # between the reading and this check, its last record is not read yet: read it again.
            wrapper_runs = record.wrapper_exists
            if not wrapper_runs:
                record = read_record(folder, number) or record
            if record.condition is Condition.ready:
                waiting.remove(number)
            elif record.condition is Condition.gone or not wrapper_runs:
                is_gone = record.condition is Condition.gone
                end = record.end if is_gone else "lost its wrapper"
                raise EngineError(
                    f"roles.{role}: {role} server {number} did not start: it {end}; the end "
                    f"of its log:\n{last_lines(folder, number)}"
                )
        progress.report({number: f"server {number}" for number in waiting})
        await asyncio.sleep(POLL_S)


class RoleServers:
    """The servers of a role, for callers in any thread. Implements `ChatBackend`.

    A role is a task of another model in the run, e.g. judge, user or teacher. Its weights are
    frozen: they are not trained. All requests run in the event loop of one thread, which the first
    request starts and `close` ends. Callers block until theirs is answered.
    """

    def __init__(self, run: Path, role: str, servers: StartedServers) -> None:
        """`run` is the run's folder. Its first process starts the servers, with `start_role`."""
        self.name = f"{ROLE}{role}"
        self._folder, self._role, self._servers = role_folder(run, role), role, servers
        self._lock = threading.Lock()
        """Guards `_loop` and `_fleet`, which callers, the loop's thread and `close` change."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the thread. None: no request has come yet, or `close` was called."""
        self._fleet: FrozenFleet | None = None
        self._numbers = itertools.count()
        """Numbers of the requests for scores."""

    def complete(self, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Implement `ChatBackend.complete`. The timeout does not count waiting for a server."""
        request = {**body, "model": self._role}  # the servers have the model under this name

        async def ask(client: ServerClient) -> Any:
            async with asyncio.timeout(timeout_s):
                return await client.chat(request)

        # Conversations with the same beginning go to the server that has it in its prefix cache.
        session = str(body["messages"][:2])
        try:
            return self._run(lambda fleet: fleet.send(session, ask))
        except TimeoutError as error:
            raise Transient(f"{self.name}: no answer within {timeout_s:g} s") from error
        except EngineError as error:
            raise ChatUnavailable(str(error)) from error

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of every id after the first, for each sequence.

        Raises EngineError and RoleLost.
        """
        return self._run(lambda fleet: self._score(fleet, sequences))

    async def _score(
        self, fleet: FrozenFleet, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Score the sequences at once, by at most `AT_ONCE` requests per server."""
        slots = asyncio.Semaphore(AT_ONCE * self._servers.count)

        async def score_one(token_ids: Sequence[int]) -> list[float]:
            name = f"score-{next(self._numbers)}"
            async with slots:
                return await fleet.send(
                    name, lambda client: client.score(token_ids, salt=SALT, request_id=name)
                )

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(score_one(token_ids)) for token_ids in sequences]
        return [task.result() for task in tasks]

    def _run(self, call: Callable[[FrozenFleet], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a call in the requests' own thread, which the first one starts."""

        async def run() -> T:
            """Make the fleet if this is the first request, and call it."""
            with self._lock:
                # `close` has come in between: it has set `_loop` to None, and a later request may
                # have started another one. Nobody would close a fleet that is made here.
                if self._loop is not asyncio.get_running_loop():
                    raise EngineError(f"{self.name}: was closed before a request")
                if self._fleet is None:
                    self._fleet = FrozenFleet(self._folder, self._role, self._servers)
                fleet = self._fleet
            return await call(fleet)

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_serve, args=(self._loop,), daemon=True).start()
            # Under the lock, so that `close` cancels this request if it comes later.
            future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        # From the task group of `_score`, which scores many sequences: the first failure stands for
        # all. A call of `complete` raises its own error.
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        except CancelledError as error:
            raise EngineError(f"{self.name}: was closed in the middle of a request") from error

    def close(self) -> None:
        """End the thread. Requests in flight fail. A later request starts another thread."""
        with self._lock:
            loop, self._loop = self._loop, None
            fleet, self._fleet = self._fleet, None
        if loop is None:
            return

        async def end() -> None:
            """Close the fleet, and cancel the requests of the event loop."""
            if fleet is not None:
                await fleet.aclose()
            requests = asyncio.all_tasks() - {asyncio.current_task()}
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), loop).result(CLOSE_S)
        loop.call_soon_threadsafe(loop.stop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.close()


def with_servers(section: Mapping[str, Any], roles: Mapping[str, RoleServers]) -> Mapping[str, Any]:
    """Return a component's section with ``url: role:<name>`` replaced by the role's servers."""
    servers = roles.get(role_named(section.get("url")) or "")
    return section if servers is None else {**section, "url": servers}
