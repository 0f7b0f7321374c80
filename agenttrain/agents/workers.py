"""Agents as programs that are used again: workers, which attempt many rollouts each.

A worker reads a task from a line of its standard input, and prints a JSON object when it is done
with one. With several at once it names the rollout in that object::

    {"rollout_id": "step-1/task-3/0", "reward": 1}
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agenttrain.agents.output import PAUSE_S, BoundedLog
from agenttrain.agents.processes import (
    LAST_WORDS,
    make_command,
    parse_result,
    start,
)
from agenttrain.agents.task import AgentFailed, AgentTask, agent_reward
from agenttrain.utils.child_process import LAST_WORDS_S, how_ended

LINE_LIMIT = 2**24
"""Bytes of a line that a worker prints, at most."""
SHARED_LOG_BYTES = 64 << 20
"""Bytes of the output of a worker with several tasks at once that are kept, from the beginning."""


class Worker:
    """A process that attempts rollouts."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        """Start it in the background."""
        self.log: BoundedLog | None = None
        """Gets what it prints, its results left out."""
        self.pending: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Rollout in its hands -> its result."""
        self.retired = False
        """It gets no further task: it ended, or did not end one of its rollouts in time."""
        self._starting = asyncio.ensure_future(start(command, env, line_limit=LINE_LIMIT))
        self._words = b""
        self._reading = asyncio.ensure_future(self._read())

    async def attempt(self, assignment: AgentTask) -> float | None:
        """Send a task; return the reward in its result. Raises AgentFailed."""
        result = asyncio.get_running_loop().create_future()
        self.pending[assignment.rollout_id] = result
        try:
            line = assignment.line()
            program = await asyncio.shield(self._starting)
            await program.send(line)
            return agent_reward((await result).get("reward"))
        except BaseException:
            self.retired = True
            raise
        finally:
            del self.pending[assignment.rollout_id]

    async def end(self) -> None:
        """End the process."""
        self.retired = True
        await asyncio.wait((self._starting,))
        if self._starting.exception() is None:
            await self._starting.result().end()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        """Hand results over until the process ends; that fails the rollouts in its hands."""
        process = await self._starting
        errors = asyncio.ensure_future(self._read_errors(process.stderr))
        try:
            while line := await process.stdout.readline():
                self._take(line)
                if self.log is not None and self.log.full:
                    await asyncio.sleep(0)
            how = how_ended(await process.wait())
            await asyncio.wait((errors,), timeout=LAST_WORDS_S)
        except AgentFailed as error:
            how = str(error)
        except (OSError, ValueError) as error:  # a line without an end
            how = f"printed what cannot be read: {error}"
        finally:
            errors.cancel()
        self.retired = True
        words = self._words.decode("utf-8", "replace").strip()
        quoted = f"; it printed: {words}" if words else ""
        for result in self.pending.values():
            if not result.done():
                result.set_exception(AgentFailed(f"{how}{quoted}"))

    def _take(self, line: bytes) -> None:
        """Hand a line to its rollout if it is a result, else to the log. Raises AgentFailed."""
        printed = parse_result(line)
        if printed is not None:
            only = next(iter(self.pending), None) if len(self.pending) == 1 else None
            result = self.pending.get(str(printed.get("rollout_id", only)))
            if result is not None and not result.done():
                result.set_result(printed)
                return
        self._write(line)

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(65536):
            self._words = (self._words + piece)[-LAST_WORDS:]
            self._write(piece)
            if self.log is not None and self.log.full:
                await asyncio.sleep(PAUSE_S)

    def _write(self, text: bytes) -> None:
        if self.log is not None:
            self.log.write(text)


class WorkerAgent:
    """Workers that are used again for further rollouts, unless one was ended in the middle."""

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        env: dict[str, str],
        folder: Path,
        *,
        at_once: int = 1,
    ) -> None:
        """`command` returns a new worker's, which attempts `at_once` rollouts at a time."""
        self._command, self._env = command, env
        self._folder, self._at_once = folder, at_once
        self._workers: list[Worker] = []
        self._count = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Attempt a rollout in a worker that has a place for it, or in a new one."""
        for retired in [w for w in self._workers if w.retired and not w.pending]:
            await self._end(retired)
        worker = self._free()
        if self._at_once == 1:
            worker.log = BoundedLog(log.with_suffix(".log"))
        try:
            return await worker.attempt(assignment)
        finally:
            if self._at_once == 1 and worker.log is not None:
                worker.log.close()
                worker.log = None
            if worker.retired and not worker.pending:
                await asyncio.shield(self._end(worker))

    def _free(self) -> Worker:
        """Return a worker that may take a rollout; the fullest one, so that few are needed."""
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._workers = asyncio.get_running_loop(), []
        places = [w for w in self._workers if not w.retired and len(w.pending) < self._at_once]
        if places:
            return max(places, key=lambda worker: len(worker.pending))
        worker = Worker(make_command(self._command), self._env)
        if self._at_once > 1:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"worker-{self._count}.log"
            worker.log = BoundedLog(path, limit=SHARED_LOG_BYTES, append=True)
        self._count += 1
        self._workers.append(worker)
        return worker

    async def _end(self, worker: Worker) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
            await worker.end()
            if worker.log is not None:
                worker.log.close()

    async def aclose(self) -> None:
        """End all workers."""
        for worker in list(self._workers):
            await self._end(worker)
