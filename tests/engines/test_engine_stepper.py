"""The thread that steps an engine: calls that are cancelled, commands that raise."""

from __future__ import annotations

import signal
import threading
import time
from threading import Event

import pytest

from agenttrain.engines.vllm.driver import Stepper


class Idle:
    """An engine with nothing to do."""

    def __init__(self) -> None:
        self.failed: list[BaseException] = []

    def busy(self) -> bool:
        return False

    def step(self) -> None:
        raise AssertionError("there is nothing to do")

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


def test_a_call_that_is_cancelled_before_its_turn_is_not_run() -> None:
    engine, gate, ran = Idle(), Event(), []
    stepper = Stepper(lambda: engine, name="test")
    stepper.post(lambda: (gate.wait(10), None)[1])
    cancelled = stepper.call(lambda: ran.append(1))
    assert cancelled.cancel()
    gate.set()
    assert stepper.call(lambda: 7).result(10) == 7
    assert (ran, engine.failed, stepper.dead) == ([], [], None)
    stepper.close()


def test_a_command_that_raises_is_a_death_and_the_later_ones_are_run() -> None:
    engine, gate = Idle(), Event()
    stepper = Stepper(lambda: engine, name="test")
    stepper.post(lambda: (gate.wait(10), None)[1])
    stepper.post(lambda: {}["missing"])
    later = stepper.call(lambda: 7)
    gate.set()
    assert later.result(10) == 7
    assert [type(error) for error in engine.failed] == [KeyError]
    assert isinstance(stepper.dead, KeyError)
    stepper.close()


def test_the_thread_that_steps_an_engine_has_built_it() -> None:
    class Built(Idle):
        def __init__(self) -> None:
            super().__init__()
            self.thread = threading.get_ident()

    stepper = Stepper(Built, name="test")
    assert stepper.engine.thread == stepper.call(threading.get_ident).result(10)
    assert stepper.engine.thread != threading.get_ident()
    stepper.close()


def test_what_a_build_raises_is_raised_where_it_was_asked_for() -> None:
    def build() -> Idle:
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        Stepper(build, name="broken")
    assert "broken" not in [thread.name for thread in threading.enumerate()]


def test_an_interrupt_ends_the_build() -> None:
    """Only the main thread hears signals; the other one would go on while the process ends."""
    begun, ended = Event(), Event()

    def build() -> Idle:
        begun.set()
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    def interrupt() -> None:
        begun.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # A shell ignores the signal on behalf of what it starts in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            Stepper(build, name="slow")
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.is_set()
