"""The thread that steps an engine: calls that are cancelled, commands that raise."""

from __future__ import annotations

from threading import Event

from agenttrain.engine.stepper import Stepper


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
    stepper = Stepper(engine, name="test")
    stepper.post(lambda: (gate.wait(10), None)[1])
    cancelled = stepper.call(lambda: ran.append(1))
    assert cancelled.cancel()
    gate.set()
    assert stepper.call(lambda: 7).result(10) == 7
    assert (ran, engine.failed, stepper.dead) == ([], [], None)
    stepper.close()


def test_a_command_that_raises_is_a_death_and_the_later_ones_are_run() -> None:
    engine, gate = Idle(), Event()
    stepper = Stepper(engine, name="test")
    stepper.post(lambda: (gate.wait(10), None)[1])
    stepper.post(lambda: {}["missing"])
    later = stepper.call(lambda: 7)
    gate.set()
    assert later.result(10) == 7
    assert [type(error) for error in engine.failed] == [KeyError]
    assert isinstance(stepper.dead, KeyError)
    stepper.close()
