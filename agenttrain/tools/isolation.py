"""Tools with isolation=process: each call runs in a worker process that can be killed.

A call takes an idle worker, or starts one. A worker whose call takes too long is killed with all
that it started. Workers end with this process, even if that is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from agenttrain.tools.config import ToolLimits
from agenttrain.tools.isolation_worker import Recipe, WorkerRequest, build
from agenttrain.tools.reply import MAX_RESULT_CHARS, Reply, reply_from_json
from agenttrain.tools.tool import call_optional
from agenttrain.types import ToolContext, ToolUnavailable
from agenttrain.utils.child_process import ChildProcess
from agenttrain.utils.keeper import ADOPTS
from agenttrain.utils.threads import DaemonThreads

START_S = 120.0
"""Seconds for a worker to import and build its tool."""
CLOSE_S = 2.0
"""Seconds for tools in workers to release or close what they hold."""
END_S = 5.0
"""Seconds to wait at the end until killed workers, and what they started, have ended."""
CHECK_S = 0.2
"""Seconds between two checks that a silent worker is still alive."""


class ToolWorker:
    """One worker process of a `ProcessTool`, which runs one call at a time.

    `ProcessTool` calls `start`, then `request` for each call, at the end `kill`, and `reap`
    until that returns True. `request` blocks the calling thread. Any thread may call `kill`.

    Messages to the worker are pickles, since a recipe and a context hold Python objects. Answers
    are JSON: unpickling what a tool's process sends could run any code here.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.name = recipe.name
        self.busy = False
        """True from a request to its reply. A worker that is given back busy is killed."""
        self.served: set[str] = set()
        """Rollouts that are not over and whose calls this worker has run; `BoundWorker` adds them,
        and `ProcessTool.release` moves them to `unreported_ends`."""
        self.unreported_ends: list[str] = []
        """Rollouts of `served` that have ended. The next request names them, and the worker's tool
        releases them."""
        self._recipe = recipe
        # An answer holds up to MAX_RESULT_CHARS characters. JSON takes at most 12 bytes for one: an
        # emoji is written as \ud83d\ude00. The other 4 leave room for the reply's other fields.
        self._max_answer_bytes = 16 * MAX_RESULT_CHARS
        self._lock = threading.Lock()
        """Guards `_killed` and `process`: `kill` may come while a thread is in `start`."""
        self._killed = False
        self.process: ChildProcess | None = None
        """None until `start`."""

    @property
    def alive(self) -> bool:
        """True while the worker can take a call."""
        return not self._killed and self.process is not None and self.process.alive

    def start(self) -> None:
        """Start the process and build the tool in it; raises ToolUnavailable."""
        parent_end, worker_end = socket.socketpair()
        command = [
            sys.executable,
            "-c",
            "from agenttrain.tools.isolation_worker import main; main()",
        ]
        try:
            with self._lock:
                if self._killed:
                    raise ToolUnavailable(f"tool {self.name}: was closed")
                self.process = ChildProcess(
                    [*command, str(worker_end.fileno())],
                    pass_fds=(worker_end.fileno(),),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                )
                self._socket = parent_end  # for `kill`, to wake a thread that reads
                # A copy of the descriptor, because `_connection` and `_socket` each close their own
                # and would otherwise close the same number twice.
                self._connection = Connection(os.dup(parent_end.fileno()))
        except BaseException:
            # With a process, `ProcessTool` kills the worker, and `reap` closes the socket.
            if self.process is None:
                parent_end.close()
            raise
        finally:
            worker_end.close()
        # PYTHONPATH serves to import this package; the worker then sets exactly this path.
        self._connection.send_bytes(json.dumps(sys.path).encode())
        problem = self._exchange(self._recipe, limit_s=START_S).get("problem")
        if problem is not None:
            raise ToolUnavailable(f"tool {self.name}: cannot be built in a worker: {problem}")

    def request(self, request: WorkerRequest) -> Reply:
        """Return the worker's reply; raises ToolUnavailable if it died or sent no reply."""
        answer = self._exchange(request, limit_s=None)
        try:
            return reply_from_json(answer)
        except (KeyError, TypeError, IndexError, ValueError) as wrong:
            self.kill()
            raise ToolUnavailable(f"tool {self.name}: its worker answered {answer}") from wrong

    def take_unreported_ends(self) -> tuple[str, ...]:
        """Return the ended rollouts that the next request reports, and count them as reported."""
        rollout_ids, self.unreported_ends = tuple(self.unreported_ends), []
        return rollout_ids

    def kill(self) -> None:
        """Kill the process with all that it started, without waiting; harmless if it is dead."""
        with self._lock:
            self._killed = True
            process = self.process
        if process is None:
            return
        process.signal(signal.SIGKILL)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for an answer

    def reap(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s` for a killed worker to end; if it has, close its files.

        Returns True once it has ended.
        """
        if self.process is None:
            return True
        if not self.process.wait_for_end(timeout_s):
            return False
        self.process.kill()  # for processes that the worker left behind; also closes our files
        self._socket.close()
        return True

    def _exchange(
        self, message: Recipe | WorkerRequest, *, limit_s: float | None
    ) -> dict[str, Any]:
        """Send a message and return the answer, within `limit_s` seconds; None: no limit.

        Raises ToolUnavailable if the worker is dead or late, or its answer cannot be read.
        """
        try:
            self._connection.send_bytes(pickle.dumps(message))
        except OSError:
            raise self._death_error() from None
        except Exception as error:  # pickle raises errors of any type
            raise ToolUnavailable(
                f"tool {self.name}: isolation=process cannot send what it needs: {error}"
            ) from error
        deadline = time.monotonic() + (limit_s or float("inf"))
        try:
            while not self._connection.poll(CHECK_S):
                if not self.alive or time.monotonic() > deadline:
                    raise self._death_error()
            answer = json.loads(self._connection.recv_bytes(self._max_answer_bytes))
        except (EOFError, OSError, ValueError):  # the answer is missing, too long, or not JSON
            raise self._death_error() from None
        return answer if isinstance(answer, dict) else {}

    def _death_error(self) -> ToolUnavailable:
        """Return the error that says how the worker ended, and kill what is left of it."""
        assert self.process is not None
        how_it_ended = self.process.gone_error()
        self.kill()
        return ToolUnavailable(f"tool {self.name}: its worker process {how_it_ended}")


class ProcessTool:
    """A function or callable class whose calls run in worker processes.

    The toolbox takes a worker with `worker()` and calls that. Each worker has an object of its own:
    the state that one call leaves in it, the next call may not find. A worker is idle, busy with a
    request, or dying: killed, but it or a process that it started has not ended yet.

    Example: ``ProcessTool("lookup", functools.partial(FunctionTool, my_pkg.lookup), ToolLimits())``
    """

    def __init__(self, name: str, make: Callable[[], object], limits: ToolLimits) -> None:
        """Make the tool once in this process, for its schema; `make` is pickled for the workers.

        Raises ValueError for a tool that cannot run in another process.
        """
        if os.name != "posix":
            raise ValueError(f"tools.{name}.isolation=process: needs Linux or macOS")
        # On Linux a worker's keeper adopts, and so can kill, what the worker's processes leave.
        if not ADOPTS:
            warnings.warn(
                f"tools.{name}.isolation=process: this system ends the process group of a worker; "
                "what leaves the group (setsid, start_new_session=True) outlives its call, except "
                "on Linux with /proc",
                RuntimeWarning,
                stacklevel=2,
            )
        self.name = name
        self._recipe = Recipe(name=name, make=make, faults=tuple(limits.retry_on))
        """All that a worker needs to build the tool."""
        self._local = build(self._recipe)
        """The tool as this process has it, for its schema; it runs no calls."""
        self.schema = self._local.schema
        self.releases = hasattr(self._local.function, "release")
        """True if workers free something at the end of a rollout."""
        self.sends_context = self._local.takes_context
        """True if the function has a parameter for the call's context."""
        self._threads = DaemonThreads()
        self._idle: list[ToolWorker] = []
        self._all: set[ToolWorker] = set()
        """The idle workers and the busy ones."""
        self._dying: list[ToolWorker] = []

    @property
    def workers(self) -> int:
        """Worker processes that run."""
        return len(self._all)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[BoundWorker]:
        """Lend a worker for one call; kill the worker afterwards if the call is not over."""
        self._dying = [worker for worker in self._dying if not worker.reap()]
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                break
            self._kill(worker)
        else:  # there is no idle worker
            worker = ToolWorker(self._recipe)
            self._all.add(worker)
            try:
                outcome = await self._threads.run(worker.start, label=self.name)
                if outcome.error is not None:
                    problem = f"tool {self.name}: no worker process: {outcome.error}"
                    raise ToolUnavailable(problem) from outcome.error
            except BaseException:
                self._kill(worker)
                raise
        try:
            yield BoundWorker(name=self.name, schema=self.schema, tool=self, worker=worker)
        finally:
            self._put_back(worker)

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Run one call in a worker."""
        async with self.worker() as worker:
            return await worker(arguments, context)

    async def release(self, rollout_id: str) -> None:
        """Let the objects in the workers free what they hold for a rollout."""
        served = [worker for worker in self._all if rollout_id in worker.served]
        for worker in served:
            worker.served.discard(rollout_id)
            worker.unreported_ends.append(rollout_id)
        # A busy worker is told by its next request.
        idle = [worker for worker in served if worker in self._idle]
        await self._notify(idle)

    async def close(self) -> None:
        """Close the objects in the workers, and end all workers."""
        # A busy worker answers no request: its objects end with it.
        await self._notify(list(self._idle), close=True)
        for worker in list(self._all):
            self._kill(worker)  # moves it to `_dying`
        dying, self._dying = self._dying, []
        deadline = time.monotonic() + END_S

        def reap_all() -> None:
            """Wait until all have ended, but not beyond the deadline: a thread's body."""
            for worker in dying:
                worker.reap(max(deadline - time.monotonic(), 0.0))

        await self._threads.run(reap_all)
        self._threads.close()
        # A worker's keeper runs on while a process that the worker started cannot be killed.
        running = [str(w.process.pid) for w in dying if w.process is not None and not w.reap()]
        if running:
            warnings.warn(
                f"tool {self.name}: what its calls started has not ended, below the processes "
                f"{', '.join(running)}",
                RuntimeWarning,
                stacklevel=2,
            )
        await call_optional(self._local.function, "close")

    def _put_back(self, worker: ToolWorker) -> None:
        if worker.busy or not worker.alive:
            self._kill(worker)
        else:
            self._idle.append(worker)

    def _kill(self, worker: ToolWorker) -> None:
        """Kill a worker, if it lives, and move it to `_dying` until it has ended."""
        worker.kill()
        if worker in self._all:
            self._all.remove(worker)
            self._dying.append(worker)

    async def ask(self, worker: ToolWorker, request: WorkerRequest) -> Reply:
        """Send a request and return the reply; cancelling this kills the worker."""
        # Any error here, and a cancellation, leave it busy: `_put_back` must not lend it again.
        worker.busy = True
        try:
            outcome = await self._threads.run(lambda: worker.request(request), label=self.name)
        except asyncio.CancelledError:
            self._kill(worker)  # at once: its call must not run on
            raise
        worker.busy = False
        if isinstance(outcome.value, Reply):
            return outcome.value
        if outcome.error is not None:
            raise outcome.error
        raise ToolUnavailable(f"tool {self.name}: no reply")

    async def _notify(self, workers: Iterable[ToolWorker], *, close: bool = False) -> None:
        """Send idle workers a request without a call, and wait CLOSE_S at most for the answers.

        The request names the rollouts that have ended and, with `close`, has the tools closed.
        """
        tasks: dict[ToolWorker, asyncio.Task[Reply]] = {}
        for worker in workers:
            self._idle.remove(worker)
            message = WorkerRequest(released=worker.take_unreported_ends(), close=close)
            tasks[worker] = asyncio.create_task(self.ask(worker, message))
        if tasks:
            _, late = await asyncio.wait(tasks.values(), timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        for worker in tasks:
            self._put_back(worker)


@dataclass(slots=True, kw_only=True, eq=False)
class BoundWorker:
    """A worker that is lent for one call.

    The toolbox counts the tool's time limit from `__call__` on: a worker's start takes longer.
    """

    name: str
    schema: dict[str, Any]
    tool: ProcessTool
    """Owner of the worker."""
    worker: ToolWorker

    async def __call__(self, arguments: dict[str, Any], context: ToolContext) -> object:
        """Run one call; cancelling it kills the worker."""
        tool, worker = self.tool, self.worker
        if tool.releases:  # so that `ProcessTool.release` finds this worker
            worker.served.add(context.rollout_id)
        request = WorkerRequest(
            released=worker.take_unreported_ends(),
            arguments=arguments,
            context=context if tool.sends_context else None,
        )
        return await tool.ask(worker, request)
