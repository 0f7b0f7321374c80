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
from agenttrain.runs.rollout_messages import CODEC, Answered, Begin, Failed, RolloutStatus, Stop
from agenttrain.runs.rollout_process import STACKS
from agenttrain.training.world import PeerFailed, World
from agenttrain.utils.child_process import ChildProcess
from agenttrain.utils.signals import StopRequest

MODULE = "agenttrain.runs.rollout_process"
STACKS_S = 1.0
"""Seconds for the stacks of its threads."""
END_S = 30.0
"""Seconds that the rollout process has to close its engine and tools before it is killed."""


class RolloutsDead(EngineDead):
    """The rollout process has ended, and the run cannot go on."""


class PeersRolloutsDead(RolloutsDead, PeerFailed):
    """The first training process has raised EngineDead for a request of all."""


class RolloutProcess:
    """The process that makes the rollouts, as the process that starts it sees it."""

    def __init__(self, log: Path) -> None:
        """Start it; each line that it prints is printed here too, and appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self.in_flight = InFlight()
        """Its `progress` is that of the rollouts there."""
        self.progress: Callable[[int, int], None] | None = None
        """That of a Collector."""
        self._begin: Begin | None = None
        self._start()

    def _start(self) -> None:
        self._connection, end = socket.socketpair()
        command = [sys.executable, "-u", "-m", MODULE, str(end.fileno()), json.dumps(sys.path)]
        with end:
            # Without a keeper: its servers' wrappers outlive it to clean up, or to serve the next.
            self._child = ChildProcess(
                command, keeper=False, pass_fds=[end.fileno()], print_line=self._print
            )
        self._channel: Channel | None = None
        self._waiting: list[Waiting] = []
        self._ready = False
        """It has answered a request: it now notices Stop at any time."""

    async def restart(self) -> None:
        """Start it again, by its first request, without weights. Raises as `answer`."""
        assert self._begin is not None, "it has begun before"
        if self._channel is not None:
            self._channel.close()
        self._child.kill()
        self._start()
        await self.ask(self._begin)

    def waiting(self) -> list[Waiting]:
        """Return the rollouts in flight and what each waited for some tenths of a second ago."""
        return self._waiting

    def print_stacks(self) -> None:
        """Have it print the stacks of its threads, and wait until they are printed here."""
        with suppress(OSError):
            self._child.signal(STACKS)
            time.sleep(STACKS_S)

    async def send(self, request: Begin | Stop | Any) -> None:
        """Send a request; raises RolloutsDead."""
        if isinstance(request, Begin):
            self._begin = request
        try:
            if self._channel is None:
                self._channel = await Channel.over(self._connection, CODEC)
            await self._channel.send(request)
        except ChannelClosed as error:
            raise await self._gone() from error

    async def answer(self) -> Any:
        """Return the answer to the last request. Raises RolloutsDead, or its error."""
        assert self._channel is not None, "a request was sent"
        while True:
            try:
                message = await self._channel.receive()
            except ChannelClosed as error:
                raise await self._gone() from error
            if isinstance(message, Answered):
                self._ready = True
                return message.value
            if isinstance(message, Failed):
                raise message.raised()
            assert isinstance(message, RolloutStatus)
            self.in_flight.progress, self._waiting = message.progress, message.waiting
            if self.progress is not None and message.total:
                self.progress(message.finished, message.total)

    async def ask(self, request: Any) -> Any:
        """Send a request and return its answer; raises as these do."""
        await self.send(request)
        return await self.answer()

    async def aclose(self) -> None:
        """End it, also in the middle of a request, with its engine and its tools."""
        if self._channel is None:
            self._connection.close()
        else:
            with suppress(RolloutsDead):
                await self.send(Stop())
            self._channel.close()
        await asyncio.to_thread(self._child.ended, END_S if self._ready else 0.0)
        self._child.kill()

    async def _gone(self) -> RolloutsDead:
        end = await asyncio.to_thread(self._child.gone)
        log = f" (log: {self._log})" if self._log.exists() else ""
        return RolloutsDead(f"the rollout process{log} {end}")

    def _print(self, line: str) -> None:
        with suppress(OSError), self._log.open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")
        print(line, file=sys.stderr, flush=True)


@dataclass(slots=True, kw_only=True)
class Rollouts:
    """The rollout process, for all training processes. It is started again once a step."""

    process: RolloutProcess | None
    """None in all processes but the first."""
    world: World
    stop: StopRequest
    restartable: bool = False
    """The next time that it ends it is started again."""
    restarts: int = 0
    """Times that it was started again."""

    async def ask(self, request: Any, what: str) -> Any:
        """Return the answer in the first process, None in the others; a signal cuts it short.

        `what` names the work in errors, which are raised in all processes; EngineDead and
        EngineRestarted everywhere. Raises Preempted.
        """
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
        """Return the answer in all processes, or raise a `failure` in all, without asking."""
        value = None
        if self.process is not None and failure is None:
            try:
                value = await self.process.ask(request)
            except Exception as error:
                failure = error
        await self.meet(what, failure)
        return self.world.broadcast(value, what)

    async def meet(self, what: str, failure: Exception | None) -> None:
        """Raise the first process's failure in all processes.

        A rollout process that has ended is started again, if that is due; then all raise
        EngineRestarted. The others raise EngineDead as such too: all of them then save the last
        finished step.
        """
        dead = failure if isinstance(failure, EngineDead) else None
        ends = [] if dead is None else [(str(dead), isinstance(dead, RolloutsDead))]
        ends = self.world.exchange(ends, what, failure if dead is None else None, patient=True)
        if not ends:
            return
        message, ended = ends[0]
        if ended and self.restartable and not self.stop.agree(self.stop.name is not None):
            problem = await self._restart()
            if problem is None:
                raise EngineRestarted(f"{message}; it was started again")
            message = f"{message}; it was started again, and then {problem}"
        elif ended and self.restarts and not self.restartable:
            message = f"{message}; it had been started again in this step"
        if ended:
            dead = dead and RolloutsDead(message)
        raised = dead or PeersRolloutsDead(message)
        raised.everywhere = True
        raise raised

    async def _restart(self) -> str | None:
        """Start the rollout process again; return, in all processes, why it does not run."""
        self.restartable = False
        self.restarts += 1
        problems = []
        if self.process is not None:
            try:
                await self.process.restart()
            except RolloutsDead as error:
                problems = [str(error)]
            except Exception as error:
                problems = [f"{type(error).__name__}: {error}"]
        what = "the rollout process that was started again"
        return next(iter(self.world.exchange(problems, what, patient=True)), None)
