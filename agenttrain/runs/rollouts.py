"""The rollout process as the training processes see it.

The first training process starts it and has a `RolloutProcess`. All training processes have a
`Rollouts`, whose methods they call together, as those of `World`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agenttrain.engines.base import EngineDead, EngineRestarted
from agenttrain.rollout.monitoring import InFlight, Waiting
from agenttrain.runs.channel import Channel, ChannelClosed
from agenttrain.runs.rollout_messages import (
    CODEC,
    EndRequest,
    RequestFailure,
    RequestResult,
    RolloutStatus,
    StartRequest,
)
from agenttrain.runs.rollout_process import STACKS
from agenttrain.training.world import PeerFailed, World
from agenttrain.utils.child_process import ChildProcess
from agenttrain.utils.signals import StopRequest

MODULE = "agenttrain.runs.rollout_process"
STACKS_S = 1.0
"""Seconds that the rollout process has to print the stacks of its threads."""
END_S = 30.0
"""Seconds that the rollout process has to close its engine and tools before it is killed."""


class RolloutsDead(EngineDead):
    """The rollout process has ended, and the run cannot go on."""


class PeersRolloutsDead(RolloutsDead, PeerFailed):
    """Raised in the other training processes when a request of the first one raised EngineDead."""


class RolloutProcess:
    """Handle of the rollout process in the training process that starts it."""

    def __init__(self, log: Path) -> None:
        """Start the process. Each line that it prints is printed here and appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self.in_flight = InFlight()
        """Its `progress` is the process's counter of requests and rollouts, which the watchdog
        compares. The rollouts themselves are in `waiting()`."""
        self.report_progress: Callable[[int, int], None] | None = None
        """Called with the step's finished rollouts and their total, as `Collector.progress`."""
        self._start_request: StartRequest | None = None
        """The first request, which `restart` sends again."""
        self._start()

    def _start(self) -> None:
        """Start the child process, and forget the state of an earlier one."""
        self._connection, child_end = socket.socketpair()
        arguments = [str(child_end.fileno()), json.dumps(sys.path)]
        command = [sys.executable, "-u", "-m", MODULE, *arguments]
        with child_end:  # closed here once the child has its copy
            # No keeper: it would kill all that the child has started, once the child ends. But the
            # wrapper processes of inference servers have to outlive this child. They end their
            # servers in good order, or serve the process that is started in its place.
            self._child = ChildProcess(
                command, keeper=False, pass_fds=[child_end.fileno()], print_line=self._print
            )
        self._channel: Channel | None = None
        """None until the first request is sent."""
        self._waiting: list[Waiting] = []
        self._ready = False
        """The process has answered StartRequest. Only from then on it notices EndRequest."""

    async def restart(self) -> None:
        """Start a new process in place of the one that has ended, with the same StartRequest.

        Return when its engine is built. The engine has no weights of the policy yet. Raises
        RolloutsDead if the new process ends too, and the error with which the start failed.
        """
        assert self._start_request is not None, "only a process that was started is restarted"
        if self._channel is not None:
            self._channel.close()
        self._child.kill()  # ends what the process has started, and releases its pipes
        self._start()
        await self.ask(self._start_request)

    def waiting(self) -> list[Waiting]:
        """Return the rollouts in flight and what each waits for, as the last RolloutStatus says."""
        return self._waiting

    def print_stacks(self) -> None:
        """Have the process print the stacks of its threads; wait until they are printed here."""
        with suppress(OSError):
            self._child.signal(STACKS)
            time.sleep(STACKS_S)  # a signal has no answer

    async def send(self, request: StartRequest | EndRequest | Any) -> None:
        """Send a request that the codec can write; raises RolloutsDead."""
        if isinstance(request, StartRequest):
            self._start_request = request  # `restart` sends it again
        try:
            if self._channel is None:
                self._channel = await Channel.over(self._connection, CODEC)
            await self._channel.send(request)
        except ChannelClosed as error:
            raise await self._death() from error

    async def answer(self) -> Any:
        """Return the answer to the last request.

        Raises RolloutsDead, and the error that the request raised in the rollout process.
        """
        assert self._channel is not None, "a request was sent"
        while True:
            try:
                message = await self._channel.receive()
            except ChannelClosed as error:
                raise await self._death() from error
            if isinstance(message, RequestResult):
                self._ready = True  # the first result answers StartRequest
                return message.value
            if isinstance(message, RequestFailure):
                raise message.raised()
            # RolloutStatus comes repeatedly while the process works. `progress` counts what happens
            # in rollouts, for the watchdog; `finished` of `total` rollouts are shown to the user.
            assert isinstance(message, RolloutStatus)
            self.in_flight.progress, self._waiting = message.progress, message.waiting
            if self.report_progress is not None and message.total:
                self.report_progress(message.finished, message.total)

    async def ask(self, request: Any) -> Any:
        """Send a request and return its answer; raises as `send` and `answer` do."""
        await self.send(request)
        return await self.answer()

    async def aclose(self) -> None:
        """End the process with its engine and its tools, also in the middle of a request."""
        if self._channel is None:  # nothing was sent yet, so no channel owns the connection
            self._connection.close()
        else:
            with suppress(RolloutsDead):
                await self.send(EndRequest())
            self._channel.close()
        # A process that is still starting notices neither a request nor that the connection is
        # closed: it is killed at once.
        wait_s = END_S if self._ready else 0.0
        await asyncio.to_thread(self._child.wait_for_end, wait_s)
        self._child.kill()

    async def _death(self) -> RolloutsDead:
        """Return the error that says how the process ended."""
        how_it_ended = await asyncio.to_thread(self._child.gone_error)
        log = f" (log: {self._log})" if self._log.exists() else ""
        return RolloutsDead(f"the rollout process{log} {how_it_ended}")

    def _print(self, line: str) -> None:
        with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
        print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """The rollout process of a run, for all training processes together.

    All training processes call each method at the same point: they meet there, by
    `World.exchange`, and raise a failure of one of them in all. The waits are patient: they last
    as long as the other processes live, since a request may take minutes.

    A process that ends by itself is started again, but at most once in a step.
    """

    process: RolloutProcess | None
    """None in all processes but the first."""
    world: World
    stop: StopRequest
    """The run's request to stop, which a signal makes."""
    restartable: bool = False
    """The process is started again if it ends now. `make_remote_source` sets it after the first
    weight sync, a restart clears it, and `RemoteSource.batch` sets it again after each step."""
    restarts: int = 0
    """Number of times that the process was started again."""

    async def ask(self, request: Any, what: str) -> Any:
        """Return the answer in the first process, None in the others; a signal cuts it short.

        `what` names the work in errors. If the request fails, all processes raise, as `meet` does.
        After a signal all processes raise Preempted.
        """
        # A list of one answer, which may itself be None. Empty after a signal, and in the others.
        answers: list[Any] = []
        failure: Exception | None = None
        if self.process is not None:
            try:
                answers = await self.stop.until_stopped(self.process.ask(request))
            except Exception as error:
                failure = error
        await self.meet(what, failure)
        self.stop.check()
        return answers[0] if answers else None

    async def call(self, request: Any, what: str, failure: Exception | None = None) -> Any:
        """Send a request from the first process; return its answer in all. No signal cuts it short.

        With a `failure` of the first process no request is sent. If the request fails, or with such
        a `failure`, all processes raise, as `meet` does.
        """
        value = None
        if self.process is not None and failure is None:
            try:
                value = await self.process.ask(request)
            except Exception as error:
                failure = error
        await self.meet(what, failure)
        return self.world.broadcast(value, what)

    async def meet(self, what: str, failure: Exception | None) -> None:
        """Raise the first process's failure in all processes, if there is one.

        The first process owns the rollout process, in which the engine is. Its `failure` is one of

        - RolloutsDead: the rollout process has ended. If it is restartable, it is started again,
          and all processes raise EngineRestarted. Otherwise all raise an EngineDead.
        - another EngineDead: the engine has ended, in a process that goes on. All raise an
          EngineDead, so that all of them save the last finished step.
        - any other error: raised in the first process, and as PeerFailed in the others.

        The others, which have no failure, raise PeersRolloutsDead as their EngineDead.
        """
        dead = failure if isinstance(failure, EngineDead) else None
        # (message, whether the rollout process has ended); only the first process may have one.
        own_deaths = [] if dead is None else [(str(dead), isinstance(dead, RolloutsDead))]
        other_failure = failure if dead is None else None
        # Gathers the deaths, and raises another failure in all processes.
        deaths = self.world.exchange(own_deaths, what, other_failure, patient=True)
        if not deaths:
            return
        message, process_ended = deaths[0]
        if process_ended:
            message = await self._raise_restarted_or_explain(message)
        if dead is None:  # in the other processes
            raised: EngineDead = PeersRolloutsDead(message)
        else:
            raised = RolloutsDead(message) if process_ended else dead
        raised.everywhere = True  # so that the trainer lets all processes save together
        raise raised

    async def _raise_restarted_or_explain(self, message: str) -> str:
        """Start the rollout process again, and raise EngineRestarted.

        If that is not allowed now, or fails, return `message` with the reason added.
        """
        if not self.restartable:
            if self.restarts > 0:
                return f"{message}; it had been started again in this step"
            return message  # the engine has had no weights yet
        # True in all processes if a signal has come to one of them: the run stops anyway.
        if self.stop.agree(self.stop.name is not None):
            return message
        problem = await self._restart()
        if problem is None:
            raise EngineRestarted(f"{message}; it was started again")
        return f"{message}; it was started again, and then {problem}"

    async def _restart(self) -> str | None:
        """Start the rollout process again; return, in all processes, why that failed, or None."""
        self.restartable = False  # until a step succeeds: at most one restart in a step
        self.restarts += 1
        problems = []
        if self.process is not None:  # in the first process, which starts it; the others wait
            try:
                await self.process.restart()
            except RolloutsDead as error:  # its message is a sentence without the class's name
                problems = [str(error)]
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
        what = "the rollout process that was started again"
        shared_problems = self.world.exchange(problems, what, patient=True)
        return shared_problems[0] if shared_problems else None
