"""One thread that builds an engine and advances it step by step; nothing else touches it.

CUDA's current device and stream belong to a thread: an engine that is built in one thread and
stepped in another launches kernels on two devices, in two orders.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, Protocol, TypeVar

from agenttrain.threads import current_gpu, use_gpu

Value = TypeVar("Value")
WAKE_S = 0.5
"""How long a wait for a build keeps the interpreter from its signals."""
INTERRUPT_S = 5.0
"""Seconds that an interrupted build has to come to its end."""


class Steppable(Protocol):
    """An engine that the thread drives."""

    def busy(self) -> bool:
        """Return True if a step would do anything."""
        ...

    def step(self) -> None:
        """Advance every request, and deliver those that are done."""
        ...

    def fail(self, error: BaseException) -> None:
        """Fail every waiting request: a step raised, and there will be no further one."""
        ...


Engine = TypeVar("Engine", bound=Steppable)


class Stepper(Generic[Engine]):
    """Builds an engine, and runs commands between its steps in the order of their arrival.

    All of it in one thread, on the GPU of the thread that made the Stepper.
    """

    engine: Engine
    """The engine that was built; use it in commands only."""

    def __init__(self, build: Callable[[], Engine], *, name: str) -> None:
        """Wait for `build`, in the new thread; raises what it raises."""
        self._wake = threading.Condition()
        self._commands: list[Callable[[], None]] = []
        self._closed = False
        self.dead: BaseException | None = None
        """The error that a step raised; nothing runs any more."""
        built: Future[None] = Future()
        arguments = (build, built, current_gpu())
        self._thread = threading.Thread(target=self._live, args=arguments, name=name, daemon=True)
        try:
            self._thread.start()
            # A signal that comes just before a wait does not end it: it must not last for ever.
            while not wait((built,), WAKE_S).done:
                pass
            built.result()
        except BaseException as error:
            if not built.done():  # Ctrl-C or a signal, which only the main thread hears
                # Raise it in the thread too, as if this one had built the engine.
                ident = ctypes.c_ulong(self._thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(type(error)))
                self._thread.join(INTERRUPT_S)
            raise

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

    def _live(self, build: Callable[[], Engine], built: Future[None], gpu: int | None) -> None:
        """Build the engine and drive it: the thread's life."""
        try:
            use_gpu(gpu)
            self.engine = build()
        except BaseException as error:
            built.set_exception(error)
            return
        built.set_result(None)
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
                    self.engine.step()
            except BaseException as error:
                self.dead = error
                self.engine.fail(error)
                with self._wake:  # these are run all the same, so that nobody waits for them
                    self._commands[:0] = commands

    def _moving(self) -> bool:
        return self.dead is None and self.engine.busy()
