"""One thread that owns an engine which is advanced step by step, and nothing else touches it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

Value = TypeVar("Value")


class Steppable(Protocol):
    """What the thread drives."""

    def busy(self) -> bool:
        """Whether a step would do anything."""
        ...

    def step(self) -> None:
        """Advance every request, and deliver those that are done."""
        ...

    def fail(self, error: BaseException) -> None:
        """A step raised: whoever waits is told, and there will be no further step."""
        ...


class Stepper:
    """Runs commands between the steps of an engine, in the order in which they were given."""

    def __init__(self, engine: Steppable, *, name: str) -> None:
        self._engine = engine
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._closed = False
        self.dead: BaseException | None = None
        """What a step raised; nothing runs any more."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        """Run `command` before the next step; what it raises ends the engine, as in a step."""
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def call(self, function: Callable[[], Value]) -> Future[Value]:
        """Run `function` before the next step; its result, or what it raised.

        Not run at all if the future is cancelled before.
        """
        future: Future[Value] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self.post(run)
        return future

    def close(self) -> None:
        """End the thread after the commands that were given."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._commands or self._closed or self._moving()):
                    self._wake.wait()
                commands, self._commands = self._commands, []
                if self._closed and not commands:
                    return
            try:
                while commands:
                    commands.pop(0)()
                if self._moving():
                    self._engine.step()
            except BaseException as error:
                self._die(error, commands)

    def _die(self, error: BaseException, commands: list[Callable[[], None]]) -> None:
        """Tell all who wait; `commands` were given and are run, so that nobody waits for them."""
        self.dead = error
        self._engine.fail(error)
        with self._wake:
            self._commands[:0] = commands

    def _moving(self) -> bool:
        return self.dead is None and self._engine.busy()
