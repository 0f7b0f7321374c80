"""Servers of roles: how a run starts them, and how a judge, a user or a teacher asks them.

    <run>/roles/judge/servers/plan.json, 0.json, 0.log, …    the files that the policy's servers
                                                             have in <run>/servers

The run's first process starts the wrappers. Every process that asks finds the servers by their
records, also those that were started again.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from agenttrain.engines.base import EngineError
from agenttrain.engines.config import StartedServers
from agenttrain.engines.vllm_server.client import ServerClient
from agenttrain.engines.vllm_server.config import OneServer, RoleConfig, VllmServerSettings
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
from agenttrain.utils.sections import plain

SALT = "frozen"
"""Salt of a frozen model's prefix cache: its keys and values never grow old."""
AT_ONCE = 64
"""Sequences that each server scores at once for one process."""
CLOSE_S = 10.0
"""Seconds within which requests in flight end once they are cancelled."""
LOOK_S = 0.2
"""Seconds between two looks at the record of a server that starts."""
T = TypeVar("T")


def role_folder(run: Path, role: str) -> Path:
    """Return the folder of a role's servers in a run's."""
    return run / OF_ROLES / role


def role_plan(
    role: str,
    settings: RoleConfig,
    model: Path,
    *,
    module: str,
    dtype: str,
    max_context: int,
    seed: int,
    gpus: tuple[tuple[int | str, ...], ...] | None,
) -> ServerPlan:
    """Return how a role's servers are started."""
    engine = VllmServerSettings(
        max_context=max_context,
        **{one.name: getattr(settings, one.name) for one in fields(OneServer)},
    )
    started = StartedServers(
        **{one.name: getattr(settings, one.name) for one in fields(StartedServers)}
    )
    return ServerPlan(
        module=module,
        model=str(model),
        tokenizer=str(model),
        dtype=dtype,
        max_context=max_context,
        seed=seed,
        engine=plain(engine),
        servers=plain(started),
        rank=0,
        adapters=0,
        weights=None,
        gpus=gpus,
        role=role,
    )


def start_role(run: Path, plan: ServerPlan) -> LocalServers:
    """Start the servers of a role; raises EngineError if those of an earlier process still run."""
    assert plan.role is not None
    folder = role_folder(run.resolve(), plan.role)
    shutil.rmtree(folder / FOLDER / OF_PROCESSES, ignore_errors=True)
    return LocalServers(folder, plan, plan.servers["count"])


async def all_started(folder: Path, role: str, count: int) -> None:
    """Wait until all servers of a role have answered; raises EngineError if one has ended."""
    waiting, progress = [*range(count)], StartProgress(folder, f"roles.{role}", count)
    while waiting:
        for number in [*waiting]:
            record = read_record(folder, number)
            killed = record is not None and not record.wrapper_exists
            if killed:  # its last words may have come since
                record = read_record(folder, number)
            gone = record is not None and record.condition is Condition.gone
            if record is not None and record.condition is Condition.ready:
                waiting.remove(number)
            elif killed or gone:
                end = record.end if gone and record is not None else "lost its wrapper"
                raise EngineError(
                    f"roles.{role}: {role} server {number} did not start: it {end}; the end "
                    f"of its log:\n{last_lines(folder, number)}"
                )
        progress.report({number: f"server {number}" for number in waiting})
        await asyncio.sleep(LOOK_S)


class RoleServers:
    """The servers of a role, for callers in any thread; implements `ChatBackend`.

    The requests have an event loop in a thread of its own, from the first one to `close`.
    """

    def __init__(self, run: Path, role: str, servers: StartedServers) -> None:
        self.name = f"{ROLE}{role}"
        self._folder, self._role, self._servers = role_folder(run, role), role, servers
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fleet: FrozenFleet | None = None
        self._numbers = itertools.count()

    def complete(self, body: Mapping[str, Any], *, timeout_s: float) -> Any:
        """Implement `ChatBackend.complete`; waiting for a server does not count as a request."""
        request = {**body, "model": self._role}

        async def ask(client: ServerClient) -> Any:
            async with asyncio.timeout(timeout_s):
                return await client.chat(request)

        # A conversation stays on the server that has its beginning in the prefix cache.
        session = str(body["messages"][:2])
        try:
            return self._run(lambda fleet: fleet.send(session, ask))
        except TimeoutError as error:
            raise Transient(f"{self.name}: no answer within {timeout_s:g} s") from error
        except EngineError as error:
            raise ChatUnavailable(str(error)) from error

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability, at temperature 1, of every id of each sequence but the first.

        Raises EngineError for a sequence that the servers refuse or die of, RoleLost.
        """
        return self._run(lambda fleet: self._score(fleet, sequences))

    async def _score(
        self, fleet: FrozenFleet, sequences: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        slots = asyncio.Semaphore(AT_ONCE * self._servers.count)

        async def one(token_ids: Sequence[int]) -> list[float]:
            name = f"score-{next(self._numbers)}"
            async with slots:
                return await fleet.send(
                    name, lambda client: client.score(token_ids, salt=SALT, request_id=name)
                )

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(token_ids)) for token_ids in sequences]
        return [task.result() for task in tasks]

    def _run(self, call: Callable[[FrozenFleet], Coroutine[Any, Any, T]]) -> T:
        """Return the result of a call in the thread of the requests."""

        async def called() -> T:
            with self._lock:
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
            # Under the lock: `close` comes before this request, or cancels it.
            result = asyncio.run_coroutine_threadsafe(called(), self._loop)
        try:
            return result.result()
        except BaseExceptionGroup as errors:  # of the scores, the first to fail
            raise errors.exceptions[0] from errors
        except CancelledError as error:
            raise EngineError(f"{self.name}: was closed in the middle of a request") from error

    def close(self) -> None:
        """End the thread; requests in flight fail. A later request begins another one."""
        with self._lock:
            loop, self._loop = self._loop, None
            fleet, self._fleet = self._fleet, None
        if loop is None:
            return

        async def end() -> None:
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
    """Return a component's section with the servers in the place of ``url: role:<name>``."""
    servers = roles.get(role_named(section.get("url")) or "")
    return section if servers is None else {**section, "url": servers}
