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

from agenttrain.agents.command_agent import LAST_WORDS, make_command, parse_result, start
from agenttrain.agents.output import PAUSE_S, BoundedLog
from agenttrain.agents.task import AgentFailed, AgentTask, agent_reward
from agenttrain.utils.child_process import LAST_WORDS_S, how_ended

LINE_LIMIT = 2**24
"""Bytes of a line that a worker prints, at most."""
SHARED_LOG_BYTES = 64 << 20
"""Bytes of the output of a worker with several tasks at once that are kept, from the beginning."""


class Worker:
    """A process that attempts rollouts, one after the other or several at once.

    `WorkerAgent` makes it and calls `attempt` for each rollout, and `end` once it is `retired` or
    the run ends. A task of the event loop reads the process's output all the while.

    If the process cannot be started, every `attempt` fails. If it ends, rollouts without a result
    fail (`_read`).
    """

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        """Start the process in the background."""
        self.log: BoundedLog | None = None
        """Gets the lines that it prints, except results. `WorkerAgent` sets it. None: dropped."""
        self.pending: dict[str, asyncio.Future[dict[str, Any]]] = {}
        """Id of each rollout that it attempts now -> future of the result."""
        self.retired = False
        """It gets no further task: it has ended, or may still work on a rollout that was ended."""
        self._starting = asyncio.ensure_future(start(command, env, line_limit=LINE_LIMIT))
        self._stderr_tail = b""
        self._reading = asyncio.ensure_future(self._read())

    async def attempt(self, assignment: AgentTask) -> float | None:
        """Send a task; return the reward in its result. Raises AgentFailed."""
        result = asyncio.get_running_loop().create_future()
        self.pending[assignment.rollout_id] = result
        try:
            line = assignment.line()
            # Shielded, because `_read` and other attempts wait for the start too.
            program = await asyncio.shield(self._starting)
            await program.send(line)
            return agent_reward((await result).get("reward"))
        except BaseException:
            self.retired = True  # cancelled, or failed: the process may still work on this rollout
            raise
        finally:
            del self.pending[assignment.rollout_id]

    async def end(self) -> None:
        """Wait until the process has started, then kill it with all that it has started."""
        self.retired = True
        await asyncio.wait((self._starting,))
        if self._starting.exception() is None:
            await self._starting.result().end()
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        """Deliver results until the process ends, then fail the rollouts that have none."""
        process = await self._starting  # if this raises, it does so in each `attempt` too
        errors = asyncio.ensure_future(self._read_errors(process.stderr))
        try:
            while line := await process.stdout.readline():
                self._handle_line(line)
                if self.log is not None and self.log.full:
                    # A flood of output leaves time for other rollouts. No longer pause, because the
                    # next line may be a result.
                    await asyncio.sleep(0)
            failure = how_ended(await process.wait())
            # The message of a crash is at the end of stderr, which may arrive after the end.
            await asyncio.wait((errors,), timeout=LAST_WORDS_S)
        except AgentFailed as error:
            failure = str(error)
        except (OSError, ValueError) as error:  # ValueError: a line longer than LINE_LIMIT
            failure = f"printed what cannot be read: {error}"
        finally:
            errors.cancel()
        self.retired = True
        if words := self._stderr_tail.decode("utf-8", "replace").strip():
            failure += f"; it printed: {words}"
        for result in self.pending.values():
            if not result.done():
                result.set_exception(AgentFailed(failure))

    def _handle_line(self, line: bytes) -> None:
        """Deliver a line that is a result to its rollout, else log it. Raises AgentFailed."""
        result = parse_result(line)
        if result is not None:
            # With one rollout at a time the result need not name it.
            only_id = next(iter(self.pending)) if len(self.pending) == 1 else None
            future = self.pending.get(str(result.get("rollout_id", only_id)))
            if future is not None and not future.done():
                future.set_result(result)
                return
        self._write(line)

    async def _read_errors(self, stream: asyncio.StreamReader) -> None:
        while piece := await stream.read(65536):
            self._stderr_tail = (self._stderr_tail + piece)[-LAST_WORDS:]  # an error quotes it
            self._write(piece)
            if self.log is not None and self.log.full:
                await asyncio.sleep(PAUSE_S)  # stderr has no results: slow down a flood of output

    def _write(self, text: bytes) -> None:
        if self.log is not None:
            self.log.write(text)


class WorkerAgent:
    """Workers: processes that are used again for further rollouts.

    A worker is retired, and ended after its other rollouts, once one of its rollouts failed or was
    ended in the middle: it may still work on that one. An `OutsideAgent`: `Agents` calls `attempt`
    for each rollout, and `aclose` at last.
    """

    def __init__(
        self,
        command: Callable[[], Sequence[str]],
        env: dict[str, str],
        folder: Path,
        *,
        at_once: int = 1,
    ) -> None:
        """`command` returns the command of a worker, which has up to `at_once` rollouts at a time.

        A worker of one rollout at a time logs into the file of each rollout. Any other mixes their
        output, and logs into a file of its own in `folder`.
        """
        self._command, self._env = command, env
        self._folder, self._at_once = folder, at_once
        self._logs_by_rollout = at_once == 1
        self._workers: list[Worker] = []
        self._count = 0
        """Workers started so far, which numbers their logs."""
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of `_workers`."""

    async def attempt(self, assignment: AgentTask, log: Path) -> float | None:
        """Attempt a rollout in a running worker that can take it, or in a new one."""
        for retired in [w for w in self._workers if w.retired and not w.pending]:
            await self._end(retired)
        worker = self._worker_with_room()
        if self._logs_by_rollout:
            worker.log = BoundedLog(log.with_suffix(".log"))
        try:
            return await worker.attempt(assignment)
        finally:
            if self._logs_by_rollout and worker.log is not None:
                worker.log.close()
                worker.log = None
            if worker.retired and not worker.pending:
                await asyncio.shield(self._end(worker))

    def _worker_with_room(self) -> Worker:
        """Return the busiest worker that can take one more rollout, or start a worker."""
        if self._loop is not asyncio.get_running_loop():
            # The pipes of earlier workers belong to the loop in which they began, which is over.
            # No process can be awaited here, so these are only dropped.
            self._loop, self._workers = asyncio.get_running_loop(), []
        free = [w for w in self._workers if not w.retired and len(w.pending) < self._at_once]
        if free:
            return max(free, key=lambda worker: len(worker.pending))
        worker = Worker(make_command(self._command), self._env)
        if not self._logs_by_rollout:
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"worker-{self._count}.log"
            worker.log = BoundedLog(path, limit=SHARED_LOG_BYTES, append=True)
        self._count += 1
        self._workers.append(worker)
        return worker

    async def _end(self, worker: Worker) -> None:
        if worker in self._workers:  # another attempt may have ended it already
            self._workers.remove(worker)
            await worker.end()
            if worker.log is not None:
                worker.log.close()

    async def aclose(self) -> None:
        for worker in list(self._workers):
            await self._end(worker)
